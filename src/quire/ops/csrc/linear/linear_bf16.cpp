// Best arithmetic for bf16 inputs and weights: tile registers, pairs in vectors, or fma.
#include "linear/bf16.h"

#include "linear/amx.h"

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

template <class Y>
int multiply_bf16(const Problem& problem, const bf16* x, const bf16* weight, Y* y) {
  return multiply<Best>(problem, x, weight, y);
}

template int multiply_bf16(const Problem&, const bf16*, const bf16*, bf16*);
template int multiply_bf16(const Problem&, const bf16*, const bf16*, float*);

}  // namespace quire::linear
