// Softmax down the lanes, from scores [tokens, lanes] to weights [lanes, tokens]. See
// attention/amx.h.
#pragma once

#if defined(__AMX_BF16__)

#include "attention/amx_products.h"

namespace quire::attention {

// Keys of a block that each lane sees, relative to the block: first <= key < first + count.
struct LaneKeys {
  __m512i first, count;

  QUIRE_INLINE vmask sees(int key) const {
    return _mm512_cmplt_epu32_mask(_mm512_sub_epi32(_mm512_set1_epi32(key), first), count);
  }
};

// Turns scores [kKeyBlock, lanes] into weights 2^(score - max), [lanes, pairs of tokens], for the
// tiles of pairs from <= tile < to; no lane sees keys of other tiles. kMasked: some lanes do not
// see all keys. factors: receives the factor by which each lane's acc must be multiplied. lines: to
// prefetch per 8 tokens. Returns the lanes whose factor is not 1.
template <bool kMasked>
inline vmask soften_lanes(const float* scores, vf scale, const LaneKeys& keys, int from, int to,
                          float* maxima, float* sums, bf16* weights, float* factors, Lines* ahead,
                          int lines) {
  const vf lowest = set1(kNegativeInfinity);
  vf tops[4] = {lowest, lowest, lowest, lowest};
  for (int t = from * kPairTokens; t < to * kPairTokens; t += 4) {
    QUIRE_UNROLL
    for (int i = 0; i < 4; ++i) {
      vf x = mul(load(scores + (t + i) * kLanes), scale);
      if constexpr (kMasked) x = select(keys.sees(t + i), x, lowest);
      tops[i] = max(x, tops[i]);
    }
  }
  const vf before = load(maxima);
  const vf now = max(max(max(tops[0], tops[1]), max(tops[2], tops[3])), before);
  const vf base = select(less(lowest, now), now, zero());
  vf totals[4] = {zero(), zero(), zero(), zero()};
  const __m512i places =
      _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,  //
                       23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const auto ones = reinterpret_cast<__m512bh>(_mm512_set1_epi16(0x3f80));
  alignas(64) uint32_t pairs[kTileTokens][kLanes];
  for (int tile = from; tile < to; ++tile) {
    const int t = tile * kPairTokens;
    auto weight = [&](int key) __attribute__((always_inline)) {
      const vf x = weight_of(_mm512_fmsub_ps(load(scores + key * kLanes), scale, base));
      return kMasked ? select(keys.sees(key), x, zero()) : x;
    };
    for (int first = 0; first < kTileTokens; first += 4) {
      ahead->fetch(lines);
      QUIRE_UNROLL
      for (int k = 0; k < 4; ++k) {
        const int i = first + k;
        const vf low = weight(t + i), high = weight(t + i + kTileTokens);
        const auto both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
        const __m512i pair = _mm512_permutexvar_epi16(places, both);
        totals[k] = _mm512_dpbf16_ps(totals[k], reinterpret_cast<__m512bh>(pair), ones);
        _mm512_store_si512(pairs[i], pair);
      }
    }
    turn_words([&](int i) { return pairs[i]; }, weights + tile * kTileElements, kTileBytes,
               0xffff);
  }
  const vmask shrinks = less(before, now) & less(lowest, before);
  const vf factor = select(shrinks, exp2_negative(sub(before, now)), set1(1.0f));
  const vf total = add(add(totals[0], totals[1]), add(totals[2], totals[3]));
  store(maxima, now);
  store(sums, add(mul(load(sums), factor), total));
  store(factors, factor);
  return shrinks;
}

}  // namespace quire::attention

#endif
