// The torch operators of libds41k_idx.so, on torch's stable ABI: one binary for every torch from 2.11 on.

#include <cuda_runtime.h>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <sstream>
#include <stdexcept>
#include <string>

#include "kernels.cuh"

// torch for CPUs does not have it, and must load this library all the same.
extern "C" __attribute__((weak)) int32_t aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

#ifndef DS41K_ARCHES
#error "DS41K_ARCHES: the architectures that this library is built for, as text"
#endif

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename... Parts>
[[noreturn]] void refuse(const char* op, const Parts&... parts) {
  std::ostringstream text;
  text << "ds41k::" << op << ": ";
  ((text << parts), ...);
  throw std::runtime_error(text.str());
}

std::string shape_of(const Tensor& tensor) {
  std::ostringstream text;
  text << "[";
  for (int64_t i = 0; i < tensor.dim(); ++i) text << (i ? ", " : "") << tensor.size(i);
  text << "]";
  return text.str();
}

void check_device(const char* op, cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
    int device = 0, major = 0, minor = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    refuse(op, "no kernel for sm_", major, minor, "; this library is built for ", DS41K_ARCHES,
           ": build it for this GPU (build.sh --arch), or leave the kernel's switch off");
  }
  refuse(op, "CUDA error ", static_cast<int>(error), " (", cudaGetErrorString(error), ")");
}

// The device of the tensors is current while this lives.
class DeviceGuard {
 public:
  DeviceGuard(const char* op, int device) {
    check_device(op, cudaGetDevice(&before_));
    if (before_ != device) {
      check_device(op, cudaSetDevice(device));
      changed_ = true;
    }
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(before_);
  }

 private:
  int before_ = 0;
  bool changed_ = false;
};

cudaStream_t current_stream(const char* op, int device) {
  void* stream = nullptr;
  if (aoti_torch_get_current_cuda_stream == nullptr || aoti_torch_get_current_cuda_stream(device, &stream) != 0) {
    refuse(op, "torch does not name its current CUDA stream; a torch with CUDA, 2.11 or newer, is needed");
  }
  return static_cast<cudaStream_t>(stream);
}

ds41k::Logits logits_of(const char* op, const Tensor& logits) {
  if (logits.scalar_type() != ScalarType::Float || logits.dim() != 2) {
    refuse(op, "logits must be float32 [rows, width]; this is a tensor of another type, or of shape ", shape_of(logits));
  }
  const int64_t rows = logits.size(0), width = logits.size(1);
  if (rows > ds41k::kMaxRows) refuse(op, "logits has ", rows, " rows, the limit is ", ds41k::kMaxRows, ": call it in parts");
  if (width > ds41k::kMaxWidth) refuse(op, "logits has ", width, " columns, the limit is ", ds41k::kMaxWidth);
  if (width > 1 && logits.stride(1) != 1) {
    refuse(op, "logits must have adjacent columns, its stride(1) is ", logits.stride(1), ": pass logits.contiguous()");
  }
  if (rows > 1 && logits.stride(0) < width) {
    refuse(op, "rows of logits overlap: stride(0) is ", logits.stride(0), " and the width ", width);
  }
  return {static_cast<const float*>(logits.const_data_ptr()), logits.stride(0), static_cast<int>(rows),
          static_cast<int>(width)};
}

void check_same_device(const char* op, const char* name, const Tensor& tensor, const Tensor& logits) {
  if (!tensor.is_cuda() || tensor.get_device_index() != logits.get_device_index()) {
    refuse(op, name, " must be on the same GPU as logits, which is on GPU ", logits.get_device_index());
  }
}

ds41k::Lengths lengths_of(const char* op, const Tensor& lens, const Tensor& logits) {
  const bool flat = lens.dim() == 1 || (lens.dim() == 2 && lens.size(1) == 1);
  if (lens.scalar_type() != ScalarType::Int || !flat || lens.size(0) != logits.size(0)) {
    refuse(op, "lens must be int32 [", logits.size(0), "] or [", logits.size(0),
           ", 1], one for each row of logits; this is a tensor of another type, or of shape ", shape_of(lens));
  }
  check_same_device(op, "lens", lens, logits);
  return {static_cast<const int*>(lens.const_data_ptr()), lens.stride(0)};
}

