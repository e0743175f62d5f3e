// Operations on single elements of activations: sums, activation functions, gates.
#include "pointwise/activations.h"
#include "pointwise/gate.h"
#include "native/parallel.h"
#include "native/replay.h"
#include "native/rows.h"

namespace quire {
namespace {

constexpr int64_t kPiece = 4 * 1024;  // elements: whole vectors
constexpr int64_t kPiecesPerTask = 4;

// Calls f(row, first, last) for all pieces of rows: one decode row may be wide.
template <class F>
void each_piece(int64_t rows, int64_t width, Team* team, F&& f) {
  if (rows == 0 || width == 0) return;  // a captured step may be replayed for no rows
  const int64_t pieces = (width + kPiece - 1) / kPiece;
  const int64_t grain = kPiecesPerTask * kPiece / (width / pieces + 1) + 1;
  parallel_for(rows * pieces, grain, team, [&](int64_t task) {
    const int64_t first = task % pieces * kPiece;
    f(task / pieces, first, first + kPiece < width ? first + kPiece : width);
  });
}

// Distance of prefetches. The hardware prefetcher starts anew in every row and page.
constexpr int64_t kBytesAhead = 2048;
QUIRE_INLINE const char* ahead(const void* p) { return static_cast<const char*>(p) + kBytesAhead; }

template <class F>
QUIRE_INLINE vf on_each(F&& f, vf x) {
  return f(x);
}
template <class F>
QUIRE_INLINE vf2 on_each(F&& f, vf2 x) {
  return {f(x.a), f(x.b)};
}

// Sigmoid, for a gate of values that are whole already.
constexpr int32_t kSigmoid = 6;  // behind enum Activation
struct Sigmoid {
  QUIRE_INLINE vf operator()(vf x) const { return logistic(x); }
};

// Stores elements of activation(gate) · up; y may be gate.
template <class A, class E, class Size>
QUIRE_INLINE void put_gated(A activation, const E* gate, const E* up, E* y, Size size) {
  const auto factor = on_each([&](vf x) { return factor_of(activation, x); }, get(up, size));
  put(y, mul(on_each(activation, get(gate, size)), factor), size);
}

}  // namespace

template <class E>
void apply_gate(int32_t kind, const E* up, E* y, int64_t y_stride, int64_t rows, int64_t width) {
  dispatch_activation(kind, [&](auto activation) {
    for (int64_t r = 0; r < rows; ++r, up += kWidth, y += y_stride) {
      each_two(0, width, [&](int64_t i, auto size) {
        put_gated(activation, y + i, up + i, y + i, size);
      });
    }
  });
}
template void apply_gate(int32_t, const float*, float*, int64_t, int64_t, int64_t);
template void apply_gate(int32_t, const bf16*, bf16*, int64_t, int64_t, int64_t);
template void apply_gate(int32_t, const fp16*, fp16*, int64_t, int64_t, int64_t);

}  // namespace quire

// Adds x and y to out. All: `count` elements, contiguous.
QUIRE_API int quire_add(const void* x, const void* y, void* out, int64_t count, int32_t dtype,
                        quire::Team* team) {
  using namespace quire;
  return dispatch(static_cast<DType>(dtype), [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    each_piece(1, count, team, [&](int64_t, int64_t first, int64_t last) {
      each_two(first, last, [&](int64_t i, auto size) {
        put_sum(static_cast<const E*>(x) + i, static_cast<const E*>(y) + i,
                static_cast<E*>(out) + i, size);
      });
    });
  });
}
QUIRE_REPLAYABLE(quire_add)

