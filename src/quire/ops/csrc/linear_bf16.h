// bf16 by bf16, for which there are instructions.
#pragma once

#include "linear_product.h"

namespace quire::linear {

// 0, or 2 without memory for scratch.
int multiply_bf16(const Problem& problem, const bf16* x, const bf16* weight, bf16* y);

}  // namespace quire::linear
