// Software prefetch of the memory that attention reads next.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/keys.h"
#include "native/vendor.h"

namespace quire::attention {

constexpr int kCacheLineBytes = 64;

// Prefetches rows of `width` elements in address order into the second-level cache. fetch() takes
// few lines at a time, since a burst would delay the loads that are needed now. The first level is
// left alone: its few miss buffers serve those loads. The constructor merges rows that are adjacent
// in memory, so that fetch() is small enough to inline: within a product loop a call would spill
// the accumulators, and few registers are free.
template <class E>
class Ahead {
 public:
  // rows: addresses of `count` rows, at most kKeyBlock.
  Ahead(const E* const* rows, int count, int width) {
    const uintptr_t bytes = width * sizeof(E);
    Run* last = runs_;
    for (int i = 0; i < count; ++i) {
      const auto at = reinterpret_cast<uintptr_t>(rows[i]);
      if (i > 0 && at - last->end <= kGap) {
        last->end = at + bytes;
      } else {
        *++last = Run{at / kLine * kLine, at + bytes};
      }
    }
    next_ = runs_ + 1;
    last_ = last;
  }
  Ahead(const Ahead&) = delete;
  Ahead& operator=(const Ahead&) = delete;

  // Prefetches the lines of the next kElements elements. Repeats the last line of a run of rows
  // that ends before.
  template <int kElements>
  QUIRE_INLINE void fetch() {
    constexpr int kLines = (kElements * sizeof(E) + kLine - 1) / kLine;
    if (at_ >= end_) {
      if (next_ > last_) return;
      at_ = next_->at;
      end_ = next_->end;
      ++next_;
    }
    _mm_prefetch(reinterpret_cast<const char*>(at_), _MM_HINT_T1);
    QUIRE_UNROLL
    for (int i = 1; i < kLines; ++i) {
      const uintptr_t line = std::min(at_ + i * kLine, end_ - 1);
      _mm_prefetch(reinterpret_cast<const char*>(line), _MM_HINT_T1);
    }
    at_ += kLines * kLine;
  }

  void fetch_all() {
    while (at_ < end_ || next_ <= last_) fetch<1>();
  }

  // Names the head that now reads what the previous Ahead fetched. Each head takes `dim` elements
  // of every token; fetch_again() addresses the one or two heads after it.
  void give_turn(int head, int heads, int dim) {
    next_head_ = is_amd() && head + 1 < heads ? dim : 0;
    second_head_ = head + 2 < heads ? 2 * next_head_ : next_head_;
  }
  // Repeats, on AMD processors, the prefetch of what the next two heads read of a token; `from`
  // holds dim d of the current head. These processors drop prefetches while many are outstanding,
  // and the last tokens of a chunk were requested only just before. On Zen 4 attention from memory
  // takes 5 to 16 % less time, but over int8 with 4 or more rows the same; with all data in the
  // second-level cache it takes 2 to 20 % more (measured).
  QUIRE_INLINE void fetch_again(const E* from, int d) const {
    if (next_head_ == 0 || d % static_cast<int>(kLine / sizeof(E)) != 0) return;
    _mm_prefetch(reinterpret_cast<const char*>(from + next_head_), _MM_HINT_T1);
    _mm_prefetch(reinterpret_cast<const char*>(from + second_head_), _MM_HINT_T1);
  }

 private:
  static constexpr uintptr_t kLine = kCacheLineBytes;
  static constexpr uintptr_t kGap = 256;  // bridges the scales of an int8 cache, needed too

  struct Run {
    uintptr_t at, end;  // first line; one past the last byte
  };

  int next_head_ = 0, second_head_ = 0;  // in elements; 0: no such head
  uintptr_t at_ = 0, end_ = 0;
  const Run* next_;
  const Run* last_;
  Run runs_[kKeyBlock + 1];  // the first stays empty: `last` starts there
};

}  // namespace quire::attention
