// The CUDA C++ of kernels/, given to g++: language, built-in variables and intrinsics.
//
// Every CUDA thread is a fiber of one operating system thread.  A fiber runs until it reaches a point where threads
// meet (a barrier, a warp intrinsic), so between two such points nothing of another thread is seen unless the schedule,
// drawn from a seed, ran that thread first.  runtime.cpp holds the scheduler and the checks.
#pragma once

#include <link.h>
#include <math.h>
#include <string.h>

#include <type_traits>

#define MOEFLOW_CUDA_HOST 1

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__ __restrict
#define __launch_bounds__(...)
// A block's shared arrays are the only thread-local variables of a kernel library, so that runtime.cpp can find and
// poison all of them as one segment.  CUDA takes `static __shared__` too, which is how kernels must write it.
#define __shared__ __thread

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

namespace cuda_host {

struct Thread {
  dim3 thread, block, block_dim, grid_dim;
};
extern Thread* current;

enum Kind : int { kSync, kShuffle, kBallot, kMatch, kAddReduce, kMinReduce, kMaxReduce, kMinSigned, kMaxSigned };

// Meets the lanes of `mask` and returns this lane's result of the operation.
unsigned long long meet(Kind kind, unsigned mask, unsigned long long value, int source_lane);
// Meets the whole block; returns how many threads gave a predicate that is not zero.
int block_barrier(int predicate);
int lane();
void* dynamic_shared();
[[noreturn]] void fail(const char* what);

struct Kernel {
  const char* name;
  void (*invoke)(void** arguments);
  int num_parameters;
  int size[48];
  char kind[48];  // p pointer, i signed, u unsigned, f floating
};

template <typename T>
constexpr char kind_of() {
  return std::is_pointer_v<T> ? 'p' : std::is_floating_point_v<T> ? 'f' : std::is_signed_v<T> ? 'i' : 'u';
}

template <auto kFunction, typename... A, int... I>
void call(void** arguments, void (*)(A...), std::integer_sequence<int, I...>) {
  kFunction(*static_cast<std::remove_reference_t<A>*>(arguments[I])...);
}

template <auto kFunction>
struct Describe;
template <typename... A, void (*kFunction)(A...)>
struct Describe<kFunction> {
  static void invoke(void** arguments) {
    call<kFunction>(arguments, kFunction, std::make_integer_sequence<int, sizeof...(A)>());
  }
  static Kernel as(const char* name) {
    return Kernel{name, invoke, sizeof...(A), {static_cast<int>(sizeof(A))...}, {kind_of<A>()...}};
  }
};

template <typename T>
T shuffle(unsigned mask, T value, int source_lane) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
  unsigned long long bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = meet(kShuffle, mask, bits, source_lane);
  memcpy(&value, &bits, sizeof(T));
  return value;
}

// Shared arrays of this library: the segment of thread-local variables of the object that holds `anchor`.
inline int find_segment(dl_phdr_info* info, size_t, void* found) {
  auto* out = static_cast<void**>(found);
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& header = info->dlpi_phdr[i];
    auto* begin = static_cast<char*>(info->dlpi_tls_data);
    if (header.p_type == PT_TLS && begin && begin <= out[0] && out[0] < begin + header.p_memsz) {
      out[1] = begin;
      out[2] = reinterpret_cast<void*>(header.p_memsz);
      return 1;
    }
  }
  return 0;
}

}  // namespace cuda_host

#define threadIdx (cuda_host::current->thread)
#define blockIdx (cuda_host::current->block)
#define blockDim (cuda_host::current->block_dim)
#define gridDim (cuda_host::current->grid_dim)

