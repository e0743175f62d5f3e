// Memory layout of the packed weights of linear layers.
//
// Panels of kWidth output columns, the last one padded with zeros, K-major in pairs of k; an odd K
// is padded with zeros. In a bf16 panel the two k of a column are adjacent, so that one 32-bit lane
// holds both: VDPBF16PS and AMX take this form, and one shift or mask widens each. Other types hold
// all columns of the even k, then those of the odd one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "pointwise/gate.h"

namespace quire::linear {

constexpr int kPairElements = 2 * kWidth;

inline int64_t pairs_of(int64_t depth) { return (depth + 1) / 2; }
inline int64_t panel_elements(int64_t depth) { return pairs_of(depth) * kPairElements; }

// Returns the position of element k of column c of a panel.
template <class W>
QUIRE_INLINE int64_t position(int64_t k, int c) {
  const int odd = k % 2;
  return k / 2 * kPairElements + (std::is_same_v<W, bf16> ? 2 * c + odd : odd * kWidth + c);
}

// Loads the columns of the even or the odd k of a pair.
template <bool Odd, class W>
QUIRE_INLINE void load_columns(const W* pair, vf& low, vf& high) {
  if constexpr (std::is_same_v<W, bf16>) {
    low = Odd ? upper_halves(pair) : lower_halves(pair);
    high = Odd ? upper_halves(pair + kWidth) : lower_halves(pair + kWidth);
  } else {
    low = load(pair + Odd * kWidth);
    high = load(pair + Odd * kWidth + kLanes);
  }
}

// Packs panel `index` of weight, contiguous [outputs.count, depth].
template <class W>
void pack_panel(const W* weight, const Outputs& outputs, int64_t depth, int64_t index, W* packed) {
  constexpr int64_t kBlock = 32;  // steps of k whose output stays in the first-level cache
  const W* source = weight + outputs.output(index) * depth;
  W* panel = packed + index * panel_elements(depth);
  const int columns = static_cast<int>(outputs.columns(index));
  if (columns < kWidth || depth % 2 != 0) std::fill_n(panel, panel_elements(depth), W{});
  for (int64_t first = 0; first < depth; first += kBlock) {
    const int64_t last = std::min(depth, first + kBlock);
    for (int c = 0; c < columns; ++c) {
      for (int64_t k = first; k < last; ++k) panel[position<W>(k, c)] = source[c * depth + k];
    }
  }
}

// Copies row `index` of the original matrix from its packed form.
template <class W>
void unpack_row(const W* packed, int64_t depth, int64_t index, W* row) {
  const W* panel = packed + index / kWidth * panel_elements(depth);
  const int column = static_cast<int>(index % kWidth);
  int64_t k = 0;
  if constexpr (std::is_same_v<W, bf16>) {  // a pair per load: each has its own cache line
    for (; k + 2 <= depth; k += 2) std::memcpy(row + k, panel + position<W>(k, column), 4);
  }
  for (; k < depth; ++k) row[k] = panel[position<W>(k, column)];
}

}  // namespace quire::linear
