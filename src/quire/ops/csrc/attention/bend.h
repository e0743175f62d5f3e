// Transforms of attention scores: a soft cap and a slope by distance (ALiBi).
#pragma once

#include "attention/keys.h"
#include "pointwise/activations.h"

namespace quire::attention {

// Cap and slope of the scores of one query row with the keys of one block. Scores are exponents of
// 2, so cap and slope include the factor log2(e).
struct RowBend {
  float cap, slope;  // 0: none
  float distance;    // position of the block's first key minus that of the query

  bool any() const { return cap > 0.0f || slope != 0.0f; }
  // x: scores of the keys k to k + kLanes - 1 of the block.
  QUIRE_INLINE vf operator()(vf x, int k) const {
    alignas(64) static constexpr float kInTurn[16] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                      8, 9, 10, 11, 12, 13, 14, 15};
    return bent(x, cap, set1(slope), add(set1(distance + static_cast<float>(k)), load(kInTurn)));
  }
  // distance: position of the key minus that of the query.
  static QUIRE_INLINE vf bent(vf x, float cap, vf slope, vf distance) {
    if (cap > 0.0f) x = mul(tanh_of(mul(x, set1(1.0f / cap))), set1(cap));
    return fma(slope, distance, x);
  }
};

// Cap and slopes of all query heads from the first one of a tile on.
struct Bend {
  float cap;            // without the factor log2(e); 0: none
  const float* slopes;  // per head; null: none

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
