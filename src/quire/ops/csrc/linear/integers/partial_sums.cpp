// Steps before and after the sums of integers that ranks add (linear_int8.cpp, linear_int4.cpp).
#include <atomic>

#include "linear/integers/int_rows.h"
#include "native/parallel.h"
#include "native/replay.h"
#include "native/rows.h"

// Writes the largest magnitude of each row to out, [rows]; for a row with infinity or NaN, one of
// these. x: rows of `width` elements with a stride, which are rotated first (see LinearCall).
// Returns 2 without memory for a rotated row.
QUIRE_API int quire_row_magnitudes(const void* x, int64_t x_stride, float* out, int64_t rows,
                                   int64_t width, int64_t rotation, int32_t x_dtype,
                                   quire::Team* team) {
  using namespace quire;
  std::atomic<bool> out_of_memory{false};
  const int unknown = dispatch(static_cast<DType>(x_dtype), [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    parallel_for(rows, kWorkPerTask / (width + 1) + 1, team, [&](int64_t row) {
      const E* const from = static_cast<const E*>(x) + row * x_stride;
      if (rotation == 1) {
        out[row] = largest_magnitude(from, width);
      } else if (auto* const to = linear_int::rotated_rows(width)) {
        out[row] = linear_int::rotate_row(from, to, width, rotation);
      } else {
        out_of_memory.store(true, std::memory_order_relaxed);
      }
    });
  });
  return unknown != 0 ? unknown : out_of_memory.load(std::memory_order_relaxed) ? 2 : 0;
}
QUIRE_REPLAYABLE(quire_row_magnitudes)

// Completes sums to the outputs of the uncut matrix. sums, out: [rows, width], contiguous. sums:
// integers, which `scale` [width] multiplies, or float32 if scale is null. largest: [rows], largest
// of the numbers that became integers. bias: [width] or null. out: numbers of out_dtype.
QUIRE_API int quire_complete_sums(const void* sums, const float* largest, const float* scale,
                                  const float* bias, void* out, int64_t rows, int64_t width,
                                  int32_t out_dtype, quire::Team* team) {
  using namespace quire;
  return dispatch(static_cast<DType>(out_dtype), [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    parallel_for(rows, kWorkPerTask / (width + 1) + 1, team, [&](int64_t row) {
      const float* const from = static_cast<const float*>(sums) + row * width;
      E* const to = static_cast<E*>(out) + row * width;
      const vf row_scale = set1(linear_int::scale_of_row(largest[row]));
      each_vector(0, width, [&](int64_t i, auto size) {
        vf value = get(from + i, size);
        if (scale != nullptr) value = to_float(bits_of(value));
        value = mul(value, row_scale);
        if (scale != nullptr) value = mul(value, get(scale + i, size));
        if (bias != nullptr) value = add(value, get(bias + i, size));
        put(to + i, value, size);
      });
    });
  });
}
QUIRE_REPLAYABLE(quire_complete_sums)
