// Products with packed weights that become floats, some panels at a time, before they are
// multiplied like those of linear.cpp.
#pragma once

#include "linear/product.h"
#include "native/simd_int.h"

namespace quire::linear {

// Writes panel `index` of a packed matrix in the form of linear/layout.h.
template <class W>
using Widen = void (*)(const void* matrix, int64_t index, W* to);

struct Widening {
  const void* matrix;
  Widen<float> to_float32;
  Widen<bf16> to_bfloat16;
  Widen<fp16> to_float16;

  Widen<float> to(const float*) const { return to_float32; }
  Widen<bf16> to(const bf16*) const { return to_bfloat16; }
  Widen<fp16> to(const fp16*) const { return to_float16; }
};

template <class P, class W>
void widen_panel_of(const void* panels, int64_t index, W* to) {
  static_cast<const P*>(panels)->widen(index, to);
}
// P::widen(index, to) writes a panel for any type of `to`.
template <class P>
Widening widening_of(const P& panels) {
  return {&panels, widen_panel_of<P, float>, widen_panel_of<P, bf16>, widen_panel_of<P, fp16>};
}

constexpr int32_t kIntegers = -1;  // in place of a weight_dtype: x becomes integers instead

// Computes y = x Wᵀ + b with weights rounded to `weight_dtype`. x and y: see dispatch_result().
// rotation: inputs of a block that are rotated, divided by rotation_part() and rounded to the type
// of x before; 1 for none. Returns 0, 1 for an unknown type, 2 without memory for scratch.
int multiply_widened(const Problem& problem, const Widening& widening, int64_t rotation,
                     int32_t weight_dtype, int32_t x_dtype, int32_t y_dtype, const void* x,
                     void* y);

// Returns the power of two that rotated inputs are divided by, and their weights multiplied with:
// the root of the block, or half of that. So both stay about as large as they were.
inline float rotation_part(int64_t rotation) {
  int64_t part = 1;
  while (4 * part * part <= rotation) part *= 2;
  return static_cast<float>(part);
}

// Stores the columns of an even and an odd input.
template <class W>
QUIRE_INLINE void put_pair(W* pair, const vf (&even)[2], const vf (&odd)[2]) {
  for (int half = 0; half < 2; ++half) {
    store(pair + half * kLanes, even[half]);
    store(pair + kWidth + half * kLanes, odd[half]);
  }
}
QUIRE_INLINE void put_pair(bf16* pair, const vf (&even)[2], const vf (&odd)[2]) {
  for (int half = 0; half < 2; ++half) store_both(pair + half * kWidth, {even[half], odd[half]});
}

// Stores the pairs of a quad of inputs, all or the first. low, high: its bytes, in a lane those of
// a column. weight(byte, half) returns weights of one half of the columns.
template <int kPairs = 2, class W, class F>
QUIRE_INLINE W* put_quad(W* to, vi low, vi high, F&& weight) {
  vf weights[2 * kPairs][2];
  QUIRE_UNROLL
  for (int k = 0; k < 2 * kPairs; ++k) {
    weights[k][0] = weight(to_float(and_int(shift_right(low, 8 * k), set1_int(255))), 0);
    weights[k][1] = weight(to_float(and_int(shift_right(high, 8 * k), set1_int(255))), 1);
  }
  QUIRE_UNROLL
  for (int pair = 0; pair < kPairs; ++pair, to += kPairElements) {
    put_pair(to, weights[2 * pair], weights[2 * pair + 1]);
  }
  return to;
}

}  // namespace quire::linear
