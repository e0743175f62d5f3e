// bf16 by bf16 in tile registers, as an arithmetic of linear_product.h.
//
// TDPBF16PS adds 32 products to a float32: those of even k are one chain of fused multiply-adds from
// zero, those of odd k another, and their sum is added (Intel SDM: round to nearest even, denormals
// are zeros). Its lines are the pairs of a packed panel as they stand.
#pragma once

#if defined(__AMX_BF16__)

#include "linear_product.h"
#include "tiles.h"

namespace quire::linear {

struct Bf16Tiles {
  using W = bf16;
  using X = bf16;
  static constexpr int kLine = kTileBytes / sizeof(bf16);
  static constexpr int kRows = kStepRows;
  static constexpr int64_t kBeyond = kBeyondTile;
  static constexpr int64_t kAheadBytes = 2 * kStepLines * kLineBytes;  // not measured
  static constexpr int panels_together(int) { return 1; }
  static Tiles enter(int64_t rows) { return Tiles(rows); }

  static void put_line(const bf16* x, int n, bf16* line) { Bf16Dot::put_line(x, n, line); }

  template <int R>
  static void multiply(const bf16* x, const bf16* panel, int64_t pairs, Ahead<bf16> ahead,
                       float* out) {
    multiply_tiles<Bf16Products, (R > kTileRows)>(x, R, panel, pairs, ahead.start,
                                                  ahead.step * sizeof(bf16), out);
  }
};

template <std::size_t... I>
constexpr TileKernels<Bf16Tiles> amx_kernels(std::index_sequence<I...>) {
  return {{Bf16Tiles::multiply<I + 1>...}, {}};
}
template <>
inline constexpr TileKernels<Bf16Tiles> kKernels<Bf16Tiles> =
    amx_kernels(std::make_index_sequence<kStepRows>());

}  // namespace quire::linear

#endif
