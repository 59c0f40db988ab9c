// Rows that came from an all-to-all, sorted by the rank they came from, into the order of the local experts, and back.
//
// counts_PE[r, e] rows of rank r are for local expert e, so that rows arrive as (r, e) segments, r slowest, and leave as
// (e, r) segments, e slowest.  Each block finds the bounds of all segments in shared memory by itself (8 bytes for each
// segment), and then each row by bisection.  A row is copied as bytes, whatever its dtype.  Moves 2 rows for each row.
//
// Launch: block (X, Y) with X * Y = 256 threads, X of them on one row; any grid.
#include "platform.cuh"

namespace moeflow {

// values[i] becomes the sum of the values before it; all 256 threads of the block come here, and leave together.
__device__ __forceinline__ void sums_before(int* values, int count, u32* warp_total) {
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int per_thread = (count + kThreads - 1) / kThreads;
  const int begin = min(thread * per_thread, count), end = min(begin + per_thread, count);
  u32 sum = 0;
  for (int i = begin; i < end; ++i) sum += static_cast<u32>(values[i]);
  // Lanes are numbered along the whole block here, unlike threadIdx.x.
  const int lane = thread % 32;
  u32 running = sum;
#pragma unroll
  for (int delta = 1; delta < 32; delta *= 2) {
    const u32 other = __shfl_up_sync(kAllLanes, running, delta);
    if (lane >= delta) running += other;
  }
  if (lane == 31) warp_total[thread / 32] = running;
  __syncthreads();
  running -= sum;
  for (int w = 0; w < thread / 32; ++w) running += warp_total[w];
  for (int i = begin; i < end; ++i) {
    const int value = values[i];
    values[i] = static_cast<int>(running);
    running += static_cast<u32>(value);
  }
  __syncthreads();
}

// kInverse takes rows from the experts' order back to the ranks'.
template <int kBytes, bool kInverse>
__global__ void __launch_bounds__(kThreads, kBlocks)
    regroup_rows(const unsigned char* __restrict__ from, unsigned char* __restrict__ to,
                 const i64* __restrict__ counts_PE, i64 num_rows, int num_ranks, int num_experts, i64 row_bytes) {
  using Raw = typename RawOf<kBytes>::type;
  MOEFLOW_DYNAMIC_SHARED(int, by_rank);  // first row of segment (r, e) at r * E + e ...
  static __shared__ u32 warp_total[kWarps];
  const int num_segments = num_ranks * num_experts;
  int* by_expert = by_rank + num_segments;  // ... and of the same segment, in the other order, at e * P + r
  for (int s = threadIdx.y * blockDim.x + threadIdx.x; s < num_segments; s += kThreads) {
    const int count = static_cast<int>(counts_PE[s]);
    by_rank[s] = count;
    by_expert[s % num_experts * num_ranks + s / num_experts] = count;
  }
  __syncthreads();
  sums_before(by_rank, num_segments, warp_total);
  sums_before(by_expert, num_segments, warp_total);
  if (by_rank[num_segments - 1] + counts_PE[num_segments - 1] != num_rows) {
    trap("the counts do not add up to the number of rows");
  }

  for (i64 row = first_row(); row < num_rows; row += rows_at_once()) {
    // The last segment that starts at or before the row: empty ones start there too, and come earlier.
    int low = 0, high = num_segments;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (by_rank[middle] <= row) {
        low = middle;
      } else {
        high = middle;
      }
    }
    const i64 other = by_expert[low % num_experts * num_ranks + low / num_experts] + (row - by_rank[low]);
    const unsigned char* source = from + (kInverse ? other : row) * row_bytes;
    unsigned char* target = to + (kInverse ? row : other) * row_bytes;
    for (i64 i = threadIdx.x; i < row_bytes / kBytes; i += blockDim.x) {
      reinterpret_cast<Raw*>(target)[i] = reinterpret_cast<const Raw*>(source)[i];
    }
  }
}

}  // namespace moeflow
