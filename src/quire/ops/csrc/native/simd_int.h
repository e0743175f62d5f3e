// One vector of integers per instruction set, and exact products of unsigned 8-bit or 4-bit weights
// with signed 8-bit activations.
//
// A 32-bit lane holds a quad: four weights of one column. Every instruction set computes the same
// integers, so that the float32 operations after them give the same bits everywhere.
#pragma once

#include "native/simd.h"

namespace quire {

#if defined(__AVX512F__)

// Instead of __m512i, whose lanes have 64 bits: for sums in that type gcc makes a copy in every
// iteration of a loop.
using vi = __v16si;
using raw = __m512i;

QUIRE_INLINE vi load_int(const void* p) { return (vi)_mm512_loadu_si512(p); }
QUIRE_INLINE void store_int(void* p, vi x) { _mm512_storeu_si512(p, (raw)x); }
QUIRE_INLINE vi set1_int(int32_t x) { return (vi)_mm512_set1_epi32(x); }
QUIRE_INLINE vi add_int(vi a, vi b) { return (vi)_mm512_add_epi32((raw)a, (raw)b); }
QUIRE_INLINE vi sub_int(vi a, vi b) { return (vi)_mm512_sub_epi32((raw)a, (raw)b); }
QUIRE_INLINE vi sub_bytes(vi a, vi b) { return (vi)_mm512_sub_epi8((raw)a, (raw)b); }
// Repeats the lowest byte of every lane four times.
QUIRE_INLINE vi repeat_byte(vi x) {
  const __m128i first = _mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12);
  return (vi)_mm512_shuffle_epi8((raw)x, _mm512_broadcast_i32x4(first));
}
QUIRE_INLINE vi max_int(vi a, vi b) { return (vi)_mm512_max_epi32((raw)a, (raw)b); }
QUIRE_INLINE vi and_int(vi a, vi b) { return (vi)_mm512_and_si512((raw)a, (raw)b); }
QUIRE_INLINE vi shift_left(vi x, int n) { return (vi)_mm512_slli_epi32((raw)x, n); }
QUIRE_INLINE vi shift_right(vi x, int n) { return (vi)_mm512_srli_epi32((raw)x, n); }
QUIRE_INLINE vi or_int(vi a, vi b) { return (vi)_mm512_or_si512((raw)a, (raw)b); }
// Loads a table of 16 bytes. look_up() takes entries by the lowest 4 bits of every byte; its other
// bits must be zero.
QUIRE_INLINE vi load_table(const int8_t* p) {
  return (vi)_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
QUIRE_INLINE vi look_up(vi table, vi x) { return (vi)_mm512_shuffle_epi8((raw)table, (raw)x); }
// Loads kLanes bytes, one into every lane.
QUIRE_INLINE vi load_signed(const void* p) {
  return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
QUIRE_INLINE vi load_unsigned(const void* p) {
  return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
QUIRE_INLINE vf to_float(vi x) { return _mm512_cvtepi32_ps((raw)x); }
QUIRE_INLINE vi to_int(vf x) { return (vi)_mm512_cvtps_epi32(x); }
QUIRE_INLINE vi bits_of(vf x) { return (vi)_mm512_castps_si512(x); }
QUIRE_INLINE vf float_of(vi bits) { return _mm512_castsi512_ps((raw)bits); }
QUIRE_INLINE vi shift_right_16bit(vi x, int n) { return (vi)_mm512_srli_epi16((raw)x, n); }
// Multiplies 16-bit words and adds the products in pairs.
QUIRE_INLINE vi pairs(vi a, vi b) { return (vi)_mm512_madd_epi16((raw)a, (raw)b); }
QUIRE_INLINE int32_t sum(vi x) { return _mm512_reduce_add_epi32((raw)x); }
QUIRE_INLINE int32_t maximum(vi x) { return _mm512_reduce_max_epi32((raw)x); }
// Stores the low byte of every lane.
QUIRE_INLINE void store_bytes(void* p, vi x) {
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8((raw)x));
}
// Stores the low bytes of integers made from a load_both(), in the order of its elements.
template <class E>
QUIRE_INLINE void store_bytes(const E*, void* p, vi a, vi b) {
  store_bytes(p, a);
  store_bytes(static_cast<uint8_t*>(p) + kLanes, b);
}
QUIRE_INLINE void store_bytes(const bf16*, void* p, vi even, vi odd) {
  const raw words = _mm512_mask_blend_epi8(0x2222222222222222, (raw)even, (raw)shift_left(odd, 8));
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16(words));
}
// Loads numbers of 4 bits: the low and the high halves of kLanes bytes.
QUIRE_INLINE void load_halves(const uint8_t* p, vi& low, vi& high) {
  const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m128i mask = _mm_set1_epi8(15);
  low = (vi)_mm512_cvtepu8_epi32(_mm_and_si128(both, mask));
  high = (vi)_mm512_cvtepu8_epi32(_mm_and_si128(_mm_srli_epi16(both, 4), mask));
}

#else

using vi = __v8si;
using raw = __m256i;

QUIRE_INLINE vi load_int(const void* p) {
  return (vi)_mm256_loadu_si256(static_cast<const __m256i*>(p));
}
QUIRE_INLINE vi set1_int(int32_t x) { return (vi)_mm256_set1_epi32(x); }
QUIRE_INLINE vi add_int(vi a, vi b) { return (vi)_mm256_add_epi32((raw)a, (raw)b); }
QUIRE_INLINE vi sub_int(vi a, vi b) { return (vi)_mm256_sub_epi32((raw)a, (raw)b); }
QUIRE_INLINE vi sub_bytes(vi a, vi b) { return (vi)_mm256_sub_epi8((raw)a, (raw)b); }
QUIRE_INLINE vi max_int(vi a, vi b) { return (vi)_mm256_max_epi32((raw)a, (raw)b); }
QUIRE_INLINE vi and_int(vi a, vi b) { return (vi)_mm256_and_si256((raw)a, (raw)b); }
QUIRE_INLINE void store_int(void* p, vi x) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), (raw)x);
}
QUIRE_INLINE vi or_int(vi a, vi b) { return (vi)_mm256_or_si256((raw)a, (raw)b); }
QUIRE_INLINE vi shift_left(vi x, int n) { return (vi)_mm256_slli_epi32((raw)x, n); }
QUIRE_INLINE vi shift_right(vi x, int n) { return (vi)_mm256_srli_epi32((raw)x, n); }
QUIRE_INLINE vi load_table(const int8_t* p) {
  return (vi)_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
QUIRE_INLINE vi look_up(vi table, vi x) { return (vi)_mm256_shuffle_epi8((raw)table, (raw)x); }
QUIRE_INLINE vi load_signed(const void* p) {
  return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
}
QUIRE_INLINE vi load_unsigned(const void* p) {
  return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
}
QUIRE_INLINE vf to_float(vi x) { return _mm256_cvtepi32_ps((raw)x); }
QUIRE_INLINE vi to_int(vf x) { return (vi)_mm256_cvtps_epi32(x); }
QUIRE_INLINE vi bits_of(vf x) { return (vi)_mm256_castps_si256(x); }
QUIRE_INLINE vf float_of(vi bits) { return _mm256_castsi256_ps((raw)bits); }
QUIRE_INLINE vi shift_right_16bit(vi x, int n) { return (vi)_mm256_srli_epi16((raw)x, n); }
QUIRE_INLINE vi pairs(vi a, vi b) { return (vi)_mm256_madd_epi16((raw)a, (raw)b); }
QUIRE_INLINE int32_t sum(vi x) {
  __m128i s =
      _mm_add_epi32(_mm256_castsi256_si128((raw)x), _mm256_extracti128_si256((raw)x, 1));
  s = _mm_add_epi32(s, _mm_unpackhi_epi64(s, s));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 1)));
}
QUIRE_INLINE int32_t maximum(vi x) {
  __m128i m =
      _mm_max_epi32(_mm256_castsi256_si128((raw)x), _mm256_extracti128_si256((raw)x, 1));
  m = _mm_max_epi32(m, _mm_unpackhi_epi64(m, m));
  return _mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 1)));
}
QUIRE_INLINE void store_bytes(void* p, vi x) {
  const __m128i words =
      _mm_packs_epi32(_mm256_castsi256_si128((raw)x), _mm256_extracti128_si256((raw)x, 1));
  _mm_storel_epi64(static_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}
QUIRE_INLINE void load_halves(const uint8_t* p, vi& low, vi& high) {
  const __m128i both = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  const __m128i mask = _mm_set1_epi8(15);
  low = (vi)_mm256_cvtepu8_epi32(_mm_and_si128(both, mask));
  high = (vi)_mm256_cvtepu8_epi32(_mm_and_si128(_mm_srli_epi16(both, 4), mask));
}

#endif

// Returns the largest magnitude of n elements; infinity or NaN if there is one, since their bits
// are the largest.
QUIRE_INLINE float largest_magnitude(const bf16* p, int64_t n) {
  const __m256i magnitude = _mm256_set1_epi16(0x7fff);
  __m256i top = _mm256_setzero_si256();
  auto take = [&](const bf16* from) __attribute__((always_inline)) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    top = _mm256_max_epi16(_mm256_and_si256(bits, magnitude), top);
  };
  constexpr int64_t kStep = 16;
  int64_t i = 0;
#if defined(__AVX512F__)
  __m512i tops = _mm512_setzero_si512();
  for (; i + 2 * kStep <= n; i += 2 * kStep) {
    const __m512i bits = _mm512_loadu_si512(p + i);
    tops = _mm512_max_epi16(_mm512_and_si512(bits, _mm512_set1_epi16(0x7fff)), tops);
  }
  top = _mm256_max_epi16(_mm512_castsi512_si256(tops), _mm512_extracti64x4_epi64(tops, 1));
#endif
  for (; i + kStep <= n; i += kStep) take(p + i);
  if (i < n) {
    bf16 rest[kStep] = {};
    std::memcpy(rest, p + i, (n - i) * sizeof(bf16));
    take(rest);
  }
  const __m128i half = _mm_max_epi16(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
  const __m128i lowest = _mm_minpos_epu16(_mm_xor_si128(half, _mm256_castsi256_si128(magnitude)));
  const int bits = (_mm_cvtsi128_si32(lowest) & 0x7fff) ^ 0x7fff;
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(bits << 16)));
}
template <class E>
QUIRE_INLINE float largest_magnitude(const E* p, int64_t n) {
  vi top = set1_int(0);
  auto take = [&](vf x) __attribute__((always_inline)) {
    top = max_int(top, and_int(bits_of(x), set1_int(0x7fffffff)));
  };
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) take(load(p + i));
  if (i < n) take(load_part(p + i, static_cast<int>(n - i)));
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(maximum(top))));
}

