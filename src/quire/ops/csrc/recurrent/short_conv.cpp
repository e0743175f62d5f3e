// Causal convolution of each channel, gated or with SiLU, from and to a state of its row.
#include "native/parallel.h"
#include "native/replay.h"
#include "native/rows.h"
#include "pointwise/activations.h"

namespace quire {
namespace {

constexpr int64_t kPiece = 512;  // channels of a task: whole vectors
constexpr int64_t kMaxTaps = 8;

QUIRE_INLINE vf silu(vf x) { return Silu()(x); }
QUIRE_INLINE vf2 silu(vf2 x) { return {Silu()(x.a), Silu()(x.b)}; }

// Channels [first, last) of one row with `tokens` tokens, which are `stride` elements apart in x.
// past, next: the state before and after; past is null for zeros.
template <bool kGated, class E>
void convolve(const E* x, int64_t stride, E* out, int64_t size, const E* weight, int64_t taps,
              const E* bias, const E* past, E* next, int64_t tokens, int64_t first, int64_t last) {
  alignas(64) E seen[kMaxTaps][kPiece];  // a ring: u of token t lies in t modulo taps
  const int64_t before = taps - 1, width = last - first;
  for (int64_t k = 0; k < before; ++k) {
    if (past == nullptr) {
      std::memset(seen[k], 0, sizeof seen[k]);
    } else {
      std::memcpy(seen[k], past + k * size + first, width * sizeof(E));
    }
  }
  for (int64_t t = 0; t < tokens; ++t) {
    const E* const b = x + t * stride + first;
    const E* const c = b + size;
    const E* const v = c + size;
    E* const own = seen[(t + before) % taps];
    E* const y = out + t * size + first;
    each_two(0, width, [&](int64_t i, auto part) {
      if constexpr (kGated) {
        put(own + i, mul(get(b + i, part), get(v + i, part)), part);
      } else {
        put(own + i, get(b + i, part), part);
      }
      auto total = mul(get(weight + first + i, part), get(seen[t % taps] + i, part));
      for (int64_t k = 1; k < taps; ++k) {
        total = fma(get(weight + k * size + first + i, part),
                    get(seen[(t + k) % taps] + i, part), total);
      }
      if (bias != nullptr) total = add(total, get(bias + first + i, part));
      total = rounded<E>(total);
      if constexpr (kGated) {
        put(y + i, mul(get(c + i, part), total), part);
      } else {
        put(y + i, silu(total), part);
      }
    });
  }
  for (int64_t k = 0; k < before; ++k) {
    std::memcpy(next + k * size + first, seen[(tokens + k) % taps], width * sizeof(E));
  }
}

}  // namespace
}  // namespace quire

// x: tokens `x_stride` elements apart; B, C, v of each if `gated`, 3 · size, else size channels.
// out: [T, size]. weight: [taps, size]. bias: may be null.
// states: places `stride` elements apart, each [taps - 1, size]. read, write, num_computed: one
// number per slot. Row i, of slot slots[i], has tokens starts[i] … starts[i + 1] - 1. Returns 3 for
// more taps than there may be.
QUIRE_API int quire_short_conv(const void* x, int64_t x_stride, int32_t gated, void* out,
                               int64_t size, const void* weight, int64_t taps, const void* bias, void* states, int64_t stride,
                               const int64_t* read, const int64_t* write, const int64_t* slots,
                               int64_t num_rows, const int32_t* starts,
                               const int64_t* num_computed, int32_t dtype, quire::Team* team) {
  using namespace quire;
  if (taps < 1 || taps > kMaxTaps) return 3;
  return dispatch(static_cast<DType>(dtype), [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    const int64_t pieces = (size + kPiece - 1) / kPiece;
    parallel_for(num_rows * pieces, 1, team, [&](int64_t task) {
      const int64_t row = task / pieces, first = task % pieces * kPiece;
      const int64_t last = std::min(first + kPiece, size), slot = slots[row];
      const int64_t start = starts[row];
      E* const places = static_cast<E*>(states);
      const auto chosen = gated != 0 ? convolve<true, E> : convolve<false, E>;
      chosen(static_cast<const E*>(x) + start * x_stride, x_stride,
             static_cast<E*>(out) + start * size, size, static_cast<const E*>(weight), taps,
             static_cast<const E*>(bias),
             num_computed[slot] == 0 ? nullptr : places + read[slot] * stride,
             places + write[slot] * stride, starts[row + 1] - start, first, last);
    });
  });
}
QUIRE_REPLAYABLE(quire_short_conv)
