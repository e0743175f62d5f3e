// Rotation of matrices while they load.
#include "linear/integers/int_rows.h"
#include "native/parallel.h"
#include "native/replay.h"

// Writes rows of x to out, [rows, depth], rotated in blocks of `block` (rotate_row). x: rows of
// `depth` elements with a stride.
QUIRE_API int quire_rotate(const void* x, int64_t x_stride, float* out, int64_t rows,
                           int64_t depth, int64_t block, int32_t x_dtype, quire::Team* team) {
  using namespace quire;
  return dispatch(static_cast<DType>(x_dtype), [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    parallel_for(rows, kWorkPerTask / (depth + 1) + 1, team, [&](int64_t row) {
      auto* const to = reinterpret_cast<linear_int::Natural*>(out + row * depth);
      linear_int::rotate_row(static_cast<const E*>(x) + row * x_stride, to, depth, block);
    });
  });
}
QUIRE_REPLAYABLE(quire_rotate)
