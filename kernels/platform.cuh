// What the kernels need of the platform: number types, 2- to 16-byte accesses, sums over a warp.
//
// Compiled by NVRTC, so no headers of the toolkit are included.  MOEFLOW_CUDA_HOST is defined where the tests give the
// same sources to g++: it replaces inline PTX and dynamic shared memory, and nothing else.
#ifndef MOEFLOW_PLATFORM_CUH
#define MOEFLOW_PLATFORM_CUH

#ifdef MOEFLOW_CUDA_HOST
#define MOEFLOW_DYNAMIC_SHARED(type, name) type* name = static_cast<type*>(cuda_host::dynamic_shared())
#ifndef MOEFLOW_ARCH
#define MOEFLOW_ARCH 900
#endif
#else
#define MOEFLOW_DYNAMIC_SHARED(type, name)                            \
  extern __shared__ __align__(16) unsigned char moeflow_shared_bytes[]; \
  type* name = reinterpret_cast<type*>(moeflow_shared_bytes)
#ifdef __CUDA_ARCH__
#define MOEFLOW_ARCH __CUDA_ARCH__
#else
#define MOEFLOW_ARCH 0
#endif
#endif

namespace moeflow {

using i64 = long long;
using u64 = unsigned long long;
using u32 = unsigned int;
using u16 = unsigned short;

// Stops the whole launch: an argument is wrong in a way that only the device can see.
__device__ __forceinline__ void trap(const char* what) {
#ifdef MOEFLOW_CUDA_HOST
  cuda_host::fail(what);
#else
  __trap();
#endif
}

constexpr u32 kAllLanes = 0xffffffffu;
constexpr int kThreads = 256;  // of every block here unless its kernel says otherwise
constexpr int kWarps = kThreads / 32;
// Blocks of a multiprocessor that registers must suffice for: few, or the compiler spills some to gain one block more.
constexpr int kBlocks = 2;

// 16-bit floats as they lie in memory; arithmetic is in fp32.
struct bf16 {
  u16 bits;
};
struct fp16 {
  u16 bits;
};

__device__ __forceinline__ float to_float(float value) { return value; }

__device__ __forceinline__ float to_float(bf16 value) { return __uint_as_float(static_cast<u32>(value.bits) << 16); }

__device__ __forceinline__ float to_float(fp16 value) {
#ifdef MOEFLOW_CUDA_HOST
  return cuda_host::half_to_float(value.bits);
#else
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
#endif
}

template <typename T>
__device__ __forceinline__ T from_float(float value);

template <>
__device__ __forceinline__ float from_float<float>(float value) {
  return value;
}

// Rounds to nearest even, as torch does.
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float value) {
#if !defined(MOEFLOW_CUDA_HOST) && MOEFLOW_ARCH >= 800
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bf16{bits};
#else
  const u32 bits = __float_as_uint(value);
  // Rounding would carry a NaN with a small payload into infinity.
  if (value != value) return bf16{static_cast<u16>(0x7fff)};
  return bf16{static_cast<u16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
#endif
}

template <>
__device__ __forceinline__ fp16 from_float<fp16>(float value) {
#ifdef MOEFLOW_CUDA_HOST
  return fp16{cuda_host::float_to_half(value)};
#else
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return fp16{bits};
#endif
}

// One access of kBytes: the hardware's widest is 16.
template <int kBytes>
struct RawOf;
template <>
struct RawOf<16> {
  using type = uint4;
};
template <>
struct RawOf<8> {
  using type = uint2;
};
template <>
struct RawOf<4> {
  using type = u32;
};
template <>
struct RawOf<2> {
  using type = u16;
};

// kWidth values of T moved at once.  Pointers must be aligned to kWidth * sizeof(T), and rows hold a multiple of kWidth
// values, so that a row of any other length is moved with a smaller kWidth, down to one value.
template <typename T, int kWidth>
struct Access {
  using Raw = typename RawOf<sizeof(T) * kWidth>::type;

  static __device__ __forceinline__ Raw load(const T* from) { return *reinterpret_cast<const Raw*>(from); }

  static __device__ __forceinline__ void store(T* to, Raw raw) { *reinterpret_cast<Raw*>(to) = raw; }

  static __device__ __forceinline__ void unpack(Raw raw, float (&values)[kWidth]) {
    union {
      Raw raw;
      T values[kWidth];
    } both;
    both.raw = raw;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] = to_float(both.values[i]);
  }

  static __device__ __forceinline__ Raw pack(const float (&values)[kWidth]) {
    union {
      Raw raw;
      T values[kWidth];
    } both;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) both.values[i] = from_float<T>(values[i]);
    return both.raw;
  }

  static __device__ __forceinline__ void read(const T* from, float (&values)[kWidth]) { unpack(load(from), values); }

  static __device__ __forceinline__ void write(T* to, const float (&values)[kWidth]) { store(to, pack(values)); }
};

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

// Maps a float to an integer of the same order; NaN is the largest, as for torch's sort, and -0 equals 0.
__device__ __forceinline__ u32 ordered_key(float value) {
  if (value != value) return 0xffffffffu;
  const u32 bits = __float_as_uint(value + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Position of this thread's row among those that the grid works on at once: one row of the block (threads of equal
// threadIdx.y) for each row of the tensor.
__device__ __forceinline__ i64 first_row() { return static_cast<i64>(blockIdx.x) * blockDim.y + threadIdx.y; }
__device__ __forceinline__ i64 rows_at_once() { return static_cast<i64>(gridDim.x) * blockDim.y; }

// The butterfly adds in the same order in every lane and on every run.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int flip = 16; flip > 0; flip /= 2) value += __shfl_xor_sync(kAllLanes, value, flip);
  return value;
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int flip = 16; flip > 0; flip /= 2) value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, flip));
  return value;
}

__device__ __forceinline__ u32 warp_max(u32 value) {
#if MOEFLOW_ARCH >= 800
  return __reduce_max_sync(kAllLanes, value);
#else
#pragma unroll
  for (int flip = 16; flip > 0; flip /= 2) value = max(value, __shfl_xor_sync(kAllLanes, value, flip));
  return value;
#endif
}

__device__ __forceinline__ u32 warp_min(u32 value) {
#if MOEFLOW_ARCH >= 800
  return __reduce_min_sync(kAllLanes, value);
#else
#pragma unroll
  for (int flip = 16; flip > 0; flip /= 2) value = min(value, __shfl_xor_sync(kAllLanes, value, flip));
  return value;
#endif
}

// Lanes of the warp that come before this one, as bits.
__device__ __forceinline__ u32 lanes_below() { return (1u << (threadIdx.x & 31u)) - 1u; }

// Sum of the values of the lanes below this one.
__device__ __forceinline__ u32 warp_sum_before(u32 value) {
  const u32 lane = threadIdx.x & 31u;
  u32 sum = value;
#pragma unroll
  for (u32 delta = 1; delta < 32; delta *= 2) {
    const u32 other = __shfl_up_sync(kAllLanes, sum, delta);
    if (lane >= delta) sum += other;
  }
  return sum - value;
}

}  // namespace moeflow

#endif
