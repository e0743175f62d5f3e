// What stands between the qkv projection and attention, in one pass over its rows: norms of the
// heads of q and k, rotation, and K and V into the cache.
#include <algorithm>

#include "kv_pages.h"
#include "parallel.h"
#include "replay.h"
#include "rows.h"

namespace quire {
namespace {

constexpr int64_t kElementsPerTask = 8 * 1024;
constexpr int64_t kHeads = 8;

// Norms and rotates up to kHeads heads in place. The norm is rounded to the element type before it is
// rotated, as when both are operations of their own. All scales come first: one takes far longer
// than it takes to begin the next.
template <class E>
QUIRE_INLINE void norm_and_rotate(E* x, int64_t heads, int64_t head_dim, const E* weight, float eps,
                                  const float* cos, const float* sin, int64_t half) {
  float scales[kHeads];
  for (int64_t h = 0; h < heads; ++h) scales[h] = rms_scale(x + h * head_dim, head_dim, eps);
  for (int64_t h = 0; h < heads; ++h, x += head_dim) {
    const vf scale = set1(scales[h]);
    rotate_halves(x, cos, sin, half, [&](int64_t i, auto size) {
      return rounded<E>(normed(x + i, weight + i, scale, size));
    });
    each_vector(2 * half, head_dim, [&](int64_t i, auto size) {
      put(x + i, normed(x + i, weight + i, scale, size), size);
    });
  }
}

// weight null: no norms.
template <class E>
QUIRE_INLINE void prepare_heads(E* x, int64_t heads, int64_t head_dim, const E* weight, float eps,
                                const float* cos, const float* sin, int64_t half) {
  if (weight == nullptr) {
    for (int64_t h = 0; h < heads; ++h, x += head_dim) {
      rotate_halves(x, cos, sin, half, [&](int64_t i, auto size) { return get(x + i, size); });
    }
    return;
  }
  for (int64_t h = 0; h < heads; h += kHeads) {
    norm_and_rotate(x + h * head_dim, std::min(kHeads, heads - h), head_dim, weight, eps, cos, sin,
                    half);
  }
}

}  // namespace
}  // namespace quire

// qkv: num_tokens rows of (q_heads + 2 · kv_heads) · head_dim elements, token stride in elements; q
// and k are changed in place. q_weight, k_weight: [head_dim], or null for no norms. cos, sin:
// [P, half]; half 0 for no rotation. slots: of each token; those < 0 store nothing. Pages as in
// kv_pages.h.
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
      parallel_for(num_tokens, grain, team, [&](int64_t t) {
        E* q = static_cast<E*>(qkv) + t * stride;
        E* k = q + q_heads * head_dim;
        const int64_t at = half > 0 ? positions[t] * half : 0;
        await_token<To>(pages, slots[t], kv_heads * head_dim);
        prepare_heads(q, q_heads, head_dim, static_cast<const E*>(q_weight), eps, cos + at,
                      sin + at, half);
        prepare_heads(k, kv_heads, head_dim, static_cast<const E*>(k_weight), eps, cos + at,
                      sin + at, half);
        write_token<To>(pages, slots[t], k, k + kv_heads * head_dim, kv_heads, head_dim);
      });
    });
  });
  return outer | inner;
}
QUIRE_REPLAYABLE(quire_rope_and_write_kv)
