// Choice of the arithmetic of linear/product.h by the types of inputs and weights.
#pragma once

#include <type_traits>

#include "linear/bf16.h"
#include "linear/product.h"

namespace quire::linear {

// Multiplies by the bf16 instructions if both sides are bf16, otherwise by fma in float32.
template <class E, class W, class Y>
int multiply_any(const Problem& problem, const E* x, const W* weight, Y* y) {
  if constexpr (std::is_same_v<E, bf16> && std::is_same_v<W, bf16>) {
    return multiply_bf16(problem, x, weight, y);
  } else {
    return multiply<Fma<W>>(problem, x, weight, y);
  }
}

}  // namespace quire::linear
