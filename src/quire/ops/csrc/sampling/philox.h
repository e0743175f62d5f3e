// Random words for adjacent tokens: Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel Random
// Numbers: As Easy as 1, 2, 3", SC 2011, section 3.3), many counters at once.
#pragma once

#include "native/simd.h"

namespace quire {

// 32-bit words in 64-bit lanes; the upper halves may hold anything.
#if defined(__AVX512F__)
using vw = __m512i;
QUIRE_INLINE vw words(uint32_t x) { return _mm512_set1_epi64(x); }
QUIRE_INLINE vw load_words(const uint64_t* p) { return _mm512_loadu_si512(p); }
QUIRE_INLINE void store_words(uint32_t* p, vw x) { _mm512_storeu_si512(p, x); }
QUIRE_INLINE vw product(vw a, vw b) { return _mm512_mul_epu32(a, b); }
QUIRE_INLINE vw upper(vw x) { return _mm512_srli_epi64(x, 32); }
QUIRE_INLINE vw raise(vw x) { return _mm512_slli_epi64(x, 32); }
QUIRE_INLINE vw exclusive_or(vw a, vw b) { return _mm512_xor_si512(a, b); }
QUIRE_INLINE vw plus(vw a, vw b) { return _mm512_add_epi64(a, b); }
QUIRE_INLINE vw lower_of(vw low, vw high) { return _mm512_mask_mov_epi32(low, 0xAAAA, high); }
QUIRE_INLINE vw even_pairs(vw a, vw b) { return _mm512_unpacklo_epi64(a, b); }
QUIRE_INLINE vw odd_pairs(vw a, vw b) { return _mm512_unpackhi_epi64(a, b); }
#else
using vw = __m256i;
QUIRE_INLINE vw words(uint32_t x) { return _mm256_set1_epi64x(x); }
QUIRE_INLINE vw load_words(const uint64_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const vw*>(p));
}
QUIRE_INLINE void store_words(uint32_t* p, vw x) {
  _mm256_storeu_si256(reinterpret_cast<vw*>(p), x);
}
QUIRE_INLINE vw product(vw a, vw b) { return _mm256_mul_epu32(a, b); }
QUIRE_INLINE vw upper(vw x) { return _mm256_srli_epi64(x, 32); }
QUIRE_INLINE vw raise(vw x) { return _mm256_slli_epi64(x, 32); }
QUIRE_INLINE vw exclusive_or(vw a, vw b) { return _mm256_xor_si256(a, b); }
QUIRE_INLINE vw plus(vw a, vw b) { return _mm256_add_epi64(a, b); }
QUIRE_INLINE vw lower_of(vw low, vw high) { return _mm256_blend_epi32(low, high, 0xAA); }
QUIRE_INLINE vw even_pairs(vw a, vw b) { return _mm256_unpacklo_epi64(a, b); }
QUIRE_INLINE vw odd_pairs(vw a, vw b) { return _mm256_unpackhi_epi64(a, b); }
#endif

constexpr int kCounters = sizeof(vw) / 8;  // per vector
constexpr int kNoiseTokens = 64;           // per call of noise_bits
constexpr int kVectors = kNoiseTokens / 4 / kCounters;

// Source of a draw's words: the same key and counter give the same words everywhere.
struct Stream {
  uint32_t key[2], position, sample;
};

// Writes the word of token first + i to bits[i] for i < kNoiseTokens; first is a multiple of 4. A
// counter gives the words of four tokens.
QUIRE_INLINE void noise_bits(const Stream& stream, int64_t first, uint32_t* bits) {
  // Counters of the even lanes come first, so that unpacking 64-bit pairs puts tokens in order.
  uint64_t counters[kCounters];
  for (int i = 0; i < kCounters; ++i) counters[i] = i / 2 + i % 2 * (kCounters / 2);
  const vw multiplier_0 = words(0xD2511F53), multiplier_1 = words(0xCD9E8D57);
  vw c[kVectors][4];
  for (int v = 0; v < kVectors; ++v) {
    const uint32_t start = static_cast<uint32_t>(first / 4 + v * kCounters);
    c[v][0] = plus(words(start), load_words(counters));
    c[v][1] = words(stream.position);
    c[v][2] = words(stream.sample);
    c[v][3] = words(0);
  }
  uint32_t key_0 = stream.key[0], key_1 = stream.key[1];
  for (int round = 0; round < 10; ++round, key_0 += 0x9E3779B9, key_1 += 0xBB67AE85) {
    const vw k0 = words(key_0), k1 = words(key_1);
    for (int v = 0; v < kVectors; ++v) {
      const vw a = product(c[v][0], multiplier_0), b = product(c[v][2], multiplier_1);
      c[v][0] = exclusive_or(exclusive_or(upper(b), c[v][1]), k0);
      c[v][2] = exclusive_or(exclusive_or(upper(a), c[v][3]), k1);
      c[v][1] = b;
      c[v][3] = a;
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    const vw front = lower_of(c[v][0], raise(c[v][1])), back = lower_of(c[v][2], raise(c[v][3]));
    uint32_t* out = bits + v * 4 * kCounters;
    store_words(out, even_pairs(front, back));
    store_words(out + 2 * kCounters, odd_pairs(front, back));
  }
}

}  // namespace quire
