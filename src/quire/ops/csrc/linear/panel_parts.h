// Division of the work of a linear layer among threads: panels, and at the end tiles of rows by a
// panel.
#pragma once

#include "pointwise/gate.h"
#include "native/parallel.h"

namespace quire {

// Panels that are computed in turn form a group; each group is `parts` parts of some tiles each.
class PanelParts {
 public:
  // parts: wanted number. At least one is made, and at most one per tile.
  PanelParts(const Outputs& outputs, int64_t num_tiles, int64_t parts)
      : in_turn_(outputs.panels_in_turn()),
        groups_(outputs.panels() / in_turn_),
        num_tiles_(num_tiles),
        parts_(std::clamp<int64_t>(parts, 1, num_tiles)) {}

  // Computes all parts. enter(panel) makes what a thread needs, which will probably begin with this
  // panel. compute(panel, first, last, needed) multiplies tiles [first, last) by a panel. work:
  // multiplications of a group.
  template <class Enter, class F>
  void share(int64_t work, Team* team, Enter&& enter, F&& compute) const {
    const int64_t at_once = kWorkPerTask / (work + 1) + 1;
    const Grain grain = parts_ > 1 ? Grain{parts_, 1} : Grain{at_once, at_once};
    parallel_ranges_of(
        groups_ * parts_, grain, team,
        [&](int64_t first, int64_t last, auto& needed) {
          each(first, last, [&](int64_t panel, int64_t first_tile, int64_t last_tile) {
            compute(panel, first_tile, last_tile, needed);
          });
        },
        [&](int64_t part) { return enter(part / parts_ * in_turn_); });
  }

 private:
  // Calls f(panel, first tile, last tile) for parts [first, last).
  template <class F>
  void each(int64_t first, int64_t last, F&& f) const {
    if (parts_ == 1) {  // the usual case: little work, which divisions would delay
      for (int64_t p = first * in_turn_; p < last * in_turn_; ++p) f(p, int64_t{0}, num_tiles_);
      return;
    }
    while (first < last) {
      const int64_t group = first / parts_, start = group * parts_;
      const int64_t end = std::min(last, start + parts_);
      const int64_t first_tile = (first - start) * num_tiles_ / parts_;
      const int64_t last_tile = (end - start) * num_tiles_ / parts_;
      for (int64_t p = group * in_turn_; p < (group + 1) * in_turn_; ++p) {
        f(p, first_tile, last_tile);
      }
      first = end;
    }
  }

  const int64_t in_turn_, groups_, num_tiles_, parts_;
};

}  // namespace quire
