// Operations on single rows of activations: norms, gates, rotations. A row's result depends on that
// row alone.
#include "rows.h"

#include "parallel.h"
#include "replay.h"

namespace quire {
namespace {

constexpr int64_t kElementsPerTask = 16 * 1024;

QUIRE_INLINE int64_t grain_of(int64_t width) { return kElementsPerTask / (width + 1) + 1; }

// x / (1 + e^-x), rounded to the element type.
template <class E>
QUIRE_INLINE vf silu(vf x) {
  return rounded<E>(div(x, add(set1(1.0f), exp_saturating(sub(zero(), x)))));
}

}  // namespace
}  // namespace quire

// x: [outer, inner, width] with strides in elements for outer and inner. out: contiguous.
// residual, when given, is laid out by its own strides and added first; total: contiguous.
QUIRE_API int quire_rms_norm(const void* x, int64_t x_outer, int64_t x_inner, const void* residual,
                             int64_t residual_outer, int64_t residual_inner, const void* weight,
                             void* out, void* total, int64_t outer, int64_t inner, int64_t width,
                             float eps, int32_t unit_offset, int32_t dtype, quire::Team* team) {
  using namespace quire;
  return dispatch(static_cast<DType>(dtype), [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    parallel_for(outer * inner, grain_of(width), team, [&](int64_t row) {
      const int64_t o = row / inner, i = row % inner;
      const E* source = static_cast<const E*>(x) + o * x_outer + i * x_inner;
      if (residual != nullptr) {
        const E* other =
            static_cast<const E*>(residual) + o * residual_outer + i * residual_inner;
        E* added = static_cast<E*>(total) + row * width;
        each_vector(0, width, [&](int64_t j, auto size) {
          put(added + j, add(get(source + j, size), get(other + j, size)), size);
        });
        source = added;
      }
      normalise(source, static_cast<const E*>(weight), static_cast<E*>(out) + row * width, width,
                eps, unit_offset != 0);
    });
  });
}
QUIRE_REPLAYABLE(quire_rms_norm)

// x: rows of 2 · width, stride in elements; out: contiguous rows of width.
QUIRE_API int quire_silu_and_mul(const void* x, int64_t stride, void* out, int64_t rows,
                                 int64_t width, int32_t dtype, quire::Team* team) {
  using namespace quire;
  return dispatch(static_cast<DType>(dtype), [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    // Pieces of a row are tasks too: one decode row may be wide. Pieces are whole vectors.
    const int64_t piece = kElementsPerTask / 4;
    const int64_t pieces = (width + piece - 1) / piece;
    parallel_for(rows * pieces, grain_of(width / pieces), team, [&](int64_t task) {
      const int64_t row = task / pieces, first = task % pieces * piece;
      const int64_t last = first + piece < width ? first + piece : width;
      const E* gate = static_cast<const E*>(x) + row * stride;
      const E* up = gate + width;
      E* y = static_cast<E*>(out) + row * width;
      each_vector(first, last, [&](int64_t i, auto size) {
        put(y + i, mul(silu<E>(get(gate + i, size)), get(up + i, size)), size);
      });
    });
  });
}
QUIRE_REPLAYABLE(quire_silu_and_mul)

// q, k: [T, heads, D] with token strides in elements, heads contiguous. cos, sin: [P, half].
QUIRE_API int quire_rope(void* q, void* k, int64_t q_stride, int64_t k_stride, int64_t q_heads,
                         int64_t k_heads, int64_t head_dim, const int64_t* positions,
                         const float* cos, const float* sin, int64_t half, int64_t num_tokens,
                         int32_t interleaved, int32_t dtype, quire::Team* team) {
  using namespace quire;
  return dispatch(static_cast<DType>(dtype), [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    const int64_t grain = grain_of((q_heads + k_heads) * head_dim);
    parallel_for(num_tokens, grain, team, [&](int64_t t) {
      const float* c = cos + positions[t] * half;
      const float* s = sin + positions[t] * half;
      for (int64_t h = 0; h < q_heads + k_heads; ++h) {
        E* x = h < q_heads ? static_cast<E*>(q) + t * q_stride + h * head_dim
                           : static_cast<E*>(k) + t * k_stride + (h - q_heads) * head_dim;
        if (interleaved) {
          rotate_pairs(x, c, s, half);
        } else {
          rotate_halves(x, c, s, half);
        }
      }
    });
  });
}