// Products of 8-bit weights, 0 to 255: weights_of(), and add_bytes() with the activations of a
// quad, which broadcast() loads from kByteInputs numbers: a quad's bytes, or what put_byte_inputs()
// writes.
//
// Products of weights of fewer bits: open_sum(), add_nibbles(), close_sum(). add_nibbles() may be
// called 8 times in between with 4 bits, 4 times with 5 and twice with 6: then sums fit in 16 bits.

#if defined(__AVX512VNNI__)

constexpr int kByteInputs = 1;
using Bytes = vi;
using Inputs = vi;
QUIRE_INLINE Bytes weights_of(vi quad) { return quad; }
QUIRE_INLINE Inputs broadcast(const int32_t* x) { return set1_int(*x); }
QUIRE_INLINE vi add_bytes(vi sum, Bytes w, Inputs x) {
  return (vi)_mm512_dpbusd_epi32((raw)sum, (raw)w, (raw)x);
}

constexpr bool kSumsInPlace = true;  // open_sum continues the sum itself
QUIRE_INLINE vi open_sum(vi sum) { return sum; }
QUIRE_INLINE vi add_nibbles(vi part, vi w, vi x) { return add_bytes(part, w, x); }
QUIRE_INLINE vi close_sum(vi, vi part) { return part; }

