// Biases of K and V that an int8 cache does not hold; attention adds them.
#pragma once

#include "attention/keys.h"

namespace quire::attention {

// Bias of K before its rotation: values[kv head][n] belongs to the dims pairs[n] and pairs[n] +
// half. cos and sin by pair and position: [half, stride], where stride is a multiple of kKeyBlock.
struct KeyBias {
  const int32_t* pairs;
  const float* values;  // [K, count, 2]
  const float* cos;
  const float* sin;
  int64_t count, half, stride;

  // Writes the factors of kv head `head` for a rotated query and a scale. The bias adds Σ_n
  // factors[2n] · cos[pairs[n]][p] + factors[2n + 1] · sin[pairs[n]][p] to the score with the key
  // at position p.
  void weigh(const float* q, int64_t head, float scale, float* factors) const {
    const float* value = values + head * count * 2;
    for (int64_t n = 0; n < count; ++n, value += 2, factors += 2) {
      const float a = q[pairs[n]], b = q[pairs[n] + half];
      factors[0] = scale * (a * value[0] + b * value[1]);
      factors[1] = scale * (b * value[0] - a * value[1]);
    }
  }

  // Computes those sums for NR adjacent rows with the key block at `block`, at least for its keys
  // first <= key < last; rows of scores are kKeyBlock long. The sum of a key runs in the order of
  // the pairs, whatever else is computed.
  template <int NR>
  QUIRE_INLINE void score(const float* factors, int64_t block, int first, int last,
                          float* scores) const {
    constexpr int kVectors = 4, kTogether = kVectors * kLanes;
    static_assert(kKeyBlock % kTogether == 0);
    for (int k = first / kTogether * kTogether; k < last; k += kTogether) {
      vf sums[NR][kVectors];
      QUIRE_UNROLL
      for (int r = 0; r < NR; ++r)
        QUIRE_UNROLL
        for (int i = 0; i < kVectors; ++i) sums[r][i] = zero();
      auto add = [&](const float* table, const float* factor) __attribute__((always_inline)) {
        vf angles[kVectors];
        QUIRE_UNROLL
        for (int i = 0; i < kVectors; ++i) angles[i] = load(table + i * kLanes);
        QUIRE_UNROLL
        for (int r = 0; r < NR; ++r) {
          const vf weight = set1(factor[2 * r * count]);
          QUIRE_UNROLL
          for (int i = 0; i < kVectors; ++i) sums[r][i] = fma(weight, angles[i], sums[r][i]);
        }
      };
      for (int64_t n = 0; n < count; ++n) {
        const int64_t at = pairs[n] * stride + block + k;
        add(cos + at, factors + 2 * n);
        add(sin + at, factors + 2 * n + 1);
      }
      QUIRE_UNROLL
      for (int r = 0; r < NR; ++r)
        QUIRE_UNROLL
        for (int i = 0; i < kVectors; ++i)
          store(scores + r * kKeyBlock + k + i * kLanes, sums[r][i]);
    }
  }
};

}  // namespace quire::attention
