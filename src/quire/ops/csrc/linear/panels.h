// Panels of output columns, which packed weights of every format have in common.
#pragma once

#include "native/simd.h"
#include "native/vendor.h"

namespace quire {

constexpr int kWidth = 2 * kLanes;  // output columns of a panel; the last one is padded
constexpr int64_t kWorkPerTask = 1 << 17;  // multiplications, about 5 µs

// Calls f with null pointers of the types of x and y. Returns 1 unless y has x's type or float32.
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

// Loads at most n elements of x, with zeros for the others.
template <class E>
QUIRE_INLINE vf load_at_most(const E* x, int64_t n) {
  return n >= kLanes ? load(x) : load_part(x, static_cast<int>(n));
}

// Returns whether hardware prefetching alone brings weights from memory as fast as tiles of very
// few rows use them, so that these should prefetch nothing: they then take 4 to 10 % less time on
// Zen 4, but 7 to 12 % more on a Xeon (measured: 1 and 2 rows of 8 bits and of bfloat16 by fma, 1
// row of 4 bits; pairs of bfloat16 only on Zen 4). Tiles of slightly more rows may prefetch a part.
inline bool hardware_keeps_up() { return is_amd(); }
// Returns the distance at which a single tile prefetches weights, in integer layers and with tile
// registers. Measured best of 2 to 24 KB on Zen 4, of 1 to 12 KB on a Xeon: there 8 KB take 2 to 4
// % more time, 6 KB up to 6 %.
inline int64_t ahead_bytes() { return is_amd() ? 6144 : 9216; }

inline int64_t panels_of(int64_t outputs) { return (outputs + kWidth - 1) / kWidth; }

}  // namespace quire