#else

// Products in pairs of 16 bits, since sums of two products of bytes (maddubs) would saturate.
constexpr int kByteInputs = 2;
struct Bytes {
  vi even, odd;
};
using Inputs = Bytes;
QUIRE_INLINE Bytes weights_of(vi quad) {
  return {and_int(quad, set1_int(0x00ff00ff)), shift_right_16bit(quad, 8)};
}
QUIRE_INLINE Inputs broadcast(const int32_t* x) { return {set1_int(x[0]), set1_int(x[1])}; }
QUIRE_INLINE void put_byte_inputs(vi numbers, int32_t* inputs) {
  int8_t x[kLanes];
  store_bytes(x, numbers);
  for (int k = 0; k < kLanes; k += 4, inputs += 2) {
    const int16_t apart[4] = {x[k], x[k + 2], x[k + 1], x[k + 3]};
    std::memcpy(inputs, apart, sizeof apart);
  }
}
QUIRE_INLINE vi add_bytes(vi sum, const Bytes& w, const Inputs& x) {
  return add_int(add_int(sum, pairs(w.even, x.even)), pairs(w.odd, x.odd));
}

// Sums of products of bytes fit here, such as 8 quads of 2 · 15 · 127 in each 16 bits.
constexpr bool kSumsInPlace = false;
QUIRE_INLINE vi open_sum(vi) { return set1_int(0); }
QUIRE_INLINE vi add_nibbles(vi part, vi w, vi x) {
#if defined(__AVX512F__)
  return (vi)_mm512_add_epi16((raw)part, _mm512_maddubs_epi16((raw)w, (raw)x));
#else
  return (vi)_mm256_add_epi16((raw)part, _mm256_maddubs_epi16((raw)w, (raw)x));
#endif
}
QUIRE_INLINE vi close_sum(vi sum, vi part) { return add_int(sum, pairs(part, set1_int(0x10001))); }

#endif

}  // namespace quire
