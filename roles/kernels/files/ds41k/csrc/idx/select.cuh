// Exact selection of the first k of many keys, for one thread block: what rowtopk, cand_blocks and cand_topk share.
//
// One order everywhere: a larger key precedes a smaller one, and of equal keys the one with the smaller index.
//
// What makes it cheap is that the first k elements of a row lie in the first k *groups* of the row, when a group's key is
// the largest of its elements' keys and groups follow the same order: an element outside of them is preceded by one element
// of each of those k groups. So a row is read once, only the groups' keys are kept (1/8 of the row, or 1/64, or 1/512), k of
// them are chosen, and of the chosen ones alone the eight parts are read again, until the parts are elements.

#pragma once

#include <cstdint>

namespace ds41k {

constexpr int kFanOut = 8;       // parts of a group
constexpr int kBins = 2048;      // of one pass of the radix search: 11 bits
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr uint32_t kNoKey = 0;   // nothing lies there; precedes nothing and is never chosen
constexpr uint32_t kNanKey = 1;  // below the key of -inf
constexpr uint32_t kInfKey = 0xff800000u;

// Keys as unsigned integers in the order of the floats; both zeros are equal, NaN is the lowest.
__device__ __forceinline__ uint32_t order_key(float value) {
  if (value != value) return kNanKey;
  const uint32_t bits = value == 0.0f ? 0u : __float_as_uint(value);
  return (bits >> 31) ? ~bits : (bits | 0x80000000u);
}

// fmaxf gives the number when one side is NaN; this one gives NaN.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float out;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
  return out;
}

// Take every key >= from, and the first `ties` keys that equal from - 1.
struct Cut {
  uint32_t from;
  int ties;
};

struct SelectShared {
  uint32_t bins[kBins];
  uint32_t low[32];
  uint32_t high[32];
  uint32_t sums[32];
  uint32_t counts[32];
  uint32_t bin;
  uint32_t rest;
  uint32_t inside;
};

