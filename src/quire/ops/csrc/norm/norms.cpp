// Norms of rows of activations, alone or of the sum with another row. The result of a row depends
// on that row alone.
#include "native/parallel.h"
#include "native/replay.h"
#include "native/rows.h"

namespace quire {
namespace {

constexpr int64_t kElementsPerTask = 16 * 1024;

// Rows [outer, inner] of `width` elements; strides in elements.
struct Rows {
  const void* first;
  int64_t outer_stride, inner_stride;

  template <class E>
  const E* at(int64_t outer, int64_t inner) const {
    return static_cast<const E*>(first) + outer * outer_stride + inner * inner_stride;
  }
};

struct NormCall {
  Rows x, residual;  // residual.first may be null
  void *out, *total;  // contiguous
  int64_t outer, inner, width;
  Team* team;
};

// Calls norm(o, i, row) for every row; `row` counts them. A thread takes adjacent rows. Each of two
// threads has mostly those that it had in the operation before and will have in the next.
template <class F>
void each_row(const NormCall& call, F&& norm) {
  const int64_t grain = kElementsPerTask / (call.width + 1) + 1;
  parallel_ranges(call.outer * call.inner, grain, call.team,
                  [&](int64_t row) { norm(row / call.inner, row % call.inner, row); });
}

}  // namespace
}  // namespace quire

// Applies RMSNorm. x: [outer, inner, width] with strides in elements for outer and inner. out:
// contiguous. residual: null, or added first, with strides of its own; total: contiguous, receives
// the sums.
QUIRE_API int quire_rms_norm(const void* x, int64_t x_outer, int64_t x_inner, const void* residual,
                             int64_t residual_outer, int64_t residual_inner, const void* weight,
                             void* out, void* total, int64_t outer, int64_t inner, int64_t width,
                             float eps, int32_t dtype, quire::Team* team) {
  using namespace quire;
  const NormCall call{{x, x_outer, x_inner}, {residual, residual_outer, residual_inner},
                      out, total, outer, inner, width, team};
  return dispatch(static_cast<DType>(dtype), [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    each_row(call, [&](int64_t o, int64_t i, int64_t row) {
      const E* row_x = call.x.at<E>(o, i);
      vf squares;
      if (residual == nullptr) {
        squares = squares_of(row_x, width);
      } else {
        const E* other = call.residual.at<E>(o, i);
        E* both = static_cast<E*>(total) + row * width;
        squares = squares_of(both, width, [&](int64_t at, auto size) {
          put_sum(row_x + at, other + at, both + at, size);
        });
        row_x = both;
      }
      const vf scale = set1(rms_scale(squares, width, eps));
      normalise(row_x, static_cast<const E*>(weight), scale, static_cast<E*>(out) + row * width,
                width);
    });
  });
}
QUIRE_REPLAYABLE(quire_rms_norm)

// Applies LayerNorm, with the arguments of quire_rms_norm. weight, bias: [width] or null.
QUIRE_API int quire_layer_norm(const void* x, int64_t x_outer, int64_t x_inner,
                               const void* residual, int64_t residual_outer,
                               int64_t residual_inner, const void* weight, const void* bias,
                               void* out, void* total, int64_t outer, int64_t inner, int64_t width,
                               float eps, int32_t dtype, quire::Team* team) {
  using namespace quire;
  const NormCall call{{x, x_outer, x_inner}, {residual, residual_outer, residual_inner},
                      out, total, outer, inner, width, team};
  return dispatch(static_cast<DType>(dtype), [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    each_row(call, [&](int64_t o, int64_t i, int64_t row) {
      const E* row_x = call.x.at<E>(o, i);
      if (residual != nullptr) {
        const E* other = call.residual.at<E>(o, i);
        E* sum = static_cast<E*>(total) + row * width;
        each_two(0, width, [&](int64_t at, auto size) {
          put_sum(row_x + at, other + at, sum + at, size);
        });
        row_x = sum;
      }
      layer_normalise(row_x, static_cast<const E*>(weight), static_cast<const E*>(bias),
                      static_cast<E*>(out) + row * width, width, eps);
    });
  });
}
QUIRE_REPLAYABLE(quire_layer_norm)

// Applies RMSNorm in place, rounded once. x: rows of `width` elements, stride in elements. weight:
// [width].
QUIRE_API int quire_norm_rows(void* x, int64_t stride, const void* weight, int64_t rows,
                              int64_t width, float eps, int32_t dtype, quire::Team* team) {
  using namespace quire;
  return dispatch(static_cast<DType>(dtype), [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    const E* factors = static_cast<const E*>(weight);
    parallel_ranges(rows, kElementsPerTask / (width + 1) + 1, team, [&](int64_t row) {
      E* y = static_cast<E*>(x) + row * stride;
      const vf scale = set1(rms_scale(squares_of(y, width), width, eps));
      each_two(0, width, [&](int64_t i, auto size) {
        put(y + i, mul(mul(get(y + i, size), scale), get(factors + i, size)), size);
      });
    });
  });
}
QUIRE_REPLAYABLE(quire_norm_rows)
