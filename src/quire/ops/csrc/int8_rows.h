// Rows of int8 with one float scale: value = scale · element, elements in -127 … 127.
#pragma once

#include <type_traits>

#include "simd.h"

namespace quire {

#if defined(__AVX512F__)
QUIRE_INLINE vf load(const int8_t* p) {
  return _mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
// x rounded to the nearest integer, ties to even; -128 <= x <= 127.
QUIRE_INLINE void store(int8_t* p, vf x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
}
#else
QUIRE_INLINE vf load(const int8_t* p) {
  return _mm256_cvtepi32_ps(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
QUIRE_INLINE void store(int8_t* p, vf x) {
  const __m256i wide = _mm256_cvtps_epi32(x);
  const __m128i half =
      _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(half, half));
}
#endif

// Not the templates of simd.h: those were compiled before int8_t had load and store.
QUIRE_INLINE vf load_part(const int8_t* p, int n) {
  int8_t buffer[kLanes] = {};
  std::memcpy(buffer, p, n);
  return load(buffer);
}
QUIRE_INLINE void store_part(int8_t* p, vf x, int n) {
  int8_t buffer[kLanes];
  store(buffer, x);
  std::memcpy(p, buffer, n);
}

// The largest magnitude of n elements, NaN when one of them is.
QUIRE_INLINE float largest(const bf16* p, int64_t n) {
  // Magnitudes are in the order of their bits, and NaN is above them all.
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
template <class From>
QUIRE_INLINE float largest(const From* p, int64_t n) {
  vf top = zero(), broken = zero();  // max drops NaN; x · 0 is NaN unless x is finite
  auto take = [&](vf x) __attribute__((always_inline)) {
    top = max(absolute(x), top);
    broken = fma(x, zero(), broken);
  };
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) take(load(p + i));
  if (i < n) take(load_part(p + i, static_cast<int>(n - i)));
  return sum(broken) == 0.0f ? maximum(top) : std::numeric_limits<float>::quiet_NaN();
}

// Elements of a row over its scale, into bytes: |x · inverse| < 127.5.
template <class From>
QUIRE_INLINE void round_bytes(const From* from, int8_t* to, int64_t n, vf inverse) {
  int64_t i = 0;
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<From, bf16>) {
    for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
      const __m512i even = _mm512_cvtps_epi32(mul(lower_halves(from + i), inverse));
      const __m512i odd = _mm512_cvtps_epi32(mul(upper_halves(from + i), inverse));
      const __m512i pairs = _mm512_mask_blend_epi8(0x2222222222222222, even,
                                                   _mm512_slli_epi32(odd, 8));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), _mm512_cvtepi32_epi16(pairs));
    }
  }
#endif
  for (; i + kLanes <= n; i += kLanes) store(to + i, mul(load(from + i), inverse));
  const int rest = static_cast<int>(n - i);
  if (rest > 0) store_part(to + i, mul(load_part(from + i, rest), inverse), rest);
}

// Quantizes n elements and returns their scale, the largest magnitude / 127. Magnitudes below
// 127 · 2^-126 become 0 with scale 0. When an element is not finite the scale is NaN, so that
// whoever reads the row sees it.
template <class From>
QUIRE_INLINE float quantize_row(const From* from, int8_t* to, int64_t n) {
  const float top = largest(from, n), scale = top / 127.0f;
  const bool finite = top < std::numeric_limits<float>::infinity();
  if (!finite || scale < std::numeric_limits<float>::min()) {
    std::memset(to, 0, n);
    return finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
  }
  round_bytes(from, to, n, set1(1.0f / scale));
  return scale;
}

// DType codes of a KV cache: those of activations, and int8.
constexpr int32_t kInt8Cache = 3;

template <class F>
QUIRE_INLINE int dispatch_cache(int32_t dtype, F&& f) {
  if (dtype != kInt8Cache) return dispatch(static_cast<DType>(dtype), f);
  f(static_cast<int8_t*>(nullptr));
  return 0;
}

}  // namespace quire