ds41k::Indices indices_of(const char* op, const char* name, const Tensor& tensor, const Tensor& logits) {
  if (tensor.scalar_type() != ScalarType::Int || tensor.dim() != 2 || tensor.size(0) != logits.size(0)) {
    refuse(op, name, " must be int32 [", logits.size(0), ", ...], one row for each row of logits; ",
           "this is a tensor of another type, or of shape ", shape_of(tensor));
  }
  const int64_t width = tensor.size(1);
  if (width > 1 && tensor.stride(1) != 1) {
    refuse(op, name, " must have adjacent columns, its stride(1) is ", tensor.stride(1));
  }
  if (tensor.size(0) > 1 && tensor.stride(0) < width) {
    refuse(op, "rows of ", name, " overlap: stride(0) is ", tensor.stride(0), " and the width ", width);
  }
  check_same_device(op, name, tensor, logits);
  return {static_cast<int*>(tensor.data_ptr()), tensor.stride(0), static_cast<int>(width)};
}

void check_k(const char* op, int64_t k, const ds41k::Indices& out) {
  if (k != 512 && k != 1024 && k != 2048) refuse(op, "k must be 512, 1024 or 2048, not ", k);
  if (out.width != k) refuse(op, "out must have k = ", k, " columns, not ", out.width, ": pass out[:, :k]");
}

void check_block_size(const char* op, int64_t block_size) {
  if (block_size != ds41k::kBlockSize) refuse(op, "block_size must be ", ds41k::kBlockSize, ", not ", block_size);
}

void check_blocks(const char* op, const ds41k::Indices& blocks) {
  if (blocks.width < 1 || blocks.width > ds41k::kMaxBlocks) {
    refuse(op, "blocks must have 1 to ", ds41k::kMaxBlocks, " columns, not ", blocks.width);
  }
}

void rowtopk(const Tensor& logits, const Tensor& lens, Tensor out, int64_t k) {
  const char* op = "rowtopk";
  const auto rows = logits_of(op, logits);
  const auto lengths = lengths_of(op, lens, logits);
  const auto target = indices_of(op, "out", out, logits);
  check_k(op, k, target);
  const int device = logits.get_device_index();
  const DeviceGuard guard(op, device);
  check_device(op, ds41k::launch_rowtopk(rows, lengths, target, static_cast<int>(k), current_stream(op, device)));
}

void cand_blocks(const Tensor& logits, const Tensor& lens, Tensor blocks, int64_t block_size) {
  const char* op = "cand_blocks";
  const auto rows = logits_of(op, logits);
  const auto lengths = lengths_of(op, lens, logits);
  const auto target = indices_of(op, "blocks", blocks, logits);
  check_blocks(op, target);
  check_block_size(op, block_size);
  const int device = logits.get_device_index();
  const DeviceGuard guard(op, device);
  check_device(op, ds41k::launch_cand_blocks(rows, lengths, target, current_stream(op, device)));
}

void cand_topk(const Tensor& logits, const Tensor& lens, const Tensor& blocks, Tensor out, int64_t block_size, int64_t k) {
  const char* op = "cand_topk";
  const auto rows = logits_of(op, logits);
  const auto lengths = lengths_of(op, lens, logits);
  const auto candidates = indices_of(op, "blocks", blocks, logits);
  const auto target = indices_of(op, "out", out, logits);
  check_blocks(op, candidates);
  check_block_size(op, block_size);
  check_k(op, k, target);
  const int device = logits.get_device_index();
  const DeviceGuard guard(op, device);
  check_device(op, ds41k::launch_cand_topk(rows, lengths, candidates, target, static_cast<int>(k),
                                           current_stream(op, device)));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(ds41k, m) {
  m.def("rowtopk(Tensor logits, Tensor lens, Tensor(a!) out, int k) -> ()");
  m.def("cand_blocks(Tensor logits, Tensor lens, Tensor(a!) blocks, int block_size) -> ()");
  m.def("cand_topk(Tensor logits, Tensor lens, Tensor blocks, Tensor(a!) out, int block_size, int k) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(ds41k, CUDA, m) {
  m.impl("rowtopk", TORCH_BOX(&rowtopk));
  m.impl("cand_blocks", TORCH_BOX(&cand_blocks));
  m.impl("cand_topk", TORCH_BOX(&cand_topk));
}
