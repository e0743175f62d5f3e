// bf16 by bf16 in tile registers, as an arithmetic of linear_product.h.
//
// TDPBF16PS adds 32 products to a float32: those of even k are one chain of fused multiply-adds
// from zero, those of odd k another, and their sum is added (Intel SDM: round to nearest even,
// denormals are zeros). Its lines are the pairs of a packed panel as they stand.
#pragma once

#if defined(__AMX_BF16__)

#include "linear_product.h"
#include "tile_loop.h"

namespace quire::linear {

struct Bf16Tiles {
  using W = bf16;
  using X = bf16;
  static constexpr int kLine = kTileBytes / sizeof(bf16);
  static constexpr int kRows = kStepRows;
  static constexpr int64_t kBeyond = kBeyondTile;
  static constexpr int64_t kBlockBytes = kTileBlockBytes;
  static constexpr int64_t kAheadBytes = 8192;  // measured: 4,096 to 16,384 are alike

  static void put_line(const bf16* x, int n, bf16* line) { Bf16Dot::put_line(x, n, line); }

  template <class Y>
  static auto loop(const Block<Bf16Tiles>& block, const bf16* x, Y* y);
};
template <>
inline constexpr bool kLoops<Bf16Tiles> = true;

template <class Y>
struct Bf16Job {
  using Products = Bf16Products;
  const Block<Bf16Tiles>* block;
  const bf16* x;
  Y* y;
  bool streams;

  struct Target {
    int64_t index;
    Y* y;
  };
  TileRows tile(int64_t t) const { return {x + block->tile_offset(t), block->rows_of(t)}; }
  const bf16* panel(int64_t index) const { return block->panel(index); }
  int64_t lines() const { return pairs_of(block->problem.depth); }
  Target target(int64_t t, int64_t index) const {
    return {index, y + t * block->height * block->problem.outputs.width()};
  }
  QUIRE_INLINE void put(const Target& to, int r, const uint8_t* sums) const {
    const Problem& problem = block->problem;
    const auto* values = reinterpret_cast<const float*>(sums);
    Y* const row = to.y + r * problem.outputs.width();
    if (streams) {
      const int64_t column = problem.outputs.column(to.index);
      vf pair[2] = {load(values), load(values + kLanes)};
      if (problem.bias != nullptr) {
        pair[0] = add(pair[0], load(problem.bias + column));
        pair[1] = add(pair[1], load(problem.bias + column + kLanes));
      }
      stream_pair(row + column, pair[0], pair[1]);
    } else {
      put_panel<1>(problem.outputs, to.index, 1, row, [&](Y* columns, int64_t) {
        put_columns(problem, values, to.index, columns);
      });
    }
  }
};

template <class Y>
auto Bf16Tiles::loop(const Block<Bf16Tiles>& block, const bf16* x, Y* y) {
  return TileLoop<Bf16Job<Y>>(
      {&block, x, y, pays_to_stream(y, block.problem.rows, block.problem.outputs)}, block.height,
      kAheadBytes);
}

}  // namespace quire::linear

#endif
