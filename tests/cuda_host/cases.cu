// Small kernels with known answers, and with planted faults, for the test of the shim itself.
#include "platform.cuh"

namespace moeflow {

// Sum of a block's values through static shared memory; kFault leaves out the barrier.
template <bool kFault>
__global__ void block_sum(const float* values, float* sums) {
  static __shared__ float partial[kWarps];
  const float sum = warp_sum(values[blockIdx.x * blockDim.x + threadIdx.x]);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
  if constexpr (!kFault) __syncthreads();
  if (threadIdx.x == 0) {
    float total = 0.0f;
    for (unsigned w = 0; w < blockDim.x / 32; ++w) total += partial[w];
    sums[blockIdx.x] = total;
  }
}

// A second turn overwrites the array before all have read it, when kFault leaves out the second barrier.
template <bool kFault>
__global__ void rotate_twice(const int* values, int* out) {
  static __shared__ int held[kThreads];
  int value = values[threadIdx.x];
  for (int turn = 0; turn < 2; ++turn) {
    held[threadIdx.x] = value;
    __syncthreads();
    value = held[(threadIdx.x + 1) % blockDim.x];
    if constexpr (!kFault) __syncthreads();
  }
  out[threadIdx.x] = value;
}

// Copies rows of 3 floats; kFault is 0, 1 (a row too many), 2 (rows taken 4 apart), 3 (a vector at an odd address).
template <int kFault>
__global__ void copy_rows(const float* from, float* to, int num_rows) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if constexpr (kFault == 3) {
    if (row == 0) Access<float, 4>::store(to, Access<float, 4>::load(from + 1));
  } else if (row < num_rows + (kFault == 1 ? 1 : 0)) {
    const int stride = kFault == 2 ? 4 : 3;
    for (int i = 0; i < 3; ++i) to[row * 3 + i] = from[row * stride + i];
  }
}

// Every warp intrinsic once; lane l of a warp writes its 16 results to out[l * 16...].
__global__ void intrinsics(const int* values, int* out) {
  const int value = values[threadIdx.x];
  int* mine = out + threadIdx.x * 16;
  mine[0] = __shfl_sync(kAllLanes, value, 5);
  mine[1] = __shfl_xor_sync(kAllLanes, value, 3);
  mine[2] = __shfl_up_sync(kAllLanes, value, 2);
  mine[3] = __shfl_down_sync(kAllLanes, value, 4);
  mine[4] = __shfl_sync(kAllLanes, value, 1, 8);
  mine[5] = static_cast<int>(__ballot_sync(kAllLanes, value % 2));
  mine[6] = __any_sync(kAllLanes, value == 7);
  mine[7] = __all_sync(kAllLanes, value >= 0);
  mine[8] = static_cast<int>(__match_any_sync(kAllLanes, value % 3));
  mine[9] = static_cast<int>(__reduce_add_sync(kAllLanes, static_cast<u32>(value)));
  mine[10] = static_cast<int>(warp_min(static_cast<u32>(value)));
  mine[11] = static_cast<int>(warp_max(static_cast<u32>(value)));
  mine[12] = static_cast<int>(warp_sum_before(static_cast<u32>(value)));
  // Half of the warp on its own.
  mine[13] = threadIdx.x % 32 < 16 ? __shfl_xor_sync(0xffffu, value, 1) : __shfl_xor_sync(0xffff0000u, value, 2);
  mine[14] = __syncthreads_count(value % 2);
  MOEFLOW_DYNAMIC_SHARED(int, counters);
  if (threadIdx.x == 0) counters[0] = 0;
  __syncthreads();
  atomicAdd(counters, value);
  __syncthreads();
  mine[15] = counters[0];
}

// kFault 1: a barrier that some threads do not reach; 2: a mask that names a lane elsewhere; 3: beyond the shared array;
// 4: an order-dependent atomic sum of floats; 5: reads what it never wrote.
template <int kFault>
__global__ void broken(const float* values, float* out) {
  static __shared__ float held[kThreads];
  if constexpr (kFault == 1) {
    if (threadIdx.x < 40) __syncthreads();
  } else if constexpr (kFault == 2) {
    if (threadIdx.x % 32 != 7) out[threadIdx.x] = __shfl_xor_sync(kAllLanes, values[threadIdx.x], 1);
  } else if constexpr (kFault == 3) {
    held[threadIdx.x + 1] = values[threadIdx.x];
    out[threadIdx.x] = held[threadIdx.x + 1];
  } else if constexpr (kFault == 4) {
    if (threadIdx.x == 0) out[0] = 0.0f;
    __syncthreads();
    atomicAdd(out, values[threadIdx.x]);
  } else {
    out[threadIdx.x] = fmaxf(held[threadIdx.x], values[threadIdx.x]);
  }
}

// Conversions of every 16-bit pattern and back.
template <typename T>
__global__ void convert(const u16* bits, float* wide, u16* back) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  wide[i] = to_float(T{bits[i]});
  back[i] = from_float<T>(wide[i]).bits;
}

template <typename T>
__global__ void round(const float* wide, u16* bits) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  bits[i] = from_float<T>(wide[i]).bits;
}

}  // namespace moeflow
