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

// So many bytes of outputs go past the caches, from where they would have been driven out, and into
// which they would have to be read before they are written. Measured with tile registers: 1 MiB
// takes a tenth less time past them, 2 MiB a third less, 512 KiB the same.
constexpr int64_t kStreamedBytes = 1 << 20;

#if defined(__AVX512F__)
// Other threads see it after a store fence.
template <class E>
QUIRE_INLINE void stream_pair(E* y, vf low, vf high) {
  if constexpr (sizeof(E) == 2) {
    alignas(64) E both[kWidth];
    store_pair(both, low, high);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(y), _mm512_load_si512(both));
  }
}
#endif

inline int64_t panels_of(int64_t outputs) { return (outputs + kWidth - 1) / kWidth; }

}  // namespace quire
