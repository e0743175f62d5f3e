// Layers whose outputs are gated: the first half of them, activated, times the second half. The
// results are those of `activation_and_mul` over all outputs, but these are never stored.
#pragma once

#include <algorithm>

#include "linear/panels.h"

namespace quire {

constexpr int32_t kUngated = -1;
constexpr int32_t kApart = -2;  // laid out for a gate that another operation applies later

// Layout of the outputs of a layer in its panels. Panels of a gated layer come in pairs: the same
// columns of the first half and of the second. A task that computes one of them computes both, in
// turn.
struct Outputs {
  int64_t count;
  int32_t gate;  // an Activation, kUngated or kApart
  int64_t y_stride = 0;  // stride of the rows of y; 0: they are contiguous

  bool gated() const { return gate != kUngated; }
  int64_t panels_in_turn() const { return gated() ? 2 : 1; }
  int64_t part() const { return gated() ? count / 2 : count; }
  int64_t width() const { return gate == kApart ? count : part(); }  // width of a row of y
  int64_t stride() const { return y_stride == 0 ? width() : y_stride; }
  int64_t panels() const { return panels_in_turn() * panels_of(part()); }
  bool is_second(int64_t panel) const { return gated() && panel % 2 != 0; }
  bool applies(int64_t panel) const { return gate != kApart && is_second(panel); }
  // column(), columns(): first column of y in a panel, and their number. end(): end of its half of
  // y. output(): output that the first column is.
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

// Replaces y by activation(y) · up, rounded as in `activation_and_mul` (pointwise.cpp, which is
// compiled with the instructions for it). y: rows with a stride. up: rows of kWidth, of which
// `width` count.
template <class E>
void apply_gate(int32_t kind, const E* up, E* y, int64_t y_stride, int64_t rows, int64_t width);

// Stores at most kRows rows of a panel by put(to, stride): at `columns`, rows `stride` apart. There
// the first panel of a pair leaves its outputs for the second.
template <int kRows, class E, class Put>
QUIRE_INLINE void put_panel(const Outputs& outputs, int64_t panel, int64_t rows, E* columns,
                            int64_t stride, const Put& put) {
  if (!outputs.applies(panel)) return put(columns, stride);
  alignas(64) E up[kRows * kWidth];
  put(up, static_cast<int64_t>(kWidth));
  apply_gate(outputs.gate, up, columns, stride, rows, outputs.columns(panel));
}

}  // namespace quire
