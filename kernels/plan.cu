// Where the row of each choice stands: a stable counting sort of the choices by expert, and the capacity of experts.
//
// T tokens, K choices of a token, E experts (at most 1024), N = T * K choices; slot = t * K + k.  A choice with id < 0 was
// dropped and takes no part.  Choices are taken token-major (slot order), or choice-major (all first choices in token
// order, then all second ones), which is the order in which experts fill up.
//
//   count_choices: each block counts the choices of one tile              -> tile_starts [tiles, E]
//   scan_tiles:    one block turns counts into the first row of each tile -> tile_starts, offsets [E + 1], counts [E]
//   place_choices: each block ranks the choices of its tile again, and writes both maps (or drops what is over capacity)
//
// No sort, no wait of the host; integers only, so the order of blocks changes nothing.  The ids are read twice, the
// second time out of the L2 cache.
#include "platform.cuh"

namespace moeflow {

constexpr int kRounds = 8;                      // choices of one thread
constexpr int kTile = kThreads * kRounds;       // choices of one block
constexpr int kWarpTile = 32 * kRounds;         // consecutive choices of one warp
constexpr int kScanThreads = 1024;

// Slot of the choice that comes at `position` in the order.
template <bool kChoiceMajor>
__device__ __forceinline__ i64 slot_at(i64 position, i64 num_tokens, int top_k) {
  if constexpr (!kChoiceMajor) return position;
  return position % num_tokens * top_k + position / num_tokens;
}

// Expert of a choice, or -1.  An id that names no expert stops the kernel, as indexing does in torch.
template <bool kChoiceMajor>
__device__ __forceinline__ int expert_at(const i64* ids_TK, i64 position, i64 num_tokens, int top_k, int num_experts) {
  if (position >= num_tokens * top_k) return -1;
  const i64 id = ids_TK[slot_at<kChoiceMajor>(position, num_tokens, top_k)];
  if (id >= num_experts) trap("an expert id is not below the number of experts");
  return id < 0 ? -1 : static_cast<int>(id);
}

__device__ __forceinline__ i64 first_position(int warp, int lane) {
  return static_cast<i64>(blockIdx.x) * kTile + warp * kWarpTile + lane;
}

// Choices of each expert, of any order: int64 [E], zero before.
__global__ void __launch_bounds__(kThreads, kBlocks)
    histogram(const i64* __restrict__ ids_N, u64* __restrict__ counts_E, i64 num_choices, int num_experts) {
  MOEFLOW_DYNAMIC_SHARED(u32, counters);
  for (int e = threadIdx.x; e < num_experts; e += kThreads) counters[e] = 0;
  __syncthreads();
  const i64 step = static_cast<i64>(gridDim.x) * kThreads;
  // Lanes of a warp make the same turns, as they compare ids.
  for (i64 base = static_cast<i64>(blockIdx.x) * kThreads; base < num_choices; base += step) {
    const int expert = expert_at<false>(ids_N, base + threadIdx.x, num_choices, 1, num_experts);
    const u32 same = __match_any_sync(kAllLanes, expert);
    // One addition for all lanes of an expert: tokens may all choose the same.
    if (expert >= 0 && (same & lanes_below()) == 0) atomicAdd(&counters[expert], static_cast<u32>(__popc(same)));
  }
  __syncthreads();
  for (int e = threadIdx.x; e < num_experts; e += kThreads) {
    if (counters[e] > 0) atomicAdd(&counts_E[e], static_cast<u64>(counters[e]));
  }
}

template <bool kChoiceMajor>
__global__ void __launch_bounds__(kThreads, kBlocks)
    count_choices(const i64* __restrict__ ids_TK, int* __restrict__ tile_starts, i64 num_tokens, int top_k,
                  int num_experts) {
  MOEFLOW_DYNAMIC_SHARED(u32, counters);
  for (int e = threadIdx.x; e < num_experts; e += kThreads) counters[e] = 0;
  __syncthreads();
  const i64 first = first_position(threadIdx.x / 32, threadIdx.x % 32);
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int expert = expert_at<kChoiceMajor>(ids_TK, first + round * 32, num_tokens, top_k, num_experts);
    const u32 same = __match_any_sync(kAllLanes, expert);
    if (expert >= 0 && (same & lanes_below()) == 0) atomicAdd(&counters[expert], static_cast<u32>(__popc(same)));
  }
  __syncthreads();
  for (int e = threadIdx.x; e < num_experts; e += kThreads) {
    tile_starts[static_cast<i64>(blockIdx.x) * num_experts + e] = static_cast<int>(counters[e]);
  }
}

