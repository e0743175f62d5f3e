// Pages of one layer, for writing.
#pragma once

#include <type_traits>

#include "kv/int8_rows.h"
#include "native/simd.h"

namespace quire {

// Pages [B, S, K, D] with K and D contiguous; strides in elements. Scales, [B, S, K] floats with K
// contiguous and strides in floats, belong to an int8 cache only.
struct Pages {
  void* k;
  void* v;
  float* k_scale;
  float* v_scale;
  int64_t block_size, block_stride, token_stride, scale_block_stride, scale_token_stride;
};

template <class From, class To>
QUIRE_INLINE void convert(const From* from, To* to, int64_t n) {
  if constexpr (std::is_same_v<From, To>) {
    constexpr int64_t kChunk = 64 / sizeof(To);  // constant size, or memcpy does string moves
    int64_t i = 0;
    for (; i + kChunk <= n; i += kChunk) std::memcpy(to + i, from + i, kChunk * sizeof(To));
    std::memcpy(to + i, from + i, (n - i) * sizeof(To));
  } else {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(to + i, load(from + i));
    const int rest = static_cast<int>(n - i);
    if (rest > 0) store_part(to + i, load_part(from + i, rest), rest);
  }
}

// Stores the heads of one token in its slot of K or of V.
template <class From, class To>
QUIRE_INLINE void store_heads(const From* from, To* to, [[maybe_unused]] float* scales,
                              int64_t kv_heads, int64_t head_dim) {
  if constexpr (std::is_same_v<To, int8_t>) {
    for (int64_t head = 0; head < kv_heads; ++head)
      scales[head] = quantize_row(from + head * head_dim, to + head * head_dim, head_dim);
  } else {
    convert(from, to, kv_heads * head_dim);
  }
}

// Returns the element of k and v where a slot starts.
QUIRE_INLINE int64_t start_of(const Pages& pages, int64_t slot) {
  return slot / pages.block_size * pages.block_stride +
         slot % pages.block_size * pages.token_stride;
}

// Prefetches the lines that write_token() will write: they are seldom in a cache, and a store waits
// for its line.
template <class To>
QUIRE_INLINE void await_token(const Pages& pages, int64_t slot, int64_t elements) {
  if (slot < 0) return;
  constexpr int64_t kLine = 64 / sizeof(To);
  const To* k = static_cast<const To*>(pages.k) + start_of(pages, slot);
  const To* v = static_cast<const To*>(pages.v) + start_of(pages, slot);
  for (int64_t i = 0; i < elements; i += kLine) {
    __builtin_prefetch(k + i, 1);
    __builtin_prefetch(v + i, 1);
  }
}

// Writes k and v, the heads of one token. A negative slot stores nothing.
template <class To, class From>
QUIRE_INLINE void write_token(const Pages& pages, int64_t slot, const From* k, const From* v,
                              int64_t kv_heads, int64_t head_dim) {
  if (slot < 0) return;
  const int64_t at = start_of(pages, slot);
  const int64_t scale = slot / pages.block_size * pages.scale_block_stride +
                        slot % pages.block_size * pages.scale_token_stride;
  store_heads(k, static_cast<To*>(pages.k) + at, pages.k_scale + scale, kv_heads, head_dim);
  store_heads(v, static_cast<To*>(pages.v) + at, pages.v_scale + scale, kv_heads, head_dim);
}

}  // namespace quire
