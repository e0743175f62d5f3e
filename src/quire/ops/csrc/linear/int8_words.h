// int8 elements as 16-bit words, multiplied in pairs with exact 32-bit sums.
#pragma once

#include "native/simd_int.h"

namespace quire {

constexpr int kWords = 2 * kLanes;  // words per vector
constexpr int kKeyDims = 16;        // elements of one key in a vector
constexpr int kKeysTogether = kWords / kKeyDims;
static_assert(kWords % kKeyDims == 0);

#if defined(__AVX512F__)

QUIRE_INLINE raw load_words(const int16_t* p) { return _mm512_loadu_si512(p); }
QUIRE_INLINE void store_words(int16_t* p, raw x) { _mm512_storeu_si512(p, x); }
using ByteHalf = __m256i;  // kWords bytes
QUIRE_INLINE ByteHalf load_bytes(const int8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
// Loads bytes [0, n) of p, n < kWords, with zeros after them.
QUIRE_INLINE ByteHalf load_bytes(const int8_t* p, int n) {
  return _mm256_maskz_loadu_epi8((__mmask32{1} << n) - 1, p);
}
QUIRE_INLINE raw to_words(ByteHalf x) { return _mm512_cvtepi8_epi16(x); }
// Loads kKeyDims bytes, or n < kKeyDims bytes with zeros after them.
QUIRE_INLINE __m128i load_key(const int8_t* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}
QUIRE_INLINE __m128i load_key(const int8_t* p, int n) {
  return _mm_maskz_loadu_epi8(static_cast<__mmask16>((1 << n) - 1), p);
}
QUIRE_INLINE raw words_of_keys(const __m128i (&keys)[kKeysTogether]) {
  return to_words(_mm256_inserti128_si256(_mm256_castsi128_si256(keys[0]), keys[1], 1));
}
// Loads kKeyDims words and repeats them for every key of a vector.
QUIRE_INLINE raw repeat_words(const int16_t* p) {
  return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
// Interleaves the bytes of a and b as words. in_order() restores the order of lanes.
QUIRE_INLINE void pair_words(ByteHalf a, ByteHalf b, raw (&out)[2]) {
  out[0] = to_words(_mm256_unpacklo_epi8(a, b));
  out[1] = to_words(_mm256_unpackhi_epi8(a, b));
}
// Puts the lanes of two vectors, as pair_words() leaves them, in the order of the bytes.
QUIRE_INLINE void in_order(vi (&x)[2]) {
  const raw a = (raw)x[0], b = (raw)x[1];
  x[0] = (vi)_mm512_shuffle_i64x2(a, b, 0x44);
  x[1] = (vi)_mm512_shuffle_i64x2(a, b, 0xEE);
}
// Interleaves the lower halves of the lanes of both.
QUIRE_INLINE raw words_in_turn(vi even, vi odd) {
  return _mm512_mask_blend_epi16(0xaaaaaaaa, (raw)even, _mm512_slli_epi32((raw)odd, 16));
}
// Stores x rounded to 16-bit integers.
QUIRE_INLINE void round_words(int16_t* p, vf x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(x)));
}

// Sums the lanes of kLanes vectors at once, separately for each key of a vector: lane i of out[key]
// is the sum of x[i].
QUIRE_INLINE void lane_sums(const vi (&x)[16], vi (&out)[kKeysTogether]) {
  static_assert(kKeysTogether == 2);
  // fours[p]: sums of the lower halves of x[8p] to x[8p + 7], then of their upper halves.
  raw fours[2];
  QUIRE_UNROLL
  for (int part = 0; part < 2; ++part) {
    raw half[4];
    QUIRE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const raw a = (raw)x[8 * part + i], b = (raw)x[8 * part + i + 4];
      const raw crossed = _mm512_mask_blend_epi64(0x33, a, b);
      half[i] = _mm512_add_epi32(_mm512_shuffle_i64x2(crossed, crossed, 0xB1),
                                 _mm512_mask_blend_epi64(0xCC, a, b));
    }
    const raw a = _mm512_add_epi32(_mm512_unpacklo_epi32(half[0], half[1]),
                                   _mm512_unpackhi_epi32(half[0], half[1]));
    const raw b = _mm512_add_epi32(_mm512_unpacklo_epi32(half[2], half[3]),
                                   _mm512_unpackhi_epi32(half[2], half[3]));
    fours[part] = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  }
  out[0] = (vi)_mm512_shuffle_i64x2(fours[0], fours[1], 0x44);
  out[1] = (vi)_mm512_shuffle_i64x2(fours[0], fours[1], 0xEE);
}

#else

QUIRE_INLINE raw load_words(const int16_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
QUIRE_INLINE void store_words(int16_t* p, raw x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x);
}
using ByteHalf = __m128i;
QUIRE_INLINE ByteHalf load_bytes(const int8_t* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}
QUIRE_INLINE ByteHalf load_bytes(const int8_t* p, int n) {
  int8_t buffer[kWords] = {};
  std::memcpy(buffer, p, n);
  return load_bytes(buffer);
}
QUIRE_INLINE raw to_words(ByteHalf x) { return _mm256_cvtepi8_epi16(x); }
QUIRE_INLINE ByteHalf load_key(const int8_t* p) { return load_bytes(p); }
QUIRE_INLINE ByteHalf load_key(const int8_t* p, int n) { return load_bytes(p, n); }
QUIRE_INLINE raw words_of_keys(const ByteHalf (&keys)[kKeysTogether]) {
  static_assert(kKeysTogether == 1);
  return to_words(keys[0]);
}
QUIRE_INLINE raw repeat_words(const int16_t* p) { return load_words(p); }
QUIRE_INLINE void pair_words(ByteHalf a, ByteHalf b, raw (&out)[2]) {
  out[0] = to_words(_mm_unpacklo_epi8(a, b));
  out[1] = to_words(_mm_unpackhi_epi8(a, b));
}
QUIRE_INLINE void in_order(vi (&)[2]) {}
QUIRE_INLINE raw words_in_turn(vi even, vi odd) {
  return _mm256_blend_epi16((raw)even, _mm256_slli_epi32((raw)odd, 16), 0xaa);
}
QUIRE_INLINE void round_words(int16_t* p, vf x) {
  const __m256i wide = _mm256_cvtps_epi32(x);
  _mm_storeu_si128(
      reinterpret_cast<__m128i*>(p),
      _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1)));
}

QUIRE_INLINE void lane_sums(const vi (&x)[8], vi (&out)[kKeysTogether]) {
  auto four = [&](int i) __attribute__((always_inline)) {
    return _mm256_hadd_epi32(_mm256_hadd_epi32((raw)x[i], (raw)x[i + 1]),
                             _mm256_hadd_epi32((raw)x[i + 2], (raw)x[i + 3]));
  };
  const raw a = four(0), b = four(4);
  out[0] = (vi)_mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20),
                                _mm256_permute2x128_si256(a, b, 0x31));
}

#endif

// Loads the pair of words at p into every lane.
QUIRE_INLINE raw two_words(const int16_t* p) {
  int32_t both;
  std::memcpy(&both, p, sizeof both);
  return (raw)set1_int(both);
}
// Adds to sum, in every lane, the products of two pairs of words.
QUIRE_INLINE vi add_pairs(vi sum, raw a, raw b) {
#if defined(__AVX512VNNI__)
  return (vi)_mm512_dpwssd_epi32((raw)sum, a, b);
#else
  return add_int(sum, pairs((vi)a, (vi)b));
#endif
}

}  // namespace quire
