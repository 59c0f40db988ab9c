// The gate: scores of the experts, the K best of them, and how many choices each expert got, in one pass over the logits.
//
// T tokens, E experts (at most 512), K choices (at most 32).  One warp works on one token; lane l holds the kWidth experts
// from (j * 32 + l) * kWidth on, for each j below kVectors, in registers.
//
// Launch: 256 threads, any grid.
#include "platform.cuh"

namespace moeflow {

enum Score : int { kIdentity = 0, kSoftmax = 1, kSigmoid = 2 };

// Chosen values leave in the dtype they came in, where they are only picked, and in fp32 where they were computed.
template <typename T, int kScore>
struct WeightOf {
  using type = float;
};
template <typename T>
struct WeightOf<T, kIdentity> {
  using type = T;
};

template <int kWidth, int kVectors>
struct Lane {
  static constexpr int kValues = kWidth * kVectors;

  static __device__ __forceinline__ int expert(int i) {
    return (i / kWidth * 32 + static_cast<int>(threadIdx.x % 32)) * kWidth + i % kWidth;
  }

  template <typename T>
  static __device__ __forceinline__ void read(const T* row_E, int num_experts, float absent, float (&value)[kValues]) {
    constexpr int kPart = kWidth * sizeof(T) > 16 ? 16 / sizeof(T) : kWidth;
#pragma unroll
    for (int i = 0; i < kValues; i += kPart) {
      float part[kPart];
      const bool present = expert(i) < num_experts;
      if (present) Access<T, kPart>::read(row_E + expert(i), part);
#pragma unroll
      for (int c = 0; c < kPart; ++c) value[i + c] = present ? part[c] : absent;
    }
  }

