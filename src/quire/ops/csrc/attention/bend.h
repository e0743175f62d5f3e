// What else the score of a query and a key may be: capped, and on a slope.
#pragma once

#include "attention/keys.h"
#include "pointwise/activations.h"

namespace quire::attention {

// Scores of one query row with the keys of one block. Scores are those of powers of two: the cap
// and the slope have been multiplied by log2(e).
struct RowBend {
  float cap, slope;  // 0: none
  float distance;    // position of the block's first key less that of the query

  bool any() const { return cap > 0.0f || slope != 0.0f; }
  // x: with the keys k … k + kLanes - 1 of the block.
  QUIRE_INLINE vf operator()(vf x, int k) const {
    alignas(64) static constexpr float kInTurn[16] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                      8, 9, 10, 11, 12, 13, 14, 15};
    return bent(x, cap, set1(slope), add(set1(distance + static_cast<float>(k)), load(kInTurn)));
  }
  // distance: position of the key less that of the query.
  static QUIRE_INLINE vf bent(vf x, float cap, vf slope, vf distance) {
    if (cap > 0.0f) x = mul(tanh_of(mul(x, set1(1.0f / cap))), set1(cap));
    return fma(slope, distance, x);
  }
};

// The same for all heads, of which a tile sees those from its first on.
struct Bend {
  float cap;            // of scores as they are in the formula; 0: none
  const float* slopes;  // by head; null: none

  bool any() const { return cap > 0.0f || slopes != nullptr; }
  Bend from_head(int64_t head) const {
    return Bend{cap, slopes == nullptr ? nullptr : slopes + head};
  }
  float slope(int64_t head) const { return slopes == nullptr ? 0.0f : slopes[head] * kLog2E; }
  RowBend row(int64_t head, int64_t distance) const {
    return RowBend{cap * kLog2E, slope(head), static_cast<float>(distance)};
  }
};

}  // namespace quire::attention