// Replaces x by x · factor or, with a cap > 0, by cap · tanh(x · factor / cap). x: rows of `width`
// elements with a stride.
QUIRE_API int quire_rescale(void* x, int64_t stride, int64_t rows, int64_t width, float factor,
                            float cap, int32_t dtype, quire::Team* team) {
  using namespace quire;
  const bool capped = cap > 0.0f;
  const vf by = set1(capped ? factor / cap : factor), most = set1(cap);
  return dispatch(static_cast<DType>(dtype), [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    each_piece(rows, width, team, [&](int64_t row, int64_t first, int64_t last) {
      E* const at = static_cast<E*>(x) + row * stride;
      each_two(first, last, [&](int64_t i, auto size) {
        const auto scaled = on_each([&](vf value) { return mul(value, by); }, get(at + i, size));
        const auto bend = [&](vf value) { return capped ? mul(tanh_of(value), most) : value; };
        put(at + i, on_each(bend, scaled), size);
      });
    });
  });
}
QUIRE_REPLAYABLE(quire_rescale)

// Applies an activation. x, out: `count` elements, contiguous. kind: see activations.h.
QUIRE_API int quire_activation(const void* x, void* out, int64_t count, int32_t kind,
                               int32_t dtype, quire::Team* team) {
  using namespace quire;
  return dispatch(static_cast<DType>(dtype), kind, [&](auto* tag, auto activation) {
    using E = std::remove_pointer_t<decltype(tag)>;
    each_piece(1, count, team, [&](int64_t, int64_t first, int64_t last) {
      const E* from = static_cast<const E*>(x);
      E* to = static_cast<E*>(out);
      each_two(first, last, [&](int64_t i, auto size) {
        put(to + i, on_each(activation, get(from + i, size)), size);
      });
    });
  });
}
QUIRE_REPLAYABLE(quire_activation)

// Writes activation(first half) · second half of each row. x: rows of 2 · width, stride in
// elements. out: contiguous rows of `width`.
QUIRE_API int quire_activation_and_mul(const void* x, int64_t stride, void* out, int64_t rows,
                                       int64_t width, int32_t kind, int32_t dtype,
                                       quire::Team* team) {
  using namespace quire;
  return dispatch(static_cast<DType>(dtype), kind, [&](auto* tag, auto activation) {
    using E = std::remove_pointer_t<decltype(tag)>;
    each_piece(rows, width, team, [&](int64_t row, int64_t first, int64_t last) {
      const E* gate = static_cast<const E*>(x) + row * stride;
      const E* up = gate + width;
      E* y = static_cast<E*>(out) + row * width;
      each_two(first, last, [&](int64_t i, auto size) {
        __builtin_prefetch(ahead(gate + i));
        __builtin_prefetch(ahead(up + i));
        __builtin_prefetch(ahead(y + i), 1);
        put_gated(activation, gate + i, up + i, y + i, size);
      });
    });
  });
}
QUIRE_REPLAYABLE(quire_activation_and_mul)

// Writes activation(x) · up. x, up: rows of `width` elements with strides. out: contiguous
// rows. kind: see activations.h, or kSigmoid.
QUIRE_API int quire_activation_times(const void* x, int64_t stride, const void* up,
                                     int64_t up_stride, void* out, int64_t rows, int64_t width,
                                     int32_t kind, int32_t dtype, quire::Team* team) {
  using namespace quire;
  const auto gated = [&](auto* tag, auto activation) {
    using E = std::remove_pointer_t<decltype(tag)>;
    each_piece(rows, width, team, [&](int64_t row, int64_t first, int64_t last) {
      const E* gate = static_cast<const E*>(x) + row * stride;
      const E* factor = static_cast<const E*>(up) + row * up_stride;
      E* y = static_cast<E*>(out) + row * width;
      each_two(first, last, [&](int64_t i, auto size) {
        put_gated(activation, gate + i, factor + i, y + i, size);
      });
    });
  };
  const DType type = static_cast<DType>(dtype);
  if (kind == kSigmoid) return dispatch(type, [&](auto* tag) { gated(tag, Sigmoid()); });
  return dispatch(type, kind, gated);
}
QUIRE_REPLAYABLE(quire_activation_times)
