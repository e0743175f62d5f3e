// What packed weights of every format have in common: panels of output columns.
#pragma once

#include "native/simd.h"
#include "native/vendor.h"

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

// Elements of x, n of them at most and zeros for the others.
template <class E>
QUIRE_INLINE vf load_at_most(const E* x, int64_t n) {
  return n >= kLanes ? load(x) : load_part(x, static_cast<int>(n));
}

// Whether hardware alone fetches weights from memory as fast as tiles of very few rows take them,
// so that these had better ask for nothing: on Zen 4 they take 4 to 10 % less time then, on a Xeon
// 7 to 12 % more (measured: 1 and 2 rows of 8 bits and of bfloat16 by fma, 1 row of 4 bits; pairs
// of bfloat16 only on Zen 4). Slightly more rows may ask for a part.
inline bool hardware_keeps_up() { return is_amd(); }
// How far ahead of what it multiplies a tile alone fetches weights, in integer layers and by tile
// registers. Measured best of 2 to 24 KB on Zen 4, of 1 to 12 KB on a Xeon: 8 KB take 2 to 4 % more
// time there, 6 KB up to 6 %.
inline int64_t ahead_bytes() { return is_amd() ? 6144 : 9216; }

inline int64_t panels_of(int64_t outputs) { return (outputs + kWidth - 1) / kWidth; }

}  // namespace quire
