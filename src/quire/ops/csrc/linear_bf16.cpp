// The best arithmetic for bf16 on both sides: in tile registers, in vectors by pairs, or by fma.
#include "linear_bf16.h"

#include "linear_amx.h"

namespace quire::linear {
namespace {

#if defined(__AMX_BF16__)
using Best = Bf16Tiles;
#elif defined(__AVX512BF16__)
using Best = Bf16Dot;
#else
using Best = Fma<bf16>;
#endif

}  // namespace

int multiply_bf16(const Problem& problem, const bf16* x, const bf16* weight, bf16* y) {
  return multiply<Best>(problem, x, weight, y);
}

}  // namespace quire::linear
