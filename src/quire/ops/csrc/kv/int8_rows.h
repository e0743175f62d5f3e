// Rows of int8 with one float scale: value = scale · element, elements in -127 … 127.
#pragma once

#include "native/simd_int.h"

namespace quire {

#if defined(__AVX512F__)
QUIRE_INLINE vf load(const int8_t* p) {
  return _mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
// Stores x rounded to the nearest integer, ties to even; -128 <= x <= 127.
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

// Overloads of the templates in native/simd.h, which were compiled before int8_t had load and
// store.
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

// Rounds elements of a row times `inverse`, 1 / scale, to bytes; |x · inverse| < 127.5.
template <class From>
QUIRE_INLINE void round_bytes(const From* from, int8_t* to, int64_t n, vf inverse) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    const vf2 both = load_both(from + i);
    store_bytes(from, to + i, to_int(mul(both.a, inverse)), to_int(mul(both.b, inverse)));
  }
#endif
  for (; i + kLanes <= n; i += kLanes) store(to + i, mul(load(from + i), inverse));
  const int rest = static_cast<int>(n - i);
  if (rest > 0) store_part(to + i, mul(load_part(from + i, rest), inverse), rest);
}

// Quantizes n elements and returns their scale, the largest magnitude / 127. Magnitudes below 127 ·
// 2^-126 become 0 with scale 0. If an element is not finite the scale is NaN, so that readers of
// the row notice.
template <class From>
QUIRE_INLINE float quantize_row(const From* from, int8_t* to, int64_t n) {
  const float top = largest_magnitude(from, n), scale = top / 127.0f;
  const bool finite = top < std::numeric_limits<float>::infinity();
  if (!finite || scale < std::numeric_limits<float>::min()) {
    std::memset(to, 0, n);
    return finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
  }
  round_bytes(from, to, n, set1(1.0f / scale));
  return scale;
}

// DType codes of a KV cache: the codes of activations, and int8.
constexpr int32_t kInt8Cache = 3;

template <class F>
QUIRE_INLINE int dispatch_cache(int32_t dtype, F&& f) {
  if (dtype != kInt8Cache) return dispatch(static_cast<DType>(dtype), f);
  f(static_cast<int8_t*>(nullptr));
  return 0;
}

}  // namespace quire
