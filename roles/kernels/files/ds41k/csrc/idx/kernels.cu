// rowtopk, cand_blocks and cand_topk. See select.cuh for the idea and docs/kernels.md for contracts and figures.

#include <cooperative_groups.h>

#include <atomic>
#include <mutex>

#include "kernels.cuh"
#include "select.cuh"

namespace ds41k {
namespace {

namespace cg = cooperative_groups;

// Threads of a block, as measured best: smaller blocks when rows queue for multiprocessors, larger ones when a row has one
// or more to itself.
constexpr int kQueueThreads = 256;
constexpr int kThreads512 = 512;
constexpr int kFewThreads = 1024;
// All blocks of a kernel that are on one multiprocessor have this many threads together: what 64 registers a thread allow.
constexpr int kResidentThreads = 1024;
constexpr int kMostClustered = 8;  // the largest cluster that every chip with clusters has
constexpr int kDevices = 64;

// Writes 0, 1, ... count - 1 and -1 up to width: every element is chosen.
template <int kThreads>
__device__ void take_all(int* out, int count, int width) {
  for (int i = threadIdx.x; i < width; i += kThreads) out[i] = i < count ? i : -1;
}

// Parts of the chosen chunks, one step finer; see group_keys.
template <int kThreads, bool kVector, bool kPinned>
__device__ Range finer_keys(Row row, int group, const int* chunks, int count, uint32_t* keys) {
  const int warp = threadIdx.x / 32, warps = kThreads / 32;
  if (group == 64) return group_keys<64, 512, 4, kVector, kPinned>(row, chunks, count, keys, warp, warps);
  if (kPinned || group == 8) return group_keys<8, 64, 4, kVector, kPinned>(row, chunks, count, keys, warp, warps);
  if constexpr (!kPinned) return group_keys<1, 8, 2, kVector, kPinned>(row, chunks, count, keys, warp, warps);
}

// No element below this can be among the first k, once the cut of the k first groups is known: each of those has one that is
// not. 1, the lowest key there is, when there were no more than k groups.
__device__ __forceinline__ uint32_t floor_of(Cut cut) { return cut.ties > 0 ? cut.from - 1 : cut.from; }

// kPinned: candidate blocks of 8 columns, out = block ids. Otherwise columns, out = column numbers.
// The blocks of a cluster share one row; the first of them chooses. `ahead`: read the row's begin before its length is known.
template <int kThreads, bool kVector, bool kPinned>
__global__ void __launch_bounds__(kThreads, kResidentThreads / kThreads)
    select_rows(Logits logits, Lengths lengths, Indices out, int k, int capacity, bool ahead) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<SelectShared*>(memory);
  auto* keys = reinterpret_cast<uint32_t*>(memory + (sizeof(SelectShared) + 15) / 16 * 16);
  int* chosen = reinterpret_cast<int*>(keys + capacity);
  int* chosen_before = chosen + k;

  const int part = static_cast<int>(cg::this_cluster().block_rank());
  const int parts = static_cast<int>(cg::this_cluster().num_blocks());
  const int at = blockIdx.x / parts;
  if (ahead) {
    const int column = (part * kThreads + static_cast<int>(threadIdx.x)) * 32;  // one line of 128 bytes
    if (column < min(logits.width, 8192)) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(logits.data + at * logits.stride + column));
    }
  }
  Row row{logits.data + at * logits.stride, min(max(lengths.data[at * lengths.stride], 0), logits.width)};
  int* target = out.data + at * out.stride;

  constexpr int kFinest = kPinned ? kBlockSize : 1;
  const int elements = (row.length + kFinest - 1) / kFinest;
  if (elements <= k) {
    if (part == 0) take_all<kThreads>(target, elements, k);
    return;
  }
  int group = kPinned || row.length > kFanOut * k ? kFanOut : 1;
  while ((row.length + group - 1) / group > capacity) group *= kFanOut;

  uint32_t* whose = keys;
  if (parts > 1) {
    // The first block's memory may be written to once that block runs.
    cg::this_cluster().sync();
    whose = cg::this_cluster().map_shared_rank(keys, 0);
  }
  const int warp = part * (kThreads / 32) + threadIdx.x / 32, warps = parts * (kThreads / 32);
  Range range;
  if (group == 8) {
    range = group_keys<8, 0, 4, kVector, kPinned>(row, nullptr, 0, whose, warp, warps);
  } else if (group == 64) {
    range = group_keys<64, 0, 4, kVector, kPinned>(row, nullptr, 0, whose, warp, warps);
  } else if (group == 512) {
    range = group_keys<512, 0, 4, kVector, kPinned>(row, nullptr, 0, whose, warp, warps);
  } else if constexpr (!kPinned) {
    range = group_keys<1, 0, 2, kVector, kPinned>(row, nullptr, 0, whose, warp, warps);
  }
  int count = (row.length + group - 1) / group;
  if (parts > 1) {
    cg::this_cluster().sync();
    if (part != 0) return;
    // The other blocks' keys are here, but not what they saw.
    for (int i = threadIdx.x; i < count; i += kThreads) range.add(keys[i]);
  }
  publish<kThreads>(range, shared);
  __syncthreads();

  uint32_t floor = 1;
  bool first = true;
  while (true) {
    const Cut cut = find_cut<kThreads>(keys, count, k, floor, shared);
    const bool last = group == kFinest;
    int* into = last ? target : chosen;
    const int found = emit<kThreads>(keys, count, cut, shared, [&](int rank, int position) {
      into[rank] = first ? position : chosen_before[position / kFanOut] * kFanOut + position % kFanOut;
    });
    if (last) {
      for (int i = found + threadIdx.x; i < k; i += kThreads) target[i] = -1;
      return;
    }
    __syncthreads();
    floor = floor_of(cut);
    group /= kFanOut;
    publish<kThreads>(finer_keys<kThreads, kVector, kPinned>(row, group, chosen, found, keys), shared);
    __syncthreads();
    count = found * kFanOut;
    int* swap = chosen;
    chosen = chosen_before;
    chosen_before = swap;
    first = false;
  }
}

