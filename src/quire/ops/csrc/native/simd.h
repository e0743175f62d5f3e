// One vector of floats per instruction set, and the element types that load into it.
//
// Every source file is compiled once per instruction set, into a library of its own. Arithmetic
// uses explicit fma() and is compiled with -ffp-contract=off, so that a value does not depend on
// the template instance that computed it. To add an instruction set, add a section here and a row
// to ISAS in ops/compile/build.py. Wider products (VNNI, AVX512_BF16, AMX) belong in files of their
// own, under an #ifdef on the macro that their flag defines.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#define QUIRE_API extern "C" __attribute__((visibility("default")))
#define QUIRE_INLINE inline __attribute__((always_inline))
// Unrolls loops over the registers of a tile. Without it GCC keeps arrays of vectors in memory.
#define QUIRE_UNROLL _Pragma("GCC unroll 16")

namespace quire {

enum class DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.4426950408889634f;

#if defined(__AVX512F__)

constexpr int kLanes = 16;
using vf = __m512;
using vmask = __mmask16;
// 2 kLanes elements of a row. For bf16 these are the even and the odd ones, which widen at once;
// for other types the first and the last kLanes.
struct vf2 {
  vf a, b;
};

QUIRE_INLINE vf zero() { return _mm512_setzero_ps(); }
QUIRE_INLINE vf set1(float x) { return _mm512_set1_ps(x); }
QUIRE_INLINE vf load(const float* p) { return _mm512_loadu_ps(p); }
QUIRE_INLINE void store(float* p, vf x) { _mm512_storeu_ps(p, x); }
QUIRE_INLINE vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
QUIRE_INLINE vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
QUIRE_INLINE vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
QUIRE_INLINE vf div(vf a, vf b) { return _mm512_div_ps(a, b); }
QUIRE_INLINE vf max(vf a, vf b) { return _mm512_max_ps(a, b); }  // b when either is NaN
QUIRE_INLINE vf min(vf a, vf b) { return _mm512_min_ps(a, b); }
QUIRE_INLINE vf absolute(vf x) { return _mm512_abs_ps(x); }
QUIRE_INLINE vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
// Swaps the lanes that are kDistance apart, in pairs of blocks of so many lanes.
template <int kDistance>
QUIRE_INLINE vf swap_lanes(vf x) {
  if constexpr (kDistance == 1) return _mm512_permute_ps(x, 0xb1);
  if constexpr (kDistance == 2) return _mm512_permute_ps(x, 0x4e);
  if constexpr (kDistance == 4) return _mm512_shuffle_f32x4(x, x, 0xb1);
  if constexpr (kDistance == 8) return _mm512_shuffle_f32x4(x, x, 0x4e);
}
// Returns x minus the nearest integer; 0 for an infinite x.
QUIRE_INLINE vf fraction(vf x) {
  return _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
QUIRE_INLINE vf scale_by_power(vf x, vf n) { return _mm512_scalef_ps(x, n); }
QUIRE_INLINE vmask less(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
// Returns a mask of the lanes first <= lane < last.
QUIRE_INLINE vmask lanes(int first, int last) {
  const uint32_t below = last <= 0 ? 0u : last >= 16 ? 0xffffu : (1u << last) - 1;
  const uint32_t under = first <= 0 ? 0u : first >= 16 ? 0xffffu : (1u << first) - 1;
  return static_cast<vmask>(below & ~under);
}
// Returns a mask whose lane i is bit i.
QUIRE_INLINE vmask lanes_of(uint64_t bits) { return static_cast<vmask>(bits); }
QUIRE_INLINE vf select(vmask m, vf yes, vf no) { return _mm512_mask_blend_ps(m, no, yes); }

QUIRE_INLINE vf widen(__m256i h) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
QUIRE_INLINE vf load(const bf16* p) {
  return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
// Loads half of kLanes pairs of bf16: the first ones of the pairs (lower halves of the lanes), or
// the second.
QUIRE_INLINE vf lower_halves(const bf16* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16));
}
QUIRE_INLINE vf upper_halves(const bf16* p) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p),
                                              _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}
