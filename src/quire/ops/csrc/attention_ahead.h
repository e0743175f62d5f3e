// Memory that attention fetches ahead of its use.
#pragma once

#include <algorithm>
#include <cstdint>

#include "simd.h"

namespace quire::attention {

// Prefetches rows of `width` elements in the order of their addresses, as much as it is asked for:
// little at a time, since a burst keeps what is in use waiting. Into the second-level cache:
// the few miss buffers of the first are for what is in use.
template <class E>
class Ahead {
 public:
  // rows: the addresses of `count` rows.
  Ahead(const E* const* rows, int count, int width)
      : row_(rows), last_(rows + count), bytes_(width * sizeof(E)) {}

  QUIRE_INLINE void fetch(int elements) {
    if (at_ >= end_) {
      if (row_ == last_) return;
      next_run();
    }
    const uintptr_t from = at_, stop = std::min(from + elements * sizeof(E), end_);
    at_ = stop + (kLine - stop % kLine) % kLine;
    for (uintptr_t line = from; line < stop; line += kLine)
      _mm_prefetch(reinterpret_cast<const char*>(line), _MM_HINT_T1);
  }

  void fetch_all() {
    while (row_ < last_ || at_ < end_) fetch(kWhole);
  }

 private:
  static constexpr uintptr_t kLine = 64;
  static constexpr uintptr_t kGap = 256;  // scales between the rows of an int8 cache are needed too
  static constexpr int kWhole = 1 << 20;

  // Rows that lie side by side. Inlined, since a call would push the sums of a loop into memory.
  QUIRE_INLINE void next_run() {
    at_ = address(row_) / kLine * kLine;
    end_ = address(row_) + bytes_;
    while (++row_ < last_ && address(row_) - end_ <= kGap) end_ = address(row_) + bytes_;
  }

  static uintptr_t address(const E* const* row) { return reinterpret_cast<uintptr_t>(*row); }

  const E* const* row_;
  const E* const* last_;
  uintptr_t bytes_, at_ = 0, end_ = 0;
};

}  // namespace quire::attention