// Barriers and warp intrinsics.
inline void __syncthreads() { cuda_host::block_barrier(0); }
inline int __syncthreads_count(int predicate) { return cuda_host::block_barrier(predicate); }
inline int __syncthreads_or(int predicate) { return cuda_host::block_barrier(predicate) != 0; }
inline void __syncwarp(unsigned mask = 0xffffffffu) { cuda_host::meet(cuda_host::kSync, mask, 0, 0); }

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const int first = cuda_host::lane() & ~(width - 1);
  return cuda_host::shuffle(mask, value, first + (source & (width - 1)));
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int flip, int width = 32) {
  const int self = cuda_host::lane(), source = self ^ flip;
  // A partner in a later group of `width` lanes is out of reach, and the lane gets its own value.
  return cuda_host::shuffle(mask, value, source / width > self / width ? self : source);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int self = cuda_host::lane(), source = self - static_cast<int>(delta);
  return cuda_host::shuffle(mask, value, source < (self & ~(width - 1)) ? self : source);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int self = cuda_host::lane(), source = self + static_cast<int>(delta);
  return cuda_host::shuffle(mask, value, source > (self | (width - 1)) ? self : source);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return static_cast<unsigned>(cuda_host::meet(cuda_host::kBallot, mask, predicate != 0, 0));
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }
template <typename T>
unsigned __match_any_sync(unsigned mask, T value) {
  unsigned long long bits = 0;
  memcpy(&bits, &value, sizeof(T));
  return static_cast<unsigned>(cuda_host::meet(cuda_host::kMatch, mask, bits, 0));
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned value) {
  return static_cast<unsigned>(cuda_host::meet(cuda_host::kAddReduce, mask, value, 0));
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned value) {
  return static_cast<unsigned>(cuda_host::meet(cuda_host::kMinReduce, mask, value, 0));
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
  return static_cast<unsigned>(cuda_host::meet(cuda_host::kMaxReduce, mask, value, 0));
}
inline int __reduce_min_sync(unsigned mask, int value) {
  return static_cast<int>(cuda_host::meet(cuda_host::kMinSigned, mask, static_cast<unsigned>(value), 0));
}
inline int __reduce_max_sync(unsigned mask, int value) {
  return static_cast<int>(cuda_host::meet(cuda_host::kMaxSigned, mask, static_cast<unsigned>(value), 0));
}

// Atomics: fibers never run at the same time.
template <typename T>
T atomicAdd(T* address, T value) {
  const T old = *address;
  *address = old + value;
  return old;
}
template <typename T>
T atomicMax(T* address, T value) {
  const T old = *address;
  if (value > old) *address = value;
  return old;
}
template <typename T>
T atomicMin(T* address, T value) {
  const T old = *address;
  if (value < old) *address = value;
  return old;
}
template <typename T>
T atomicExch(T* address, T value) {
  const T old = *address;
  *address = value;
  return old;
}
template <typename T>
T atomicCAS(T* address, T expected, T value) {
  const T old = *address;
  if (old == expected) *address = value;
  return old;
}
inline void __threadfence() {}

// Bits and mathematics.
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __clz(int value) { return value ? __builtin_clz(static_cast<unsigned>(value)) : 32; }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  memcpy(&bits, &value, 4);
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline float __expf(float value) { return expf(value); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float value) { return 1.0f / sqrtf(value); }
template <typename T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
T max(T a, T b) {
  return a < b ? b : a;
}

namespace cuda_host {

// IEEE binary16, rounded to nearest even, as cvt.rn.f16.f32 and cvt.f32.f16 do.
inline float half_to_float(unsigned short bits) {
  const unsigned sign = (bits & 0x8000u) << 16, exponent = (bits >> 10) & 31, fraction = bits & 0x3ff;
  if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | (fraction << 13));
  if (exponent != 0) return __uint_as_float(sign | ((exponent + 112) << 23) | (fraction << 13));
  const float small = ldexpf(static_cast<float>(fraction), -24);
  return sign ? -small : small;
}
inline unsigned short float_to_half(float value) {
  const unsigned bits = __float_as_uint(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude >= 0x477ff000u) return static_cast<unsigned short>(sign | 0x7c00u);
  if (magnitude >= 0x38800000u) {
    const unsigned rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return static_cast<unsigned short>(sign | ((rounded - 0x38000000u) >> 13));
  }
  // Below the normal range a half counts units of 2^-24; rint rounds to even.
  return static_cast<unsigned short>(sign | static_cast<unsigned>(rintf(ldexpf(__uint_as_float(magnitude), 24))));
}

}  // namespace cuda_host

extern "C" inline void cuda_host_shared_segment(void** begin, unsigned long* size) {
  static __thread char anchor;
  void* found[3] = {&anchor, nullptr, nullptr};
  dl_iterate_phdr(cuda_host::find_segment, found);
  *begin = found[1];
  *size = reinterpret_cast<unsigned long>(found[2]);
}
