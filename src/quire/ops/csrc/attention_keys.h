// Where attention finds K and V: the tokens of one row in the pages of the cache.
#pragma once

#include <cstdint>
#include <type_traits>

#include "int8_rows.h"
#include "simd.h"

namespace quire::attention {

constexpr int kKeyBlock = 64;

// Scales of kKeyBlock tokens for one kv head.
struct HeadScales {
  float k[kKeyBlock], v[kKeyBlock];
};

// K and V of kKeyBlock tokens, by token.
template <class E>
struct KeyBlock {
  const E* k[kKeyBlock];
  const E* v[kKeyBlock];

  // Fills in the scales of the first kv heads; false when elements have none.
  bool load_scales(int, HeadScales*) const { return false; }
};

template <>
struct KeyBlock<int8_t> {
  const int8_t* k[kKeyBlock];
  const int8_t* v[kKeyBlock];
  const float* k_scale[kKeyBlock];
  const float* v_scale[kKeyBlock];

  bool load_scales(int heads, HeadScales* out) const {
    for (int t = 0; t < kKeyBlock; ++t)
      for (int head = 0; head < heads; ++head) {
        out[head].k[t] = k_scale[t][head];
        out[head].v[t] = v_scale[t][head];
      }
    return true;
  }
};

// The pages of one layer from one kv head on, through the block table of one row. Strides are in
// elements; those of scales, which only an int8 cache has, in floats.
template <class E>
struct Keys {
  const E* k;
  const E* v;
  const float* k_scale;
  const float* v_scale;
  const int32_t* table;
  int64_t block_stride, token_stride, scale_block_stride, scale_token_stride, block_size;

  // Addresses of tokens low <= t < high of the key block that starts at `first`. The other entries
  // repeat a valid one, so that they can be read; what they give is never used.
  void locate(int64_t first, int64_t low, int64_t high, KeyBlock<E>& out) const {
    int64_t block = low / block_size, offset = low % block_size;
    for (int64_t t = low; t < high; ++t) {
      const int64_t at = table[block] * block_stride + offset * token_stride;
      out.k[t - first] = k + at;
      out.v[t - first] = v + at;
      if constexpr (std::is_same_v<E, int8_t>) {
        const int64_t scale = table[block] * scale_block_stride + offset * scale_token_stride;
        out.k_scale[t - first] = k_scale + scale;
        out.v_scale[t - first] = v_scale + scale;
      }
      if (++offset == block_size) {
        offset = 0;
        ++block;
      }
    }
    for (int64_t t = first; t < low; ++t) repeat(out, low - first, t - first);
    for (int64_t t = high; t < first + kKeyBlock; ++t) repeat(out, low - first, t - first);
  }

 private:
  static void repeat(KeyBlock<E>& out, int64_t from, int64_t to) {
    out.k[to] = out.k[from];
    out.v[to] = out.v[from];
    if constexpr (std::is_same_v<E, int8_t>) {
      out.k_scale[to] = out.k_scale[from];
      out.v_scale[to] = out.v_scale[from];
    }
  }
};

}  // namespace quire::attention
