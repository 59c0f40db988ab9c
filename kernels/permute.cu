// Tokens to rows ordered by expert, and back.
//
// T tokens, D model width, K choices of a token, R rows.  row_of_TK holds the row of each choice (-1: dropped), and
// slot_of_row_R the choice t * K + k of each row (-1: a row that pads an expert's segment).  The work is split by token:
// each reads its own row once, and no two threads write the same address, so nothing is atomic and every run gives the
// same bits.
//
// Launch: block (X, Y) with X * Y = 256 threads, X of them on one token; any grid.  kWidth values are moved at once, and
// kChoices (1 to 8) choices are in flight at once; more choices than that are done in several turns.
#include "platform.cuh"

namespace moeflow {

template <int kChoices>
__device__ __forceinline__ void load_rows(const int* row_of_TK, i64 token, int top_k, int first, int (&row)[kChoices]) {
#pragma unroll
  for (int k = 0; k < kChoices; ++k) row[k] = first + k < top_k ? row_of_TK[token * top_k + first + k] : -1;
}

template <int kChoices>
__device__ __forceinline__ void load_weights(const float* weights_TK, i64 token, int top_k, int first,
                                             float (&weight)[kChoices]) {
#pragma unroll
  for (int k = 0; k < kChoices; ++k) weight[k] = first + k < top_k ? weights_TK[token * top_k + first + k] : 0.0f;
}

// Rows that pad an expert's segment are zero, so that a matrix product over the padded segment adds nothing.
template <typename T, int kWidth>
__device__ __forceinline__ void zero_padding(const int* slot_of_row_R, T* rows_RD, i64 num_rows, i64 width) {
  const float zeros[kWidth] = {};
  for (i64 row = first_row(); row < num_rows; row += rows_at_once()) {
    if (slot_of_row_R[row] >= 0) continue;
    for (i64 i = threadIdx.x; i < width / kWidth; i += blockDim.x) {
      Access<T, kWidth>::write(rows_RD + row * width + i * kWidth, zeros);
    }
  }
}

// rows[row_of[t, k]] = x[t].  Moves (1 + K) rows for each token.  slot_of_row_R may be null where no row is padding.
template <typename T, int kWidth, int kChoices>
__global__ void __launch_bounds__(kThreads, kBlocks)
    dispatch_rows(const T* __restrict__ x_TD, const int* __restrict__ row_of_TK, const int* __restrict__ slot_of_row_R,
                  T* __restrict__ rows_RD, i64 num_tokens, i64 num_rows, int top_k, i64 width) {
  using A = Access<T, kWidth>;
  for (i64 token = first_row(); token < num_tokens; token += rows_at_once()) {
    const T* x = x_TD + token * width;
    for (int first = 0; first < top_k; first += kChoices) {
      int row[kChoices];
      load_rows(row_of_TK, token, top_k, first, row);
      for (i64 i = threadIdx.x; i < width / kWidth; i += blockDim.x) {
        const typename A::Raw raw = A::load(x + i * kWidth);
#pragma unroll
        for (int k = 0; k < kChoices; ++k) {
          if (row[k] >= 0) A::store(rows_RD + row[k] * width + i * kWidth, raw);
        }
      }
    }
  }
  if (slot_of_row_R != nullptr) zero_padding<T, kWidth>(slot_of_row_R, rows_RD, num_rows, width);
}

// y[t] = sum over k of weight[t, k] * rows[row_of[t, k]], k ascending, in fp32.  weights_TK may be null (all ones).
// Moves (K + 1) rows for each token.  All loads of a thread are issued before the first addition.
template <typename T, int kWidth, int kChoices>
__global__ void __launch_bounds__(kThreads, kBlocks)
    combine_rows(const T* __restrict__ rows_RD, const int* __restrict__ row_of_TK,
                 const float* __restrict__ weights_TK, T* __restrict__ y_TD, i64 num_tokens, int top_k, i64 width) {
  using A = Access<T, kWidth>;
  const bool in_turns = top_k > kChoices;
  for (i64 token = first_row(); token < num_tokens; token += rows_at_once()) {
    int row[kChoices];
    float weight[kChoices];
    load_rows(row_of_TK, token, top_k, 0, row);
    if (weights_TK != nullptr) load_weights(weights_TK, token, top_k, 0, weight);
    for (i64 i = threadIdx.x; i < width / kWidth; i += blockDim.x) {
      float sum[kWidth] = {};
      for (int first = 0; first < top_k; first += kChoices) {
        if (in_turns) {
          load_rows(row_of_TK, token, top_k, first, row);
          if (weights_TK != nullptr) load_weights(weights_TK, token, top_k, first, weight);
        }
        typename A::Raw raw[kChoices];
#pragma unroll
        for (int k = 0; k < kChoices; ++k) {
          if (row[k] >= 0) raw[k] = A::load(rows_RD + row[k] * width + i * kWidth);
        }
#pragma unroll
        for (int k = 0; k < kChoices; ++k) {
          // A skipped choice and not a zero weight: a row may hold inf or NaN.
          if (row[k] < 0) continue;
          float value[kWidth];
          A::unpack(raw[k], value);
          const float scale = weights_TK != nullptr ? weight[k] : 1.0f;
#pragma unroll
          for (int c = 0; c < kWidth; ++c) sum[c] += scale * value[c];
        }
      }
      A::write(y_TD + token * width + i * kWidth, sum);
    }
  }
}

// Both gradients of combine_rows in one pass:
//   grad_rows[row_of[t, k]] = weight[t, k] * grad_y[t],   grad_weights[t, k] = <grad_y[t], rows[row_of[t, k]]>.
// Moves (1 + 2 K) rows for each token.  X is a multiple of 32, so that a warp never spans two tokens.
template <typename T, int kWidth, int kChoices>
__global__ void __launch_bounds__(kThreads, kBlocks)
    combine_rows_backward(const T* __restrict__ grad_y_TD, const T* __restrict__ rows_RD,
                          const int* __restrict__ row_of_TK, const float* __restrict__ weights_TK,
                          const int* __restrict__ slot_of_row_R, T* __restrict__ grad_rows_RD,
                          float* __restrict__ grad_weights_TK, i64 num_tokens, i64 num_rows, int top_k, i64 width) {
  using A = Access<T, kWidth>;
  static __shared__ float partial[kWarps][kChoices];
  const int warps_per_token = blockDim.x / 32;
  const int warp = (threadIdx.y * blockDim.x + threadIdx.x) / 32;
  // All threads of a block make the same turns, as they meet at barriers.
  for (i64 base = static_cast<i64>(blockIdx.x) * blockDim.y; base < num_tokens; base += rows_at_once()) {
    const i64 token = base + threadIdx.y;
    const bool present = token < num_tokens;
    for (int first = 0; first < top_k; first += kChoices) {
      int row[kChoices];
      float weight[kChoices], dot[kChoices] = {};
      if (present) {
        load_rows(row_of_TK, token, top_k, first, row);
        load_weights(weights_TK, token, top_k, first, weight);
        for (i64 i = threadIdx.x; i < width / kWidth; i += blockDim.x) {
          float grad[kWidth];
          const typename A::Raw raw_grad = A::load(grad_y_TD + token * width + i * kWidth);
          typename A::Raw raw[kChoices];
#pragma unroll
          for (int k = 0; k < kChoices; ++k) {
            if (row[k] >= 0) raw[k] = A::load(rows_RD + row[k] * width + i * kWidth);
          }
          A::unpack(raw_grad, grad);
#pragma unroll
          for (int k = 0; k < kChoices; ++k) {
            if (row[k] < 0) continue;
            float value[kWidth], scaled[kWidth];
            A::unpack(raw[k], value);
#pragma unroll
            for (int c = 0; c < kWidth; ++c) {
              dot[k] += grad[c] * value[c];
              scaled[c] = weight[k] * grad[c];
            }
            A::write(grad_rows_RD + row[k] * width + i * kWidth, scaled);
          }
        }
      }
#pragma unroll
      for (int k = 0; k < kChoices; ++k) {
        const float sum = warp_sum(dot[k]);
        if (threadIdx.x % 32 == 0) partial[warp][k] = sum;
      }
      __syncthreads();
      if (present && threadIdx.x < kChoices && first + threadIdx.x < top_k) {
        float sum = 0.0f;
        for (int w = 0; w < warps_per_token; ++w) sum += partial[threadIdx.y * warps_per_token + w][threadIdx.x];
        grad_weights_TK[token * top_k + first + threadIdx.x] = sum;
      }
      __syncthreads();
    }
  }
  if (slot_of_row_R != nullptr) zero_padding<T, kWidth>(slot_of_row_R, grad_rows_RD, num_rows, width);
}

}  // namespace moeflow
