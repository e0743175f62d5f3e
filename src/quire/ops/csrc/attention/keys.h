// Addresses of K and V: the tokens of one row in the pages of the cache.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kv/int8_rows.h"
#include "native/simd.h"

namespace quire::attention {

constexpr int kKeyBlock = 64;

// Transposes 8 vectors of 8 floats: lane i of out[j] is lane j of in[i].
QUIRE_INLINE void transpose(const __m256 (&in)[8], __m256 (&out)[8]) {
  __m256 pairs[8], fours[8];
  QUIRE_UNROLL
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(in[i], in[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(in[i], in[i + 1]);
  }
  QUIRE_UNROLL
  for (int i = 0; i < 8; i += 4) {
    fours[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
    fours[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xEE);
    fours[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
    fours[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xEE);
  }
  QUIRE_UNROLL
  for (int i = 0; i < 4; ++i) {
    out[i] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20);
    out[i + 4] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31);
  }
}

#if defined(__AVX512F__)
// Transposes 16 vectors of 32-bit lanes: lane i of out[j] is lane j of in[i].
QUIRE_INLINE void transpose(const __m512i (&in)[16], __m512i (&out)[16]) {
  __m512i pairs[16], fours[16];
  QUIRE_UNROLL
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(in[i], in[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(in[i], in[i + 1]);
  }
  QUIRE_UNROLL
  for (int i = 0; i < 16; i += 4) {
    fours[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
    fours[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
    fours[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
    fours[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
  }
  QUIRE_UNROLL
  for (int i = 0; i < 4; ++i) {  // 128 bits i, i + 4, … of every row
    const __m512i even_low = _mm512_shuffle_i32x4(fours[i], fours[i + 4], 0x88);
    const __m512i even_high = _mm512_shuffle_i32x4(fours[i + 8], fours[i + 12], 0x88);
    const __m512i odd_low = _mm512_shuffle_i32x4(fours[i], fours[i + 4], 0xDD);
    const __m512i odd_high = _mm512_shuffle_i32x4(fours[i + 8], fours[i + 12], 0xDD);
    out[i] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
    out[i + 4] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
    out[i + 8] = _mm512_shuffle_i32x4(even_low, even_high, 0xDD);
    out[i + 12] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xDD);
  }
}
#endif

// Scales of kKeyBlock tokens for one kv head.
struct HeadScales {
  float k[kKeyBlock], v[kKeyBlock];
};

// K and V of kKeyBlock tokens, one address per token.
template <class E>
struct KeyBlock {
  const E* k[kKeyBlock];
  const E* v[kKeyBlock];

  // Fills in the scales of the first kv heads. Returns false when elements have none.
  bool load_scales(int, HeadScales*) const { return false; }
};

template <>
struct KeyBlock<int8_t> {
  const int8_t* k[kKeyBlock];
  const int8_t* v[kKeyBlock];
  const float* k_scale[kKeyBlock];
  const float* v_scale[kKeyBlock];

  bool load_scales(int heads, HeadScales* out) const {
    for (int head = 0; head < heads; head += 8) {
      const int n = std::min(heads - head, 8);
      load_scales(k_scale, head, n, out[head].k);
      load_scales(v_scale, head, n, out[head].v);
    }
    return true;
  }

 private:
  // Fills in the scales of n <= 8 heads, one HeadScales apart in `out`.
  static void load_scales(const float* const* by_token, int head, int n, float* out) {
    constexpr int kStride = sizeof(HeadScales) / sizeof(float);
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i wanted = _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane);
    for (int t = 0; t < kKeyBlock; t += 8) {
      __m256 tokens[8], by_head[8];
      QUIRE_UNROLL
      for (int i = 0; i < 8; ++i) tokens[i] = _mm256_maskload_ps(by_token[t + i] + head, wanted);
      transpose(tokens, by_head);
      QUIRE_UNROLL
      for (int i = 0; i < 8; ++i)
        if (i < n) _mm256_storeu_ps(out + i * kStride + t, by_head[i]);
    }
  }
};

// Pages of one layer from one kv head on, through the block table of one row. Strides are in
// elements; those of scales, which only an int8 cache has, in floats.
template <class E>
struct Keys {
  const E* k;
  const E* v;
  const float* k_scale;
  const float* v_scale;
  const int32_t* table;
  int64_t block_stride, token_stride, scale_block_stride, scale_token_stride, block_size;

  // Fills in the addresses of tokens low <= t < high of the key block that starts at `first`. Other
  // entries repeat a valid address: they may be read, but the values are never used.
  void locate(int64_t first, int64_t low, int64_t high, KeyBlock<E>& out) const {
    int64_t block = low / block_size, offset = low % block_size;
    for (int64_t t = low; t < high; ++block, offset = 0) {
      const int64_t count = std::min(block_size - offset, high - t);
      const int64_t at = table[block] * block_stride + offset * token_stride;
      fill(out.k + (t - first), k + at, token_stride, count);
      fill(out.v + (t - first), v + at, token_stride, count);
      if constexpr (std::is_same_v<E, int8_t>) {
        const int64_t scale = table[block] * scale_block_stride + offset * scale_token_stride;
        fill(out.k_scale + (t - first), k_scale + scale, scale_token_stride, count);
        fill(out.v_scale + (t - first), v_scale + scale, scale_token_stride, count);
      }
      t += count;
    }
    for (int64_t t = first; t < low; ++t) repeat(out, low - first, t - first);
    for (int64_t t = high; t < first + kKeyBlock; ++t) repeat(out, low - first, t - first);
  }

 private:
  // Fills in the addresses of `count` tokens of one page.
  template <class T>
  static void fill(const T** to, const T* from, int64_t stride, int64_t count) {
    for (int64_t i = 0; i < count; ++i) to[i] = from + i * stride;
  }
  static void repeat(KeyBlock<E>& out, int64_t from, int64_t to) {
    out.k[to] = out.k[from];
    out.v[to] = out.v[from];
    if constexpr (std::is_same_v<E, int8_t>) {
      out.k_scale[to] = out.k_scale[from];
      out.v_scale[to] = out.v_scale[from];
    }
  }
};

// Writes elements of a token times their scale.
template <class To>
QUIRE_INLINE void widen_part(const int8_t* from, float scale, int dims, To* to) {
  const vf factor = set1(scale);
  int d = 0;
  for (; d + 2 * kLanes <= dims; d += 2 * kLanes)
    store_pair(to + d, mul(load(from + d), factor), mul(load(from + d + kLanes), factor));
  for (; d + kLanes <= dims; d += kLanes) store(to + d, mul(load(from + d), factor));
  if (d < dims) store_part(to + d, mul(load_part(from + d, dims - d), factor), dims - d);
}

// Writes a token of an int8 plane with two scales: K, of which V is the first part.
template <class To>
QUIRE_INLINE void widen_plane(const int8_t* from, const float* scales, int value_dim, int head_dim,
                              To* to) {
  widen_part(from, scales[0], value_dim, to);
  widen_part(from + value_dim, scales[1], head_dim - value_dim, to + value_dim);
}

}  // namespace quire::attention