// Columns of the candidate blocks alone: 32 bytes of each block are read, and nothing else of the row.
// Three thread blocks on a multiprocessor hide each other's barriers; 4-byte loads need more registers than that leaves.
template <int kThreads, bool kVector>
__global__ void __launch_bounds__(kThreads, kVector ? 3 : 2)
    select_candidates(Logits logits, Lengths lengths, Indices blocks, Indices out, int k, int capacity) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<SelectShared*>(memory);
  auto* keys = reinterpret_cast<uint32_t*>(memory + (sizeof(SelectShared) + 15) / 16 * 16);
  int* ids = reinterpret_cast<int*>(keys + capacity);
  int* chosen = ids + blocks.width;

  const int at = blockIdx.x;
  const Row row{logits.data + at * logits.stride, min(max(lengths.data[at * lengths.stride], 0), logits.width)};
  int* target = out.data + at * out.stride;
  const int warp = threadIdx.x / 32, warps = kThreads / 32;
  for (int i = threadIdx.x; i < blocks.width; i += kThreads) ids[i] = blocks.data[at * blocks.stride + i];
  __syncthreads();
  publish<kThreads>(group_keys<kBlockSize, kBlockSize, 2, kVector, false>(row, ids, blocks.width, keys, warp, warps), shared);
  __syncthreads();
  Cut cut = find_cut<kThreads>(keys, blocks.width, k, 1, shared);
  int found = emit<kThreads>(keys, blocks.width, cut, shared, [&](int rank, int position) { chosen[rank] = ids[position]; });
  __syncthreads();
  publish<kThreads>(finer_keys<kThreads, kVector, false>(row, 1, chosen, found, keys), shared);
  __syncthreads();
  const int count = found * kFanOut;
  cut = find_cut<kThreads>(keys, count, k, floor_of(cut), shared);
  found = emit<kThreads>(keys, count, cut, shared, [&](int rank, int position) {
    target[rank] = chosen[position / kFanOut] * kFanOut + position % kFanOut;
  });
  for (int i = found + threadIdx.x; i < k; i += kThreads) target[i] = -1;
}

int shared_bytes(int capacity, int numbers) {
  return static_cast<int>((sizeof(SelectShared) + 15) / 16 * 16) + (capacity + numbers) * 4;
}

struct Device {
  int processors = 0;
  bool cluster[kMostClustered + 1] = {};  // [n]: whether clusters of n blocks of select_rows can run
};

Device g_devices[kDevices];
std::atomic<bool> g_ready[kDevices];
std::mutex g_mutex;

using Select = void (*)(Logits, Lengths, Indices, int, int, bool);
using Candidates = void (*)(Logits, Lengths, Indices, Indices, int, int);

template <bool kPinned>
Select choose_select(bool vector, int threads) {
  if (!vector) return select_rows<kFewThreads, false, kPinned>;
  if (threads == kFewThreads) return select_rows<kFewThreads, true, kPinned>;
  // Candidate blocks need the shared memory of 2,048 x 8 keys: smaller blocks would not be more of them.
  if (!kPinned && threads == kQueueThreads) return select_rows<kPinned ? kThreads512 : kQueueThreads, true, kPinned>;
  return select_rows<kThreads512, true, kPinned>;
}

// How many threads the kernel that choose_select() returns has.
template <bool kPinned>
int threads_for(bool vector, int rows, int processors) {
  if (!vector || rows * 4 <= processors) return kFewThreads;
  return !kPinned && rows >= 4 * processors ? kQueueThreads : kThreads512;
}

Candidates choose_candidates(bool vector) {
  return vector ? select_candidates<kThreads512, true> : select_candidates<kThreads512, false>;
}

bool aligned(Logits logits) {
  return reinterpret_cast<uintptr_t>(logits.data) % 16 == 0 && logits.stride % 4 == 0;
}

cudaLaunchConfig_t config_of(int grid, int threads, int bytes, cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  return config;
}

