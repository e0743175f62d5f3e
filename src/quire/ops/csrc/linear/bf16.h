// Product of bf16 inputs and bf16 weights, for which there are instructions.
#pragma once

#include "linear/product.h"

namespace quire::linear {

// Computes y, bf16 or float. Returns 0, or 2 without memory for scratch.
template <class Y>
int multiply_bf16(const Problem& problem, const bf16* x, const bf16* weight, Y* y);

}  // namespace quire::linear