// Inclusive sum over the lanes up to and with this one.
__device__ __forceinline__ uint32_t lane_scan(uint32_t value, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_up_sync(kAllLanes, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

// The keys that a thread has seen.
struct Range {
  uint32_t low = ~0u;
  uint32_t high = kNoKey;

  __device__ __forceinline__ void add(uint32_t key) {
    if (key != kNoKey) low = min(low, key);
    high = max(high, key);
  }
};

// Shares what each thread has seen with find_cut, and makes its bins ready. A barrier must follow.
template <int kThreads>
__device__ void publish(Range range, SelectShared& shared) {
  const uint32_t low = __reduce_min_sync(kAllLanes, range.low), high = __reduce_max_sync(kAllLanes, range.high);
  if (threadIdx.x % 32 == 0) {
    shared.low[threadIdx.x / 32] = low;
    shared.high[threadIdx.x / 32] = high;
  }
  for (int i = threadIdx.x; i < kBins / 4; i += kThreads) reinterpret_cast<uint4*>(shared.bins)[i] = make_uint4(0, 0, 0, 0);
}

// The cut that leaves the first k of keys[0, count), or all of them when fewer than k are there.
// Keys below `floor` need not be looked at: the caller knows that k are not below it, or that it is 1.
// All threads call it, after publish() of the same keys and a barrier.
template <int kThreads>
__device__ Cut find_cut(const uint32_t* keys, int count, int k, uint32_t floor, SelectShared& shared) {
  static_assert(kBins % kThreads == 0 && kThreads % 32 == 0);
  constexpr int kWarps = kThreads / 32;
  constexpr int kOwn = kBins / kThreads;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;

  // The range that the keys really take: bins over it separate far more than the top 11 bits of a float would.
  uint32_t low = __reduce_min_sync(kAllLanes, lane < kWarps ? shared.low[lane] : ~0u);
  const uint32_t high = __reduce_max_sync(kAllLanes, lane < kWarps ? shared.high[lane] : 0u);
  if (high == kNoKey) return {1, 0};
  low = max(low, floor);

  uint32_t limit = high - low;  // of key - low, inclusive
  int shift = max(0, 32 - __clz(limit) - 11);
  uint32_t need = k;
  while (true) {
    for (int i = thread; i < count; i += kThreads) {
      const uint32_t key = keys[i], offset = key - low;
      if (key >= low && offset <= limit) atomicAdd(&shared.bins[offset >> shift], 1u);
    }
    __syncthreads();
    // From the highest bin down: thread 0 owns the highest kOwn bins.
    const int first = kBins - (thread + 1) * kOwn;
    uint32_t own[kOwn], sum = 0;
#pragma unroll
    for (int i = 0; i < kOwn; i += 2) {
      const uint2 two = *reinterpret_cast<const uint2*>(shared.bins + first + i);
      own[kOwn - 1 - i] = two.x;
      own[kOwn - 2 - i] = two.y;
      sum += two.x + two.y;
    }
    uint32_t upto = lane_scan(sum, lane);
    if (lane == 31) shared.sums[warp] = upto;
    __syncthreads();
    const uint32_t warps = lane_scan(lane < kWarps ? shared.sums[lane] : 0u, lane);
    const uint32_t total = __shfl_sync(kAllLanes, warps, kWarps - 1);
    const uint32_t before = __shfl_sync(kAllLanes, warps, max(0, warp - 1));
    if (total <= need) return {floor > 1 ? low : 1, 0};  // no choice to make: only possible in the first pass
    if (warp > 0) upto += before;
    uint32_t above = upto - sum;
    if (above < need && need <= upto) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        if (above < need && need <= above + own[i]) {
          shared.bin = first + kOwn - 1 - i;
          shared.rest = need - above;
          shared.inside = own[i];
        }
        above += own[i];
      }
    }
    __syncthreads();
    low += shared.bin << shift;
    need = shared.rest;
    const uint32_t inside = shared.inside;
    if (inside == need) return {low, 0};
    if (shift == 0) return {low + 1, static_cast<int>(need)};
    limit = (1u << shift) - 1;
    shift = max(0, shift - 11);
    for (int i = thread; i < kBins / 4; i += kThreads) reinterpret_cast<uint4*>(shared.bins)[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
  }
}

// Calls take(rank, position) for each chosen key; ranks ascend with positions, from 0. Returns how many were chosen.
template <int kThreads, bool kTies, typename Take>
__device__ int emit_cut(const uint32_t* keys, int count, Cut cut, SelectShared& shared, Take take) {
  constexpr int kWarps = kThreads / 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t ties = cut.ties, tie = cut.from - 1;
  // Each warp has a range of its own, so ranks need one exchange between warps and none within the walk.
  const int share = ((count + 31) / 32 + kWarps - 1) / kWarps * 32;
  const int begin = warp * share, end = min(count, begin + share);
  uint32_t packed = 0;  // of this lane; above the cut in the lower half, ties in the upper: there are at most 16,384 keys
  for (int at = begin + lane; at < end; at += 32) {
    const uint32_t key = keys[at];
    packed += key >= cut.from;
    if (kTies) packed += (key == tie) << 16;
  }
  packed = __reduce_add_sync(kAllLanes, packed);
  if (lane == 0) shared.counts[warp] = packed;
  __syncthreads();
  const uint32_t upto = lane_scan(lane < kWarps ? shared.counts[lane] : 0u, lane);
  const uint32_t all = __shfl_sync(kAllLanes, upto, kWarps - 1);
  const uint32_t before = __shfl_sync(kAllLanes, upto, max(0, warp - 1));
  uint32_t rank = warp > 0 ? before & 0xffffu : 0u, tie_rank = warp > 0 ? before >> 16 : 0u;
  const unsigned lower = (1u << lane) - 1;
  for (int base = begin; base < end; base += 32) {
    const uint32_t key = base + lane < end ? keys[base + lane] : kNoKey;
    const bool is_taken = key >= cut.from;
    const unsigned taken = __ballot_sync(kAllLanes, is_taken);
    if constexpr (kTies) {
      const bool is_tied = key == tie;
      const unsigned tied = __ballot_sync(kAllLanes, is_tied);
      const uint32_t own = rank + __popc(taken & lower), own_tie = tie_rank + __popc(tied & lower);
      if (is_taken || (is_tied && own_tie < ties)) take(own + min(own_tie, ties), base + lane);
      tie_rank += __popc(tied);
    } else if (is_taken) {
      take(rank + __popc(taken & lower), base + lane);
    }
    rank += __popc(taken);
  }
  return (all & 0xffffu) + min(all >> 16, ties);
}

template <int kThreads, typename Take>
__device__ int emit(const uint32_t* keys, int count, Cut cut, SelectShared& shared, Take take) {
  return cut.ties > 0 ? emit_cut<kThreads, true>(keys, count, cut, shared, take)
                      : emit_cut<kThreads, false>(keys, count, cut, shared, take);
}

// One row of logits, of which columns [0, length) count.
struct Row {
  const float* data;
  int length;
};

// kVector: 16-byte loads, which base and row stride must allow.
template <bool kVector>
__device__ __forceinline__ float4 load_four(const float* at) {
  if constexpr (kVector) {
    return __ldg(reinterpret_cast<const float4*>(at));
  } else {
    return make_float4(__ldg(at), __ldg(at + 1), __ldg(at + 2), __ldg(at + 3));
  }
}

// Writes the keys of groups of kGroup columns to keys[0, ...).
//
// kChunk = 0: of all groups of the row; keys[g] is the group of columns [g * kGroup, (g + 1) * kGroup).
// kChunk > 0: of the parts of chosen chunks of kChunk columns; keys[c * kChunk / kGroup + p] is part p of chunk chunks[c].
// A group's key is the largest of its columns' keys. With kPinned (candidate blocks) a group with a NaN, and the newest, get
// the key of +inf. Groups past the row's end get kNoKey.
//
// Warp `warp` of `warps` does its share; no barrier in here. Returns the range of the keys that this thread wrote.
template <int kGroup, int kChunk, int kUnroll, bool kVector, bool kPinned>
__device__ Range group_keys(Row row, const int* chunks, int chunk_count, uint32_t* keys, int warp, int warps) {
  static_assert(kGroup == 1 || kGroup == 8 || kGroup == 64 || kGroup == 512);
  static_assert(kGroup != 512 || kUnroll % 4 == 0);
  constexpr int kStep = kUnroll * 128;  // columns that a warp has in flight
  constexpr float kNegInf = -__builtin_inff();
  const int lane = threadIdx.x % 32;
  const int end = kChunk > 0 ? chunk_count * kChunk : row.length;
  Range range;
  for (int base = warp * kStep; base < end; base += warps * kStep) {
    float4 quads[kUnroll];
    int columns[kChunk > 0 ? kUnroll : 1];
    const bool whole = kChunk == 0 && base + kStep <= row.length;
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      const int at = base + j * 128 + lane * 4;
      int column = at;
      if constexpr (kChunk > 0) {
        // Any number may stand in chunks: one that is no chunk of the row has no columns.
        const int chunk = at < end ? chunks[at / kChunk] : -1;
        const bool inside = chunk >= 0 && chunk <= (row.length - 1) / kChunk;
        column = inside ? chunk * kChunk + at % kChunk : row.length;
      }
      if constexpr (kChunk > 0) columns[j] = column;
      if (whole || column + 4 <= row.length) {
        quads[j] = load_four<kVector>(row.data + column);
      } else {
        // Past the end: -inf changes no maximum, and a group that is all past the end is found by its column. NaN instead
        // where NaN changes none.
        const float none = kPinned ? kNegInf : __uint_as_float(0x7fffffffu);
        quads[j].x = column < row.length ? row.data[column] : none;
        quads[j].y = column + 1 < row.length ? row.data[column + 1] : none;
        quads[j].z = column + 2 < row.length ? row.data[column + 2] : none;
        quads[j].w = none;
      }
    }
    if constexpr (kGroup == 1) {
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) {
        const int at = base + j * 128 + lane * 4;
        const int column = kChunk > 0 ? columns[kChunk > 0 ? j : 0] : at;
        if (at >= end) continue;
        uint4 four;
        four.x = column < row.length ? order_key(quads[j].x) : kNoKey;
        four.y = column + 1 < row.length ? order_key(quads[j].y) : kNoKey;
        four.z = column + 2 < row.length ? order_key(quads[j].z) : kNoKey;
        four.w = column + 3 < row.length ? order_key(quads[j].w) : kNoKey;
        *reinterpret_cast<uint4*>(keys + at) = four;
        range.add(four.x);
        range.add(four.y);
        range.add(four.z);
        range.add(four.w);
      }
    } else {
      const auto larger = [](float a, float b) { return kPinned ? max_or_nan(a, b) : fmaxf(a, b); };
      constexpr int kQuads = kGroup == 512 ? 4 : 1;  // of one lane that are in one group
      constexpr int kLanes = kGroup / 4 / kQuads;    // that are in one group
#pragma unroll
      for (int j = 0; j < kUnroll; j += kQuads) {
        float value = larger(larger(quads[j].x, quads[j].y), larger(quads[j].z, quads[j].w));
#pragma unroll
        for (int i = 1; i < kQuads; ++i) {
          const float4 more = quads[j + i];
          value = larger(value, larger(larger(more.x, more.y), larger(more.z, more.w)));
        }
#pragma unroll
        for (int step = 1; step < kLanes; step *= 2) {
          value = larger(value, __shfl_xor_sync(kAllLanes, value, step));
        }
        const int at = base + j * 128 + lane * 4;
        const int column = kChunk > 0 ? columns[kChunk > 0 ? j : 0] : at;
        if (lane % kLanes == 0 && at < end) {
          uint32_t key = order_key(value);
          if (kPinned && (key == kNanKey || row.length - 1 - column < kGroup)) key = kInfKey;
          if (column >= row.length) key = kNoKey;
          keys[at / kGroup] = key;
          range.add(key);
        }
      }
    }
  }
  return range;
}

}  // namespace ds41k
