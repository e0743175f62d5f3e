// bf16 by bf16 in tile registers, as an arithmetic of linear/product.h.
//
// TDPBF16PS adds 32 products to a float32: products of even k form one chain of fused multiply-adds
// from zero, those of odd k another, and the sum of both is added (Intel SDM: round to nearest
// even, denormals are zeros). Its lines are the pairs of a packed panel as stored.
#pragma once

#if defined(__AMX_BF16__)

#include "linear/product.h"
#include "linear/tile_loop.h"

namespace quire::linear {

struct Bf16Tiles {
  using W = bf16;
  using X = bf16;
  static constexpr int kLine = kTileBytes / sizeof(bf16);
  static constexpr int kRows = kStepRows;
  static constexpr int64_t kBeyond = kBeyondTile;
  static constexpr int64_t kBlockBytes = kTileBlockBytes;

  static void put_line(const bf16* x, int n, bf16* line) { Bf16Dot::put_line(x, n, line); }

  template <class Y>
  static auto loop(const Block<Bf16Tiles>& block, const bf16* x, Y* y);
};
template <>
inline constexpr bool kLoops<Bf16Tiles> = true;

template <class Y>
struct Bf16Job {
  using Products = Bf16Products;
  using Output = Y;
  const Block<Bf16Tiles>* block;
  const bf16* x;

  TileRows tile(int64_t t) const {
    return {x + block->tile_offset(t), t * block->height, block->rows_of(t)};
  }
  const bf16* panel(int64_t index) const { return block->panel(index); }
  int64_t lines() const { return pairs_of(block->problem.depth); }
  const Outputs& outputs() const { return block->problem.outputs; }
  int threads() const { return team_size(block->problem.team); }
  QUIRE_INLINE void put(int64_t, int64_t index, const uint8_t* sums, Y* to) const {
    const auto* values = reinterpret_cast<const float*>(sums);
    vf low = load(values), high = load(values + kLanes);
    if (const float* bias = block->problem.bias; bias != nullptr) {
      const int64_t output = outputs().output(index), left = outputs().columns(index);
      low = add(low, load_at_most(bias + output, left));
      if (left > kLanes) high = add(high, load_at_most(bias + output + kLanes, left - kLanes));
    }
    store_pair(to, low, high);
  }
};

template <class Y>
auto Bf16Tiles::loop(const Block<Bf16Tiles>& block, const bf16* x, Y* y) {
  return TileLoop<Bf16Job<Y>>({&block, x}, y, block.problem.rows, block.height);
}

}  // namespace quire::linear

#endif
