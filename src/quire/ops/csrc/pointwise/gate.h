// Layers whose outputs are gated: the first half of them, activated, times the second half. The
// results are those of `activation_and_mul` over all outputs, which are never stored.
#pragma once

#include <algorithm>

#include "linear/panels.h"

namespace quire {

constexpr int32_t kUngated = -1;
constexpr int32_t kApart = -2;  // laid out for a gate, which something else applies later

// How the outputs of a layer lie in its panels. Those of a gated one come in pairs, the same
// columns of the first half and of the second; a task that computes one of them computes both, in
// turn.
struct Outputs {
  int64_t count;
  int32_t gate;  // of activations.h, kUngated or kApart
  int64_t y_stride = 0;  // of rows of y; 0: they are contiguous

  bool gated() const { return gate != kUngated; }
  int64_t panels_in_turn() const { return gated() ? 2 : 1; }
  int64_t part() const { return gated() ? count / 2 : count; }
  int64_t width() const { return gate == kApart ? count : part(); }  // of a row of y
  int64_t stride() const { return y_stride == 0 ? width() : y_stride; }
  int64_t panels() const { return panels_in_turn() * panels_of(part()); }
  bool is_second(int64_t panel) const { return gated() && panel % 2 != 0; }
  bool applies(int64_t panel) const { return gate != kApart && is_second(panel); }
  // The columns of y that a panel makes, where its half of y ends, and the output that the first
  // column is.
  int64_t column(int64_t panel) const {
    return gate == kApart ? output(panel) : column_of_part(panel);
  }
  int64_t columns(int64_t panel) const {
    return std::min<int64_t>(kWidth, part() - column_of_part(panel));
  }
  int64_t end(int64_t column) const { return column < part() ? part() : width(); }
  int64_t output(int64_t panel) const {
    return column_of_part(panel) + is_second(panel) * part();
  }

 private:
  int64_t column_of_part(int64_t panel) const { return (gated() ? panel / 2 : panel) * kWidth; }
};

// y becomes activation(y) · up, rounded as by `activation_and_mul` (pointwise.cpp, which is
// compiled with the instructions for it). y: rows with a stride; up: rows of kWidth, of which
// `width` count.
template <class E>
void apply_gate(int32_t kind, const E* up, E* y, int64_t y_stride, int64_t rows, int64_t width);

// Stores what put(to, stride) stores of a panel by at most kRows rows: at `columns`, of each row
// `stride` further. There the first panel of a pair leaves its outputs for the second.
template <int kRows, class E, class Put>
QUIRE_INLINE void put_panel(const Outputs& outputs, int64_t panel, int64_t rows, E* columns,
                            int64_t stride, const Put& put) {
  if (!outputs.applies(panel)) return put(columns, stride);
  alignas(64) E up[kRows * kWidth];
  put(up, static_cast<int64_t>(kWidth));
  apply_gate(outputs.gate, up, columns, stride, rows, outputs.columns(panel));
}

}  // namespace quire