cudaLaunchAttribute cluster_of(int size) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = size;
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  return attribute;
}

const Device* device_of(cudaError_t& error) {
  int number = 0;
  error = cudaGetDevice(&number);
  if (error != cudaSuccess) return nullptr;
  if (number >= kDevices) {
    error = cudaErrorInvalidDevice;
    return nullptr;
  }
  if (!g_ready[number].load(std::memory_order_acquire)) {
    error = prepare_device();
    if (error != cudaSuccess) return nullptr;
  }
  return &g_devices[number];
}

template <bool kPinned>
cudaError_t launch_select(Logits logits, Lengths lengths, Indices out, int k, cudaStream_t stream) {
  if (logits.rows == 0) return cudaSuccess;
  cudaError_t error;
  const Device* device = device_of(error);
  if (device == nullptr) return error;
  // What is launched depends on the shapes alone, never on the lengths: a captured graph serves every length.
  const bool few = logits.rows <= device->processors;
  int capacity = 8192;
  while (capacity < kFanOut * k || (few && capacity < 16384)) capacity *= 2;
  const int bytes = shared_bytes(capacity, 2 * k);
  const bool vector = aligned(logits);
  const int threads = threads_for<kPinned>(vector, logits.rows, device->processors);
  int cluster = 1;
  // Shorter rows than that are read in a moment, and choosing is the work of one block.
  if (logits.width > 4096) {
    while (cluster < kMostClustered && logits.rows * cluster * 2 <= device->processors) cluster *= 2;
    while (cluster > 1 && !device->cluster[cluster]) cluster /= 2;
  }
  cudaLaunchConfig_t config = config_of(logits.rows * cluster, threads, bytes, stream);
  cudaLaunchAttribute attribute = cluster_of(cluster);
  if (cluster > 1) {
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  return cudaLaunchKernelEx(&config, choose_select<kPinned>(vector, threads), logits, lengths, out, k, capacity, few);
}

}  // namespace

cudaError_t prepare_device() {
  int number = 0;
  cudaError_t error = cudaGetDevice(&number);
  if (error != cudaSuccess) return error;
  if (number >= kDevices) return cudaErrorInvalidDevice;
  std::lock_guard<std::mutex> lock(g_mutex);
  if (g_ready[number].load(std::memory_order_acquire)) return cudaSuccess;
  Device device;
  cudaFuncAttributes attributes{};
  error = cudaFuncGetAttributes(&attributes, select_rows<kQueueThreads, true, false>);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&device.processors, cudaDevAttrMultiProcessorCount, number);
  if (error != cudaSuccess) return error;
  const int most = shared_bytes(16384, 2 * kMaxBlocks);
  for (const bool vector : {false, true}) {
    for (const int threads : {kQueueThreads, kThreads512, kFewThreads}) {
      for (const Select kernel : {choose_select<false>(vector, threads), choose_select<true>(vector, threads)}) {
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
        if (error != cudaSuccess) return error;
      }
    }
  }
  for (const bool vector : {false, true}) {
    error = cudaFuncSetAttribute(choose_candidates(vector), cudaFuncAttributeMaxDynamicSharedMemorySize, most);
    if (error != cudaSuccess) return error;
  }
  for (int size = 2; size <= kMostClustered; size *= 2) {
    cudaLaunchConfig_t config = config_of(size, kFewThreads, most, nullptr);
    cudaLaunchAttribute attribute = cluster_of(size);
    config.attrs = &attribute;
    config.numAttrs = 1;
    int active = 0;
    // A chip that cannot do it says so here; its rows then have one block each, which chooses the same.
    if (cudaOccupancyMaxActiveClusters(&active, select_rows<kFewThreads, true, true>, &config) != cudaSuccess) {
      cudaGetLastError();
      active = 0;
    }
    device.cluster[size] = active > 0;
  }
  g_devices[number] = device;
  g_ready[number].store(true, std::memory_order_release);
  return cudaSuccess;
}

cudaError_t launch_rowtopk(Logits logits, Lengths lengths, Indices out, int k, cudaStream_t stream) {
  return launch_select<false>(logits, lengths, out, k, stream);
}

cudaError_t launch_cand_blocks(Logits logits, Lengths lengths, Indices blocks, cudaStream_t stream) {
  return launch_select<true>(logits, lengths, blocks, blocks.width, stream);
}

cudaError_t launch_cand_topk(Logits logits, Lengths lengths, Indices blocks, Indices out, int k, cudaStream_t stream) {
  if (logits.rows == 0) return cudaSuccess;
  cudaError_t error;
  if (device_of(error) == nullptr) return error;
  const int capacity = max((blocks.width + 3) / 4 * 4, kFanOut * min(k, blocks.width));
  const cudaLaunchConfig_t config =
      config_of(logits.rows, kThreads512, shared_bytes(capacity, blocks.width + k), stream);
  return cudaLaunchKernelEx(&config, choose_candidates(aligned(logits)), logits, lengths, blocks, out, k, capacity);
}

}  // namespace ds41k
