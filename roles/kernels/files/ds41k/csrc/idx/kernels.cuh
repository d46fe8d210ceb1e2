// Host side of the indexer kernels: what the registration calls. No torch in here.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace ds41k {

struct Logits {
  const float* data;
  int64_t stride;  // between rows, in elements
  int rows;
  int width;
};

struct Lengths {
  const int* data;
  int64_t stride;
};

struct Indices {
  int* data;
  int64_t stride;
  int width;
};

constexpr int kMaxRows = 8192;
constexpr int kMaxWidth = 1 << 22;  // 8,192 groups of 512 columns
constexpr int kMaxBlocks = 2048;    // candidate blocks of a row
constexpr int kBlockSize = 8;       // columns of a candidate block

// Makes every kernel usable on the device that is current. Not while a stream is captured: before.
cudaError_t prepare_device();

cudaError_t launch_rowtopk(Logits logits, Lengths lengths, Indices out, int k, cudaStream_t stream);
cudaError_t launch_cand_blocks(Logits logits, Lengths lengths, Indices blocks, cudaStream_t stream);
cudaError_t launch_cand_topk(Logits logits, Lengths lengths, Indices blocks, Indices out, int k, cudaStream_t stream);

}  // namespace ds41k