  template <typename T>
  static __device__ __forceinline__ void write(T* row_E, int num_experts, const float (&value)[kValues]) {
    constexpr int kPart = kWidth * sizeof(T) > 16 ? 16 / sizeof(T) : kWidth;
#pragma unroll
    for (int i = 0; i < kValues; i += kPart) {
      float part[kPart];
#pragma unroll
      for (int c = 0; c < kPart; ++c) part[c] = value[i + c];
      if (expert(i) < num_experts) Access<T, kPart>::write(row_E + expert(i), part);
    }
  }
};

// scores_TE (may be null) = softmax or sigmoid of the logits; ids_TK = the K experts of the highest score + bias_E (may be
// null), highest first, of equal ones the lowest id; weights_TK = their scores, divided by their sum if `normalize`;
// counts_E (may be null, zero before) += choices of each expert.
// Moves E values in and E values out for each token.
template <typename T, int kWidth, int kVectors, int kScore>
__global__ void __launch_bounds__(kThreads, kBlocks)
    gate_forward(const T* __restrict__ logits_TE, const float* __restrict__ bias_E, float* __restrict__ scores_TE,
                 typename WeightOf<T, kScore>::type* __restrict__ weights_TK, i64* __restrict__ ids_TK,
                 u64* __restrict__ counts_E, i64 num_tokens, int num_experts, int top_k, int normalize) {
  using L = Lane<kWidth, kVectors>;
  using Weight = typename WeightOf<T, kScore>::type;
  MOEFLOW_DYNAMIC_SHARED(u32, counters);
  const int lane = threadIdx.x % 32;
  for (int e = threadIdx.x; e < num_experts; e += kThreads) counters[e] = 0;
  __syncthreads();

  const i64 step = static_cast<i64>(gridDim.x) * kWarps;
  for (i64 token = static_cast<i64>(blockIdx.x) * kWarps + threadIdx.x / 32; token < num_tokens; token += step) {
    float score[L::kValues];
    L::read(logits_TE + token * num_experts, num_experts, -infinity(), score);
    if constexpr (kScore == kSoftmax) {
      float highest = -infinity(), sum = 0.0f;
#pragma unroll
      for (int i = 0; i < L::kValues; ++i) highest = fmaxf(highest, score[i]);
      highest = warp_max(highest);
#pragma unroll
      for (int i = 0; i < L::kValues; ++i) {
        score[i] = L::expert(i) < num_experts ? expf(score[i] - highest) : 0.0f;
        sum += score[i];
      }
      const float scale = 1.0f / warp_sum(sum);
#pragma unroll
      for (int i = 0; i < L::kValues; ++i) score[i] *= scale;
    } else if constexpr (kScore == kSigmoid) {
#pragma unroll
      for (int i = 0; i < L::kValues; ++i) score[i] = 1.0f / (1.0f + expf(-score[i]));
    }
    if (kScore != kIdentity && scores_TE != nullptr) {
      L::write(scores_TE + token * num_experts, num_experts, score);
    }

    // Key 0 is below that of every number: an absent expert, or one chosen already.
    u32 key[L::kValues];
#pragma unroll
    for (int i = 0; i < L::kValues; ++i) {
      const int expert = L::expert(i);
      const bool present = expert < num_experts;
      const float bias = present && bias_E != nullptr ? bias_E[expert] : 0.0f;
      key[i] = present ? ordered_key(score[i] + bias) : 0;
    }
    float chosen_score = 0.0f;  // of this lane's choice: lane k keeps choice k
    int chosen = 0;
    for (int k = 0; k < top_k; ++k) {
      u32 best = 0;
      int best_expert = 0;
      float best_score = 0.0f;
#pragma unroll
      for (int i = 0; i < L::kValues; ++i) {
        if (key[i] > best) {
          best = key[i];
          best_expert = L::expert(i);
          best_score = score[i];
        }
      }
      const u32 top = warp_max(best);
      const int winner = static_cast<int>(warp_min(best == top ? static_cast<u32>(best_expert) : 0xffffffffu));
#pragma unroll
      for (int i = 0; i < L::kValues; ++i) {
        if (L::expert(i) == winner) key[i] = 0;
      }
      const float winner_score = __shfl_sync(kAllLanes, best_score, winner / kWidth % 32);
      if (lane == k) {
        chosen = winner;
        chosen_score = winner_score;
      }
    }
    if (normalize) chosen_score /= warp_sum(lane < top_k ? chosen_score : 0.0f);
    if (lane < top_k) {
      ids_TK[token * top_k + lane] = chosen;
      weights_TK[token * top_k + lane] = from_float<Weight>(chosen_score);
      if (counts_E != nullptr) atomicAdd(&counters[chosen], 1u);
    }
  }
  if (counts_E == nullptr) return;
  __syncthreads();
  for (int e = threadIdx.x; e < num_experts; e += kThreads) {
    if (counters[e] > 0) atomicAdd(&counts_E[e], static_cast<u64>(counters[e]));
  }
}

// grad_logits_TE from the gradients of scores_TE and of weights_TK (either may be null).
// Moves E values in (2 E with grad_scores_TE) and E values out for each token.
template <typename T, int kWidth, int kVectors, int kScore>
__global__ void __launch_bounds__(kThreads, kBlocks)
    gate_backward(const float* __restrict__ grad_scores_TE, const float* __restrict__ grad_weights_TK,
                  const float* __restrict__ scores_TE, const float* __restrict__ weights_TK,
                  const i64* __restrict__ ids_TK, T* __restrict__ grad_logits_TE, i64 num_tokens, int num_experts,
                  int top_k, int normalize) {
  using L = Lane<kWidth, kVectors>;
  const int lane = threadIdx.x % 32;
  const i64 step = static_cast<i64>(gridDim.x) * kWarps;
  for (i64 token = static_cast<i64>(blockIdx.x) * kWarps + threadIdx.x / 32; token < num_tokens; token += step) {
    float score[L::kValues], grad[L::kValues];
    L::read(scores_TE + token * num_experts, num_experts, 0.0f, score);
    if (grad_scores_TE != nullptr) {
      L::read(grad_scores_TE + token * num_experts, num_experts, 0.0f, grad);
    } else {
#pragma unroll
      for (int i = 0; i < L::kValues; ++i) grad[i] = 0.0f;
    }
    if (grad_weights_TK != nullptr) {
      int chosen = -1;
      float grad_chosen = 0.0f, chosen_score = 0.0f, weight = 0.0f;
      if (lane < top_k) {
        chosen = static_cast<int>(ids_TK[token * top_k + lane]);
        grad_chosen = grad_weights_TK[token * top_k + lane];
        if (normalize) {
          chosen_score = scores_TE[token * num_experts + chosen];
          weight = weights_TK[token * top_k + lane];
        }
      }
      // weight_k = score_k / sum, so each score also moves the weights of the other choices.
      if (normalize) grad_chosen = (grad_chosen - warp_sum(grad_chosen * weight)) / warp_sum(chosen_score);
      for (int k = 0; k < top_k; ++k) {
        const int expert = __shfl_sync(kAllLanes, chosen, k);
        const float more = __shfl_sync(kAllLanes, grad_chosen, k);
#pragma unroll
        for (int i = 0; i < L::kValues; ++i) {
          if (L::expert(i) == expert) grad[i] += more;
        }
      }
    }
    if constexpr (kScore == kSoftmax) {
      float dot = 0.0f;
#pragma unroll
      for (int i = 0; i < L::kValues; ++i) dot += grad[i] * score[i];
      dot = warp_sum(dot);
#pragma unroll
      for (int i = 0; i < L::kValues; ++i) grad[i] = score[i] * (grad[i] - dot);
    } else {
#pragma unroll
      for (int i = 0; i < L::kValues; ++i) grad[i] *= score[i] * (1.0f - score[i]);
    }
    L::write(grad_logits_TE + token * num_experts, num_experts, grad);
  }
}

}  // namespace moeflow