// One block of 1024 threads.  `columns` is the power of two from num_experts up: 1024 / columns threads share the tiles of
// an expert.  Segments of experts start at multiples of `pad` rows, or each has `fixed_rows` rows where that is not 0.
__global__ void __launch_bounds__(kScanThreads)
    scan_tiles(int* __restrict__ tile_starts, i64* __restrict__ counts_E, int* __restrict__ offsets_E1, int num_tiles,
               int num_experts, int columns, int pad, int fixed_rows) {
  static __shared__ u32 partial[kScanThreads];
  static __shared__ u32 warp_total[32];
  const int thread = threadIdx.x, expert = thread % columns, part = thread / columns;
  const int num_parts = kScanThreads / columns;
  const int per_part = (num_tiles + num_parts - 1) / num_parts;
  const int begin = part * per_part, end = min(begin + per_part, num_tiles);
  u32 sum = 0;
  if (expert < num_experts) {
    for (int tile = begin; tile < end; ++tile) sum += static_cast<u32>(tile_starts[static_cast<i64>(tile) * num_experts + expert]);
  }
  partial[thread] = sum;
  __syncthreads();

  // Thread e takes expert e: its total, and the rows of the experts before it.
  u32 total = 0;
  if (thread < num_experts) {
    for (int p = 0; p < num_parts; ++p) total += partial[p * columns + thread];
  }
  if (fixed_rows > 0 && total > static_cast<u32>(fixed_rows)) trap("an expert has more choices than rows");
  const u32 rows = thread >= num_experts ? 0 : fixed_rows > 0 ? fixed_rows : (total + pad - 1) / pad * pad;
  const u32 before_in_warp = warp_sum_before(rows);
  if (thread % 32 == 31) warp_total[thread / 32] = before_in_warp + rows;
  __syncthreads();
  if (thread < 32) {
    const u32 before = warp_sum_before(warp_total[thread]);
    warp_total[thread] = before;
  }
  __syncthreads();
  const u32 offset = warp_total[thread / 32] + before_in_warp;
  if (thread < num_experts) {
    counts_E[thread] = total;
    offsets_E1[thread] = static_cast<int>(offset);
    if (thread == num_experts - 1) offsets_E1[num_experts] = static_cast<int>(offset + rows);
    // From totals of a part to its first row.
    u32 running = offset;
    for (int p = 0; p < num_parts; ++p) {
      const u32 count = partial[p * columns + thread];
      partial[p * columns + thread] = running;
      running += count;
    }
  }
  __syncthreads();
  if (expert < num_experts) {
    u32 running = partial[thread];
    for (int tile = begin; tile < end; ++tile) {
      int* slot = &tile_starts[static_cast<i64>(tile) * num_experts + expert];
      const u32 count = static_cast<u32>(*slot);
      *slot = static_cast<int>(running);
      running += count;
    }
  }
}

// With kLimit: kept_TK[slot] = id where fewer than `capacity` choices of the expert came earlier, else -1.
// Without: row_of_TK[slot] = row and slot_of_row_R[row] = slot; the num_rows - N rows that no choice takes get -1.
template <bool kChoiceMajor, bool kLimit>
__global__ void __launch_bounds__(kThreads, kBlocks)
    place_choices(const i64* __restrict__ ids_TK, const int* __restrict__ tile_starts,
                  const i64* __restrict__ counts_E, const int* __restrict__ offsets_E1, int* __restrict__ row_of_TK,
                  int* __restrict__ slot_of_row_R, i64* __restrict__ kept_TK, i64 num_tokens, int top_k,
                  int num_experts, i64 num_rows, i64 capacity) {
  MOEFLOW_DYNAMIC_SHARED(int, next_row);  // [kWarps][E]: the row that a warp's next choice of an expert takes
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = threadIdx.x; i < kWarps * num_experts; i += kThreads) next_row[i] = 0;
  __syncthreads();
  const i64 first = first_position(warp, lane);
  int expert[kRounds];
  int* mine = next_row + warp * num_experts;
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    expert[round] = expert_at<kChoiceMajor>(ids_TK, first + round * 32, num_tokens, top_k, num_experts);
    const u32 same = __match_any_sync(kAllLanes, expert[round]);
    if (expert[round] >= 0 && (same & lanes_below()) == 0) mine[expert[round]] += __popc(same);
    __syncwarp();
  }
  __syncthreads();
  // From each warp's counts to its first rows.
  for (int e = threadIdx.x; e < num_experts; e += kThreads) {
    int running = tile_starts[static_cast<i64>(blockIdx.x) * num_experts + e];
    for (int w = 0; w < kWarps; ++w) {
      const int count = next_row[w * num_experts + e];
      next_row[w * num_experts + e] = running;
      running += count;
    }
  }
  __syncthreads();
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const i64 position = first + round * 32;
    const u32 same = __match_any_sync(kAllLanes, expert[round]);
    const u32 earlier = same & lanes_below();
    const bool taken = expert[round] >= 0;
    const int row = taken ? mine[expert[round]] + __popc(earlier) : -1;
    __syncwarp();
    if (taken && earlier == 0) mine[expert[round]] += __popc(same);
    __syncwarp();
    if (position >= num_tokens * top_k) continue;
    const i64 slot = slot_at<kChoiceMajor>(position, num_tokens, top_k);
    if constexpr (kLimit) {
      kept_TK[slot] = taken && row - offsets_E1[expert[round]] < capacity ? expert[round] : -1;
    } else {
      row_of_TK[slot] = row;
      if (taken) slot_of_row_R[row] = static_cast<int>(slot);
    }
  }
  if constexpr (!kLimit) {
    // Rows between the end of an expert's choices and the next expert, and behind the last one.
    for (int e = blockIdx.x; e <= num_experts; e += gridDim.x) {
      const i64 begin = e < num_experts ? offsets_E1[e] + counts_E[e] : offsets_E1[num_experts];
      const i64 end = e < num_experts ? offsets_E1[e + 1] : num_rows;
      for (i64 row = begin + threadIdx.x; row < end; row += kThreads) slot_of_row_R[row] = -1;
    }
  }
}

