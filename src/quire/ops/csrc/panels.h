// What packed weights of every format have in common: panels of output columns.
#pragma once

#include "simd.h"

namespace quire {

constexpr int kWidth = 2 * kLanes;  // output columns of a panel; the last one is filled up
constexpr int64_t kWorkPerTask = 1 << 17;  // multiplications, about 5 µs

// Calls f with null pointers of the types of x and y. y has x's type or is float32; 1: else.
template <class F>
int dispatch_result(int32_t x_dtype, int32_t y_dtype, F&& f) {
  const bool same = y_dtype == x_dtype;
  if (!same && static_cast<DType>(y_dtype) != DType::kFloat32) return 1;
  return dispatch(static_cast<DType>(x_dtype), [&](auto* x) {
    if (same) {
      f(x, x);
    } else {
      f(x, static_cast<float*>(nullptr));
    }
  });
}

inline int64_t panels_of(int64_t outputs) { return (outputs + kWidth - 1) / kWidth; }

}  // namespace quire
