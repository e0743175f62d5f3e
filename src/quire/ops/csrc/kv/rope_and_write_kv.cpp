// Steps between the qkv projection and attention, in one pass over its rows: norms of the heads of
// q and k, rotation, and storing K and V in the cache.
#include <algorithm>

#include "kv/pages.h"
#include "kv/rotation.h"
#include "native/parallel.h"
#include "native/replay.h"
#include "native/rows.h"

namespace quire {
namespace {

constexpr int64_t kElementsPerTask = 8 * 1024;
constexpr int64_t kHeads = 8;

// Norms and rotates up to kHeads heads in place. The norm is rounded to the element type before it
// is rotated, as in two separate operations. All scales come first: one takes far longer than
// starting the next.
template <class E>
QUIRE_INLINE void norm_and_rotate(E* x, int64_t heads, int64_t head_dim, const E* weight, float eps,
                                  const Turn& turn) {
  float scales[kHeads];
  for (int64_t h = 0; h < heads; ++h)
    scales[h] = rms_scale(squares_of(x + h * head_dim, head_dim), head_dim, eps);
  const auto value = [&](int64_t i, auto size) {
    return [=, &scales, w = get(weight + i, size)](int64_t h) {
      return normed<E>(get(x + h * head_dim + i, size), w, set1(scales[h]));
    };
  };
  rotate(x, heads, head_dim, turn, [&](int64_t i, auto size) {
    return [norm = value(i, size)](int64_t h) { return rounded<E>(norm(h)); };
  });
  each_two(2 * turn.half, head_dim, [&](int64_t i, auto size) {
    const auto norm = value(i, size);
    for (int64_t h = 0; h < heads; ++h) put(x + h * head_dim + i, norm(h), size);
  });
}

// Prepares the heads of one token. weight: null for no norms.
template <class E>
QUIRE_INLINE void prepare_heads(E* x, int64_t heads, int64_t head_dim, const E* weight, float eps,
                                const Turn& turn) {
  if (weight == nullptr) {
    rotate(x, heads, head_dim, turn, [&](int64_t i, auto size) {
      return [=](int64_t h) { return get(x + h * head_dim + i, size); };
    });
    return;
  }
  for (int64_t h = 0; h < heads; h += kHeads) {
    norm_and_rotate(x + h * head_dim, std::min(kHeads, heads - h), head_dim, weight, eps, turn);
  }
}

}  // namespace
}  // namespace quire

// Prepares q and k and writes K and V. qkv: num_tokens rows of (q_heads + 2 · kv_heads) · head_dim
// elements, token stride in elements; q and k are changed in place. q_weight, k_weight: [head_dim],
// or null for no norms. cos, sin: [P, half]; half 0 for no rotation. slots: one per token; a
// negative one stores nothing. Pages as in kv/pages.h.
QUIRE_API int quire_rope_and_write_kv(
    void* qkv, int64_t stride, int64_t q_heads, int64_t kv_heads, int64_t head_dim,
    const int64_t* positions, const float* cos, const float* sin, int64_t half, void* k_cache,
    void* v_cache, float* k_scale, float* v_scale, const int64_t* slots, int64_t num_tokens,
    int64_t block_size, int64_t block_stride, int64_t token_stride, int64_t scale_block_stride,
    int64_t scale_token_stride, const void* q_weight, const void* k_weight, float eps,
    int32_t dtype, int32_t cache_dtype, quire::Team* team) {
  using namespace quire;
  const Pages pages{k_cache,      v_cache,      k_scale,
                    v_scale,      block_size,   block_stride,
                    token_stride, scale_block_stride, scale_token_stride};
  int inner = 0;
  const int outer = dispatch(static_cast<DType>(dtype), [&](auto* from) {
    using E = std::remove_pointer_t<decltype(from)>;
    inner = dispatch_cache(cache_dtype, [&](auto* to) {
      using To = std::remove_pointer_t<decltype(to)>;
      const int64_t grain = kElementsPerTask / ((q_heads + 2 * kv_heads) * head_dim + 1) + 1;
      parallel_ranges(num_tokens, grain, team, [&](int64_t t) {
        E* q = static_cast<E*>(qkv) + t * stride;
        E* k = q + q_heads * head_dim;
        const int64_t at = half > 0 ? positions[t] * half : 0;
        await_token<To>(pages, slots[t], kv_heads * head_dim);
        const Turn turn{cos + at, sin + at, half};
        prepare_heads(q, q_heads, head_dim, static_cast<const E*>(q_weight), eps, turn);
        prepare_heads(k, kv_heads, head_dim, static_cast<const E*>(k_weight), eps, turn);
        write_token<To>(pages, slots[t], k, k + kv_heads * head_dim, kv_heads, head_dim);
      });
    });
  });
  return outer | inner;
}
QUIRE_REPLAYABLE(quire_rope_and_write_kv)