// Keeps the `capacity` choices of the highest priority of each expert; of equal ones those that come first in
// slot_of_row_R (order of rows).  One block for each expert, which finds the lowest kept priority 8 bits at a time, and
// then how many of that very priority still fit.  kept_TK is -1 before.
__global__ void __launch_bounds__(kThreads, kBlocks)
    keep_highest(const int* __restrict__ slot_of_row_R, const i64* __restrict__ counts_E,
                 const int* __restrict__ offsets_E1, const float* __restrict__ priority_TK, i64* __restrict__ kept_TK,
                 int num_experts, i64 capacity) {
  static __shared__ u32 counters[256];
  static __shared__ u32 warp_ties[kWarps];
  static __shared__ u32 chosen_digit, chosen_rest;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int expert = blockIdx.x; expert < num_experts; expert += gridDim.x) {
    const int* slots = slot_of_row_R + offsets_E1[expert];
    const i64 count = counts_E[expert];
    if (count <= capacity) {
      for (i64 i = threadIdx.x; i < count; i += kThreads) kept_TK[slots[i]] = expert;
      continue;
    }
    if (capacity <= 0) continue;
    // Invariant: of the choices whose key starts with `prefix`, the highest `rest` are kept.
    u32 prefix = 0, rest = static_cast<u32>(capacity);
    for (int shift = 24; shift >= 0; shift -= 8) {
      counters[threadIdx.x] = 0;
      __syncthreads();
      for (i64 i = threadIdx.x; i < count; i += kThreads) {
        const u32 key = ordered_key(priority_TK[slots[i]]);
        if (shift == 24 || key >> (shift + 8) == prefix) atomicAdd(&counters[key >> shift & 255u], 1u);
      }
      __syncthreads();
      if (threadIdx.x == 0) {
        int digit = 255;
        while (counters[digit] < rest) rest -= counters[digit--];
        chosen_digit = static_cast<u32>(digit);
        chosen_rest = rest;
      }
      __syncthreads();
      prefix = prefix << 8 | chosen_digit;
      rest = chosen_rest;
      __syncthreads();
    }
    for (i64 base = 0; base < count; base += kThreads) {
      const i64 i = base + threadIdx.x;
      const u32 key = i < count ? ordered_key(priority_TK[slots[i]]) : 0;
      const bool tie = i < count && key == prefix;
      const u32 ties = __ballot_sync(kAllLanes, tie);
      if (lane == 0) warp_ties[warp] = static_cast<u32>(__popc(ties));
      __syncthreads();
      u32 earlier = static_cast<u32>(__popc(ties & lanes_below())), all = 0;
      for (int w = 0; w < kWarps; ++w) {
        if (w < warp) earlier += warp_ties[w];
        all += warp_ties[w];
      }
      if (i < count && (key > prefix || (tie && earlier < rest))) kept_TK[slots[i]] = expert;
      rest = all < rest ? rest - all : 0;
      __syncthreads();
    }
  }
}

}  // namespace moeflow