// Loads 2 kLanes floats as the even and the odd ones.
QUIRE_INLINE vf2 even_and_odd(const float* p) {
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  const vf first = load(p), last = load(p + kLanes);
  return {_mm512_permutex2var_ps(first, even, last), _mm512_permutex2var_ps(first, odd, last)};
}
QUIRE_INLINE vf load(const fp16* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
#if defined(__AVX512BF16__)
// Rounds to the nearest bf16, ties to even. Values below 2^-126 become 0. NaN stays NaN.
QUIRE_INLINE __m256i narrowed(vf x) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)); }
QUIRE_INLINE void store_pair(bf16* p, vf x, vf y) {
  _mm512_storeu_si512(p, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(y, x)));
}
QUIRE_INLINE vf round_to(const bf16*, vf x) { return widen(narrowed(x)); }
// Rounds to bf16: x.a in the lower 16 words, x.b in the upper.
QUIRE_INLINE __m512i narrowed(vf2 x) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(x.b, x.a));
}
QUIRE_INLINE vf2 round_to(const bf16*, vf2 x) {
  const __m512i words = narrowed(x);
  const __m512i into_upper_halves = _mm512_set_epi32(
      0xf0000, 0xe0000, 0xd0000, 0xc0000, 0xb0000, 0xa0000, 0x90000, 0x80000,  //
      0x70000, 0x60000, 0x50000, 0x40000, 0x30000, 0x20000, 0x10000, 0);
  const __m512i next = _mm512_set1_epi32(0x100000);
  constexpr __mmask32 kUpper = 0xaaaaaaaa;
  return {_mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(kUpper, into_upper_halves, words)),
          _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(
              kUpper, _mm512_add_epi32(into_upper_halves, next), words))};
}
QUIRE_INLINE void store_both(bf16* p, vf2 x) {
  const __m512i in_turn = _mm512_set_epi32(
      0x1f000f, 0x1e000e, 0x1d000d, 0x1c000c, 0x1b000b, 0x1a000a, 0x190009, 0x180008,  //
      0x170007, 0x160006, 0x150005, 0x140004, 0x130003, 0x120002, 0x110001, 0x100000);
  _mm512_storeu_si512(p, _mm512_permutexvar_epi16(in_turn, narrowed(x)));
}
#else
// Returns, in the upper 16 bits of each lane, x rounded to the nearest bf16, ties to even. NaN
// stays NaN.
QUIRE_INLINE __m512i bf16_bits(vf x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
  const __m512i bias =
      _mm512_mask_blend_epi32(odd, _mm512_set1_epi32(0x7fff), _mm512_set1_epi32(0x8000));
  const __mmask16 number = _mm512_cmp_ps_mask(x, x, _CMP_ORD_Q);
  return _mm512_mask_add_epi32(_mm512_set1_epi32(0x7fc00000), number, bits, bias);
}
QUIRE_INLINE __m256i narrowed(vf x) {
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(bf16_bits(x), 16));
}
QUIRE_INLINE void store_pair(bf16* p, vf x, vf y) {
  const __m512i upper_halves = _mm512_set_epi32(
      0x3f003d, 0x3b0039, 0x370035, 0x330031, 0x2f002d, 0x2b0029, 0x270025, 0x230021,  //
      0x1f001d, 0x1b0019, 0x170015, 0x130011, 0x0f000d, 0x0b0009, 0x070005, 0x030001);
  _mm512_storeu_si512(p, _mm512_permutex2var_epi16(bf16_bits(x), upper_halves, bf16_bits(y)));
}
QUIRE_INLINE vf round_to(const bf16*, vf x) {
  return _mm512_castsi512_ps(
      _mm512_and_si512(bf16_bits(x), _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}
QUIRE_INLINE void store_both(bf16* p, vf2 x) {
  _mm512_storeu_si512(p, _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(bf16_bits(x.a), 16),
                                                 bf16_bits(x.b)));
}
#endif
QUIRE_INLINE void store(bf16* p, vf x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrowed(x));
}
QUIRE_INLINE vf round_to(const fp16*, vf x) {
  return _mm512_cvtph_ps(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
QUIRE_INLINE void store(fp16* p, vf x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// Sum and maximum over the lanes. Halves are folded onto each other: lane i meets i ^ 8, ^ 4, ^ 2,
// ^ 1.
QUIRE_INLINE __m128 fold_add(__m128 s) {
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_add_ss(s, _mm_movehdup_ps(s));
}
QUIRE_INLINE float sum(vf x) {
  const __m256 low = _mm512_castps512_ps256(x);
  const __m256 high = _mm512_extractf32x8_ps(x, 1);
  const __m256 y = _mm256_add_ps(low, high);
  return _mm_cvtss_f32(
      fold_add(_mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1))));
}
QUIRE_INLINE float maximum(vf x) { return _mm512_reduce_max_ps(x); }
QUIRE_INLINE float first_lane(vf x) { return _mm512_cvtss_f32(x); }

// Combines the lanes of each of kLanes vectors in the order of sum(). Lane i of the result belongs
// to x[i].
template <class F>
QUIRE_INLINE vf fold_lanes(const vf (&x)[16], F&& combine) {
  vf half[8], quarter[4];
  QUIRE_UNROLL
  for (int i = 0; i < 8; ++i) {
    const vf a = x[i % 2 * 8 + i / 2], b = x[i % 2 * 8 + 4 + i / 2];
    half[i] = combine(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
  }
  QUIRE_UNROLL
  for (int i = 0; i < 4; ++i) {
    const vf a = half[2 * i], b = half[2 * i + 1];
    quarter[i] = combine(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
  }
  vf pair[2];
  QUIRE_UNROLL
  for (int i = 0; i < 2; ++i) {
    const vf a = quarter[2 * i], b = quarter[2 * i + 1];
    pair[i] = combine(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  }
  const __m512d a = _mm512_castps_pd(pair[0]), b = _mm512_castps_pd(pair[1]);
  return combine(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                 _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
}

#elif defined(__AVX2__)

constexpr int kLanes = 8;
using vf = __m256;
using vmask = __m256;
struct vf2 {
  vf a, b;
};

QUIRE_INLINE vf zero() { return _mm256_setzero_ps(); }
QUIRE_INLINE vf set1(float x) { return _mm256_set1_ps(x); }
QUIRE_INLINE vf load(const float* p) { return _mm256_loadu_ps(p); }
QUIRE_INLINE void store(float* p, vf x) { _mm256_storeu_ps(p, x); }
QUIRE_INLINE vf add(vf a, vf b) { return _mm256_add_ps(a, b); }
QUIRE_INLINE vf sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
QUIRE_INLINE vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
QUIRE_INLINE vf div(vf a, vf b) { return _mm256_div_ps(a, b); }
QUIRE_INLINE vf max(vf a, vf b) { return _mm256_max_ps(a, b); }  // b when either is NaN
QUIRE_INLINE vf min(vf a, vf b) { return _mm256_min_ps(a, b); }
QUIRE_INLINE vf absolute(vf x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
QUIRE_INLINE vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
template <int kDistance>
QUIRE_INLINE vf swap_lanes(vf x) {
  if constexpr (kDistance == 1) return _mm256_permute_ps(x, 0xb1);
  if constexpr (kDistance == 2) return _mm256_permute_ps(x, 0x4e);
  if constexpr (kDistance == 4) return _mm256_permute2f128_ps(x, x, 0x01);
}
QUIRE_INLINE vf round_to_int(vf x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// Returns x · 2^n for -126 <= n <= 127.
QUIRE_INLINE vf scale_by_power(vf x, vf n) {
  const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return mul(x, _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23)));
}
QUIRE_INLINE vmask less(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
QUIRE_INLINE vmask lanes(int first, int last) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_castsi256_ps(
      _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(first), lane),
                          _mm256_cmpgt_epi32(_mm256_set1_epi32(last), lane)));
}
QUIRE_INLINE vmask lanes_of(uint64_t bits) {
  const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i all = _mm256_set1_epi32(static_cast<int>(bits));
  return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(all, bit), bit));
}
QUIRE_INLINE vf select(vmask m, vf yes, vf no) { return _mm256_blendv_ps(no, yes, m); }

QUIRE_INLINE vf load(const bf16* p) {
  const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
QUIRE_INLINE vf lower_halves(const bf16* p) {
  const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
}
QUIRE_INLINE vf upper_halves(const bf16* p) {
  const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm256_castsi256_ps(
      _mm256_and_si256(both, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}
QUIRE_INLINE vf2 even_and_odd(const float* p) {
  const vf first = load(p), last = load(p + kLanes);
  const auto in_order = [](vf x) {
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(x), 0xd8));
  };
  return {in_order(_mm256_shuffle_ps(first, last, 0x88)),
          in_order(_mm256_shuffle_ps(first, last, 0xdd))};
}
QUIRE_INLINE vf load(const fp16* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
QUIRE_INLINE __m256i bf16_bits(vf x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(_mm256_add_epi32(bits, bias), _mm256_set1_epi32(0x7fc00000), nan);
}
QUIRE_INLINE void store(bf16* p, vf x) {
  const __m256i high = _mm256_srli_epi32(bf16_bits(x), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
QUIRE_INLINE vf round_to(const bf16*, vf x) {
  return _mm256_castsi256_ps(
      _mm256_and_si256(bf16_bits(x), _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}
QUIRE_INLINE void store_both(bf16* p, vf2 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm256_blend_epi16(_mm256_srli_epi32(bf16_bits(x.a), 16), bf16_bits(x.b),
                                         0xaa));
}
QUIRE_INLINE vf round_to(const fp16*, vf x) {
  return _mm256_cvtph_ps(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
QUIRE_INLINE void store(fp16* p, vf x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

QUIRE_INLINE __m128 fold_add(__m128 s) {
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_add_ss(s, _mm_movehdup_ps(s));
}
QUIRE_INLINE float sum(vf x) {
  return _mm_cvtss_f32(
      fold_add(_mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1))));
}
QUIRE_INLINE float maximum(vf x) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}
QUIRE_INLINE float first_lane(vf x) { return _mm256_cvtss_f32(x); }
template <class F>
QUIRE_INLINE vf fold_lanes(const vf (&x)[8], F&& combine) {
  vf half[4], pair[2];
  QUIRE_UNROLL
  for (int i = 0; i < 4; ++i) {
    half[i] = combine(_mm256_permute2f128_ps(x[i], x[i + 4], 0x20),
                      _mm256_permute2f128_ps(x[i], x[i + 4], 0x31));
  }
  QUIRE_UNROLL
  for (int i = 0; i < 2; ++i) {
    const vf a = half[2 * i], b = half[2 * i + 1];
    pair[i] = combine(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  }
  const __m256d a = _mm256_castps_pd(pair[0]), b = _mm256_castps_pd(pair[1]);
  return combine(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)),
                 _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));
}

#else
#error "no vector type for this instruction set"
#endif

// Returns sum(x[i]), bit for bit, or maximum(x[i]) in lane i.
QUIRE_INLINE vf sums(const vf (&x)[kLanes]) {
  return fold_lanes(x, [](vf a, vf b) __attribute__((always_inline)) { return add(a, b); });
}
QUIRE_INLINE vf maxima(const vf (&x)[kLanes]) {
  return fold_lanes(x, [](vf a, vf b) __attribute__((always_inline)) { return max(a, b); });
}

// Loads or stores the first n < kLanes elements; loads fill up with zeros. Memory beyond is not
// touched.
template <class E>
QUIRE_INLINE vf load_part(const E* p, int n) {
  E buffer[kLanes];
  std::memset(buffer, 0, sizeof buffer);
  std::memcpy(buffer, p, n * sizeof(E));
  return load(buffer);
}
template <class E>
QUIRE_INLINE void store_part(E* p, vf x, int n) {
  E buffer[kLanes];
  store(buffer, x);
  std::memcpy(p, buffer, n * sizeof(E));
}

// Stores 2 kLanes elements.
template <class E>
QUIRE_INLINE void store_pair(E* p, vf x, vf y) {
  store(p, x);
  store(p + kLanes, y);
}

// Rounds x to the element type and widens it again.
QUIRE_INLINE vf round_to(const float*, vf x) { return x; }
template <class E>
QUIRE_INLINE vf2 round_to(const E* type, vf2 x) {
  return {round_to(type, x.a), round_to(type, x.b)};
}
template <class E, class V>
QUIRE_INLINE V rounded(V x) {
  return round_to(static_cast<const E*>(nullptr), x);
}

QUIRE_INLINE vf2 load_both(const bf16* p) { return {lower_halves(p), upper_halves(p)}; }
template <class E>
QUIRE_INLINE vf2 load_both(const E* p) {
  return {load(p), load(p + kLanes)};
}
template <class E>
QUIRE_INLINE void store_both(E* p, vf2 x) {
  store_pair(p, x.a, x.b);
}
// Loads floats in the order of lanes that elements of E have.
template <class E>
QUIRE_INLINE vf2 load_both_as(const E*, const float* p) {
  return load_both(p);
}
QUIRE_INLINE vf2 load_both_as(const bf16*, const float* p) { return even_and_odd(p); }

QUIRE_INLINE vf2 add(vf2 x, vf2 y) { return {add(x.a, y.a), add(x.b, y.b)}; }
QUIRE_INLINE vf2 sub(vf2 x, vf2 y) { return {sub(x.a, y.a), sub(x.b, y.b)}; }
QUIRE_INLINE vf2 sub(vf2 x, vf y) { return {sub(x.a, y), sub(x.b, y)}; }
QUIRE_INLINE vf2 mul(vf2 x, vf2 y) { return {mul(x.a, y.a), mul(x.b, y.b)}; }
QUIRE_INLINE vf2 mul(vf2 x, vf y) { return {mul(x.a, y), mul(x.b, y)}; }
QUIRE_INLINE vf2 fma(vf2 x, vf2 y, vf2 z) { return {fma(x.a, y.a, z.a), fma(x.b, y.b, z.b)}; }

// Returns 2^f for |f| <= 1/2 as 1 + f q(f), with the smallest relative error: 2e-9 before its
// coefficients are rounded. 2^0 is exactly 1.
QUIRE_INLINE vf exp2_polynomial(vf f) {
  vf p = set1(1.5353362e-4f);
  p = fma(p, f, set1(1.3398875e-3f));
  p = fma(p, f, set1(9.6184369e-3f));
  p = fma(p, f, set1(5.5503324e-2f));
  p = fma(p, f, set1(2.4022648e-1f));
  p = fma(p, f, set1(6.9314718e-1f));
  return fma(p, f, set1(1.0f));
}
#if defined(__AVX512F__)
// Returns 2^x for x <= 0. Results below 2^-126 become 0. NaN stays NaN.
QUIRE_INLINE vf exp2_negative(vf x) {
  const vf f = fraction(x);
  const vmask normal = _mm512_cmp_ps_mask(x, set1(-126.0f), _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(normal, exp2_polynomial(f), sub(x, f));
}
// Returns 2^x, or 0 or infinity where that is no float. NaN stays NaN.
QUIRE_INLINE vf exp2_saturating(vf x) {
  const vf f = fraction(x);
  return scale_by_power(exp2_polynomial(f), sub(x, f));
}
#else
// Returns 2^x for x in [-126, 127.5).
QUIRE_INLINE vf exp2_bounded(vf x) {
  const vf n = round_to_int(x);
  return scale_by_power(exp2_polynomial(sub(x, n)), n);
}
QUIRE_INLINE vf exp2_negative(vf x) {
  const vmask tiny = less(x, set1(-126.0f));
  return select(tiny, zero(), exp2_bounded(select(tiny, zero(), x)));
}
// Returns 2^x, saturated at 2^±126.
QUIRE_INLINE vf exp2_saturating(vf x) {
  return exp2_bounded(max(set1(-126.0f), min(set1(126.0f), x)));
}
#endif

// Calls f with a null pointer of the element type. Returns 1 for an unknown type.
template <class F>
QUIRE_INLINE int dispatch(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat32:
      f(static_cast<float*>(nullptr));
      return 0;
    case DType::kBFloat16:
      f(static_cast<bf16*>(nullptr));
      return 0;
    case DType::kFloat16:
      f(static_cast<fp16*>(nullptr));
      return 0;
  }
  return 1;
}

}  // namespace quire
