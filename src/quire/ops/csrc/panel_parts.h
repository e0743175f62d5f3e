// How threads share the work of a linear layer: panels, and at the end tiles of rows by a panel.
#pragma once

#include "gate.h"
#include "parallel.h"

namespace quire {

// Panels that are computed in turn make a group; each group is `parts` parts, some tiles each.
struct PanelParts {
  int64_t in_turn, groups, num_tiles, parts;

  // parts: wanted; no fewer than one, no more than tiles.
  PanelParts(const Outputs& outputs, int64_t num_tiles, int64_t parts)
      : in_turn(outputs.panels_in_turn()),
        groups(outputs.panels() / in_turn),
        num_tiles(num_tiles),
        parts(std::clamp<int64_t>(parts, 1, num_tiles)) {}

  int64_t count() const { return groups * parts; }
  int64_t panel(int64_t part) const { return part / parts * in_turn; }  // the first one
  // work: multiplications of a group.
  Grain grain(int64_t work) const {
    const int64_t at_once = kWorkPerTask / (work + 1) + 1;
    return parts > 1 ? Grain{parts, 1} : Grain{at_once, at_once};
  }

  // Calls f(panel, first tile, last tile) for parts [first, last).
  template <class F>
  void each(int64_t first, int64_t last, F&& f) const {
    if (parts == 1) {  // most often, with little work, which divisions would delay
      for (int64_t p = first * in_turn; p < last * in_turn; ++p) f(p, int64_t{0}, num_tiles);
      return;
    }
    while (first < last) {
      const int64_t start = first / parts * parts, end = std::min(last, start + parts);
      const int64_t first_tile = (first - start) * num_tiles / parts;
      const int64_t last_tile = (end - start) * num_tiles / parts;
      for (int64_t p = panel(first); p < panel(first) + in_turn; ++p) f(p, first_tile, last_tile);
      first = end;
    }
  }
};

}  // namespace quire
