// Softmax of attention: turns scores of a key block into weights and merges the states of spans.
#pragma once

#include <algorithm>

#include "attention/bend.h"

namespace quire::attention {

// Softmax state of the rows of a tile. acc / sum is the output; both are scaled by 2^-max.
struct State {
  float* acc;  // [kv_heads, rows, width]
  float* max;  // [kv_heads, rows]
  float* sum;  // [kv_heads, rows]
};

// Returns the bits of the keys low <= key < high of a block.
inline uint64_t key_bits(int low, int high) {
  return low >= high ? 0 : ~uint64_t{0} << low & ~uint64_t{0} >> (kKeyBlock - high);
}

// Turns one row's scores of a key block into weights 2^(score - max) and rescales the row's state.
// Keys outside low <= key < high get weight 0 whatever their score. scales: scales of the keys of a
// quantized cache, null for others; V's scale multiplies the weight, but not the sum of weights.
// more: added to the scaled scores, or null. bend: applied to the result.
inline void soften(int width, float* scores, int row, int low, int high,
                   const HeadScales* scales, const float* more, const RowBend& bend,
                   const State& state) {
  float* s = scores + row * kKeyBlock;
  if (low >= high) {
    std::memset(s, 0, kKeyBlock * sizeof(float));
    return;
  }
  const bool bends = bend.any();
  vf top = set1(kNegativeInfinity);
  for (int k = 0; k < kKeyBlock; k += kLanes) {
    vf x = load(s + k);
    if (scales != nullptr) store(s + k, x = mul(x, load(scales->k + k)));
    if (more != nullptr) store(s + k, x = add(x, load(more + k)));
    if (bends) store(s + k, x = bend(x, k));
    top = max(select(lanes(low - k, high - k), x, set1(kNegativeInfinity)), top);
  }
  const float before = state.max[row], best = maximum(top);
  const float now = best > before ? best : before;
  const vf base = set1(now == kNegativeInfinity ? 0.0f : now);
  vf total = zero();
  for (int k = 0; k < kKeyBlock; k += kLanes) {
    const vmask seen = lanes(low - k, high - k);
    const vf weight = exp2_negative(sub(load(s + k), base));
    total = add(total, select(seen, weight, zero()));
    const vf scaled = scales == nullptr ? weight : mul(weight, load(scales->v + k));
    store(s + k, select(seen, scaled, zero()));
  }
  state.max[row] = now;
  if (now > before && before > kNegativeInfinity) {
    float factor[kLanes];
    store(factor, exp2_negative(set1(before - now)));
    const vf shrink = set1(factor[0]);
    float* acc = state.acc + row * width;
    for (int d = 0; d < width; d += kLanes) store(acc + d, mul(load(acc + d), shrink));
    state.sum[row] = state.sum[row] * factor[0];
  }
  state.sum[row] = state.sum[row] + sum(total);
}

#if defined(__AVX512BF16__)
// Returns 2^x for x <= 0 with a relative error of 6e-6, far less than that of rounding to bf16.
// Below 2^-126 the rounded result is 0. NaN stays NaN.
QUIRE_INLINE vf weight_of(vf x) {
  x = max(set1(-127.0f), x);
  constexpr int kBelow = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
  const vf f = _mm512_reduce_ps(x, kBelow);  // x minus the integer below it, which scalef takes
  vf p = set1(1.3426686e-2f);
  p = fma(p, f, set1(5.2242473e-2f));
  p = fma(p, f, set1(2.4128021e-1f));
  p = fma(p, f, set1(6.9304484e-1f));
  p = fma(p, f, set1(1.0f));
  return _mm512_scalef_ps(p, x);
}
#endif

// Merges part into total: the softmax of two disjoint sets of keys (Dao 2022, arXiv:2205.14135,
// section 3.1).
inline void merge(int num_states, int width, const State& part, State& total) {
  for (int row = 0; row < num_states; ++row) {
    if (part.sum[row] == 0.0f) continue;  // the row sees no key of this span
    float* acc = total.acc + row * width;
    const float* other = part.acc + row * width;
    if (total.sum[row] == 0.0f) {
      std::memcpy(acc, other, sizeof(float) * width);
      total.max[row] = part.max[row];
      total.sum[row] = part.sum[row];
      continue;
    }
    const float top = std::max(total.max[row], part.max[row]);
    float ours[kLanes], theirs[kLanes];
    store(ours, exp2_negative(set1(total.max[row] - top)));
    store(theirs, exp2_negative(set1(part.max[row] - top)));
    const vf a = set1(ours[0]), b = set1(theirs[0]);
    for (int d = 0; d < width; d += kLanes)
      store(acc + d, fma(load(acc + d), a, mul(load(other + d), b)));
    total.sum[row] = total.sum[row] * ours[0] + part.sum[row] * theirs[0];
    total.max[row] = top;
  }
}

}  // namespace quire::attention
