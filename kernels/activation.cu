// Activations of the experts' hidden layer, plain or gated (act(gate) * up), with the routing weight of each row on request.
//
// R rows, F hidden width.  Moving the weight from combine to here spares combine's backward pass the reading of the
// experts' output: y = sum_k w_k W(h_k) = sum_k W(w_k h_k) for a second layer W without bias.
//
// Launch: block (X, Y) with X * Y = 256 threads, X of them on one row (a multiple of 32 in the weighted backward kernel);
// any grid.  Inputs and gradients of a gated activation are [R, 2, F]: `stride` is 2 F there, and F for a plain one.
#include "platform.cuh"

namespace moeflow {

enum Activation : int { kRelu = 0, kSilu = 1, kGelu = 2, kGeluTanh = 3 };

// act(x), and its derivative.
template <int kActivation>
__device__ __forceinline__ void activate(float x, float& value, float& slope) {
  if constexpr (kActivation == kRelu) {
    // Written so that NaN stays NaN.
    value = x < 0.0f ? 0.0f : x;
    slope = x <= 0.0f ? 0.0f : 1.0f;
  } else if constexpr (kActivation == kSilu) {
    const float sigmoid = __fdividef(1.0f, 1.0f + __expf(-x));
    value = x * sigmoid;
    slope = sigmoid * (1.0f + x * (1.0f - sigmoid));
  } else if constexpr (kActivation == kGelu) {
    const float below = 0.5f + 0.5f * erff(x * 0.70710678118654752f);
    value = x * below;
    slope = below + x * 0.39894228040143268f * __expf(-0.5f * x * x);
  } else {
    constexpr float kScale = 0.79788456080286536f, kCubic = 0.044715f;
    const float bent = tanhf(kScale * (x + kCubic * x * x * x));
    value = 0.5f * x * (1.0f + bent);
    slope = 0.5f * (1.0f + bent) + 0.5f * x * (1.0f - bent * bent) * kScale * (1.0f + 3.0f * kCubic * x * x);
  }
}

// hidden = act(pre), times up if kGated, times the weight of the row's choice if kWeighted.
// Moves 2 (gated: 3) rows of F for each row.
template <typename T, int kWidth, int kActivation, bool kGated, bool kWeighted>
__global__ void __launch_bounds__(kThreads, kBlocks)
    activation_forward(const T* __restrict__ pre, const float* __restrict__ weights_N,
                       const int* __restrict__ slot_of_row_R, T* __restrict__ hidden_RF, i64 num_rows, i64 width,
                       i64 stride) {
  using A = Access<T, kWidth>;
  for (i64 row = first_row(); row < num_rows; row += rows_at_once()) {
    float weight = 1.0f;
    bool padding = false;
    if constexpr (kWeighted) {
      const int slot = slot_of_row_R[row];
      padding = slot < 0;
      weight = padding ? 0.0f : weights_N[slot];
    }
    for (i64 i = threadIdx.x; i < width / kWidth; i += blockDim.x) {
      const T* at = pre + row * stride + i * kWidth;
      float x[kWidth], up[kWidth], out[kWidth];
      const typename A::Raw raw = A::load(at);
      if constexpr (kGated) A::read(at + width, up);
      A::unpack(raw, x);
#pragma unroll
      for (int c = 0; c < kWidth; ++c) {
        float value, slope;
        activate<kActivation>(x[c], value, slope);
        if constexpr (kGated) value *= up[c];
        if constexpr (kWeighted) value = padding ? 0.0f : value * weight;
        out[c] = value;
      }
      A::write(hidden_RF + row * width + i * kWidth, out);
    }
  }
}

// grad_pre, and with kWeighted also grad_weights_N[slot] = <grad, act(pre) (* up)> (zero before, for dropped choices).
// Moves 3 (gated: 5) rows of F for each row.
template <typename T, int kWidth, int kActivation, bool kGated, bool kWeighted>
__global__ void __launch_bounds__(kThreads, kBlocks)
    activation_backward(const T* __restrict__ grad_RF, const T* __restrict__ pre, const float* __restrict__ weights_N,
                        const int* __restrict__ slot_of_row_R, T* __restrict__ grad_pre,
                        float* __restrict__ grad_weights_N, i64 num_rows, i64 width, i64 stride) {
  using A = Access<T, kWidth>;
  static __shared__ float partial[kWarps];
  const int warps_per_row = blockDim.x / 32;
  const int warp = (threadIdx.y * blockDim.x + threadIdx.x) / 32;
  // All threads of a block make the same turns, as they may meet at barriers.
  for (i64 base = static_cast<i64>(blockIdx.x) * blockDim.y; base < num_rows; base += rows_at_once()) {
    const i64 row = base + threadIdx.y;
    const bool present = row < num_rows;
    int slot = -1;
    float weight = 1.0f, dot = 0.0f;
    if constexpr (kWeighted) {
      if (present) slot = slot_of_row_R[row];
      weight = slot < 0 ? 0.0f : weights_N[slot];
    }
    const bool padding = kWeighted && slot < 0;
    for (i64 i = threadIdx.x; present && i < width / kWidth; i += blockDim.x) {
      const i64 at = row * stride + i * kWidth;
      float grad[kWidth], x[kWidth], up[kWidth], grad_x[kWidth], grad_up[kWidth];
      const typename A::Raw raw_grad = A::load(grad_RF + row * width + i * kWidth);
      const typename A::Raw raw = A::load(pre + at);
      if constexpr (kGated) A::read(pre + at + width, up);
      A::unpack(raw_grad, grad);
      A::unpack(raw, x);
#pragma unroll
      for (int c = 0; c < kWidth; ++c) {
        float value, slope;
        activate<kActivation>(x[c], value, slope);
        if constexpr (kWeighted) dot += padding ? 0.0f : grad[c] * value * (kGated ? up[c] : 1.0f);
        const float scaled = kWeighted ? grad[c] * weight : grad[c];
        grad_x[c] = scaled * slope * (kGated ? up[c] : 1.0f);
        if constexpr (kGated) grad_up[c] = padding ? 0.0f : scaled * value;
        if (padding) grad_x[c] = 0.0f;
      }
      A::write(grad_pre + at, grad_x);
      if constexpr (kGated) A::write(grad_pre + at + width, grad_up);
    }
    if constexpr (kWeighted) {
      const float sum = warp_sum(dot);
      if (threadIdx.x % 32 == 0) partial[warp] = sum;
      __syncthreads();
      if (slot >= 0 && threadIdx.x == 0) {
        float all = 0.0f;
        for (int w = 0; w < warps_per_row; ++w) all += partial[threadIdx.y * warps_per_row + w];
        grad_weights_N[slot] = all;
      }
      __syncthreads();
    }
  }
}

}  // namespace moeflow
