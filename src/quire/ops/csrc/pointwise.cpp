// Operations on single elements of activations: sums, activation functions, gates.
#include "activations.h"
#include "parallel.h"
#include "replay.h"
#include "rows.h"

namespace quire {
namespace {

constexpr int64_t kPiece = 4 * 1024;  // elements: whole vectors
constexpr int64_t kPiecesPerTask = 4;

// f(row, first, last) for all pieces of rows: one decode row may be wide.
template <class F>
void each_piece(int64_t rows, int64_t width, Team* team, F&& f) {
  const int64_t pieces = (width + kPiece - 1) / kPiece;
  const int64_t grain = kPiecesPerTask * kPiece / (width / pieces + 1) + 1;
  parallel_for(rows * pieces, grain, team, [&](int64_t task) {
    const int64_t first = task % pieces * kPiece;
    f(task / pieces, first, first + kPiece < width ? first + kPiece : width);
  });
}

}  // namespace
}  // namespace quire

// x, y, out: `count` > 0 elements, contiguous.
QUIRE_API int quire_add(const void* x, const void* y, void* out, int64_t count, int32_t dtype,
                        quire::Team* team) {
  using namespace quire;
  return dispatch(static_cast<DType>(dtype), [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    each_piece(1, count, team, [&](int64_t, int64_t first, int64_t last) {
      add_rows(static_cast<const E*>(x), static_cast<const E*>(y), static_cast<E*>(out), first,
               last);
    });
  });
}
QUIRE_REPLAYABLE(quire_add)

// x, out: `count` > 0 elements, contiguous. kind: of activations.h.
QUIRE_API int quire_activation(const void* x, void* out, int64_t count, int32_t kind,
                               int32_t dtype, quire::Team* team) {
  using namespace quire;
  return dispatch(static_cast<DType>(dtype), kind, [&](auto* tag, auto activation) {
    using E = std::remove_pointer_t<decltype(tag)>;
    each_piece(1, count, team, [&](int64_t, int64_t first, int64_t last) {
      const E* from = static_cast<const E*>(x);
      E* to = static_cast<E*>(out);
      each_vector(first, last, [&](int64_t i, auto size) {
        put(to + i, activation(get(from + i, size)), size);
      });
    });
  });
}
QUIRE_REPLAYABLE(quire_activation)

// x: rows of 2 · width, stride in elements; out: contiguous rows of width > 0. The activation of the
// first half is rounded to the element type before the product.
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
      each_vector(first, last, [&](int64_t i, auto size) {
        const vf active = rounded<E>(activation(get(gate + i, size)));
        put(y + i, mul(active, get(up + i, size)), size);
      });
    });
  });
}
QUIRE_REPLAYABLE(quire_activation_and_mul)
