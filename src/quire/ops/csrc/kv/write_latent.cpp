// Steps between the projections of latent attention and its scores, in one pass: norm and rotation
// of a token's latent vector, its place in the cache, and rotation of the queries' parts.
#include "kv/pages.h"
#include "kv/rotation.h"
#include "native/parallel.h"
#include "native/replay.h"
#include "native/rows.h"

namespace quire {
namespace {

constexpr int64_t kLatentElementsPerTask = 8 * 1024;

// Stores the row of a token, whose first `size` elements are one part. scales: two of an int8 cache.
template <class E, class To>
QUIRE_INLINE void store_parts(const E* row, To* to, [[maybe_unused]] float* scales, int64_t size,
                              int64_t width) {
  if constexpr (std::is_same_v<To, int8_t>) {
    scales[0] = quantize_row(row, to, size);
    scales[1] = quantize_row(row + size, to + size, width - size);
  } else {
    convert(row, to, width);
  }
}

// Rotates heads that are from_dim elements apart into heads that are to_dim apart; both may be one.
template <class E>
void turn_heads(const E* from, int64_t from_dim, E* to, int64_t to_dim, int64_t heads,
                const Turn& turn) {
  rotate(to, heads, to_dim, turn, [&](int64_t i, auto size) {
    return [=](int64_t h) { return get(from + h * from_dim + i, size); };
  });
}

}  // namespace
}  // namespace quire

// queries: num_tokens rows of heads · (size + 2 · half) elements, of which the last 2 · half of each
// head are written. rotated: rows of heads · 2 · half. latent: rows of size + 2 · half, changed in
// place. Strides of rows in elements. weight: [size]. cos, sin: [P, half]. slots: one per token; a
// negative one stores nothing. cache: pages [B, S, 1, size + 2 · half], strides in elements. scale:
// [B, S, 2] of an int8 cache, of the first `size` elements and of the others; strides in floats.
QUIRE_API int quire_write_latent(void* queries, int64_t queries_stride, const void* rotated,
                                 int64_t rotated_stride, int64_t heads, void* latent,
                                 int64_t latent_stride, const void* weight, int64_t size, float eps,
                                 const int64_t* positions, const float* cos, const float* sin,
                                 int64_t half, void* cache, const int64_t* slots,
                                 int64_t num_tokens, int64_t block_size, int64_t block_stride,
                                 int64_t token_stride, float* scale, int64_t scale_block_stride,
                                 int64_t scale_token_stride, int32_t dtype, int32_t cache_dtype,
                                 quire::Team* team) {
  using namespace quire;
  const int64_t rotary = 2 * half, width = size + rotary;
  int inner = 0;
  const int outer = dispatch(static_cast<DType>(dtype), [&](auto* from) {
    using E = std::remove_pointer_t<decltype(from)>;
    inner = dispatch_cache(cache_dtype, [&](auto* to) {
      using To = std::remove_pointer_t<decltype(to)>;
      const int64_t grain = kLatentElementsPerTask / (width + heads * rotary) + 1;
      parallel_ranges(num_tokens, grain, team, [&](int64_t t) {
        E* const row = static_cast<E*>(latent) + t * latent_stride;
        const Turn turn{cos + positions[t] * half, sin + positions[t] * half, half};
        const vf factor = set1(rms_scale(squares_of(row, size), size, eps));
        normalise(row, static_cast<const E*>(weight), factor, row, size);
        turn_heads(row + size, rotary, row + size, rotary, 1, turn);
        turn_heads(static_cast<const E*>(rotated) + t * rotated_stride, rotary,
                   static_cast<E*>(queries) + t * queries_stride + size, width, heads, turn);
        if (slots[t] < 0) return;
        const int64_t block = slots[t] / block_size, offset = slots[t] % block_size;
        store_parts(row, static_cast<To*>(cache) + block * block_stride + offset * token_stride,
                    scale + block * scale_block_stride + offset * scale_token_stride, size, width);
      });
    });
  });
  return outer | inner;
}
QUIRE_REPLAYABLE(quire_write_latent)
