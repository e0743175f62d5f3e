// Memory that attention fetches ahead of its use.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/keys.h"
#include "native/vendor.h"

namespace quire::attention {

constexpr int kCacheLineBytes = 64;  // of the caches

// Prefetches rows of `width` elements in the order of their addresses, as much as it is asked for:
// little at a time, since a burst keeps what is in use waiting. Into the second-level cache:
// the few miss buffers of the first are for what is in use. Which rows lie side by side is found
// out beforehand, so that little is left for the loops of products: a call would push their sums
// into memory, and few registers are free.
template <class E>
class Ahead {
 public:
  // rows: the addresses of `count` rows, at most kKeyBlock.
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

  // As many lines as so many elements take; the last line again where rows side by side end before.
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

  // Whose turn it is to read what the Ahead before this one has fetched: the heads' of a chunk,
  // each `dim` elements of every token.
  void give_turn(int head, int heads, int dim) {
    next_head_ = is_amd() && head + 1 < heads ? dim : 0;
    second_head_ = head + 2 < heads ? 2 * next_head_ : next_head_;
  }
  // Asks AMD's processors once more for what the two heads after the present one read of a token,
  // whose dim d of the present one lies at `from`: they drop what they are asked for when too much
  // is under way, and the last tokens of a chunk were asked for only just before. A Zen 4 takes 5
  // to 16 % less time from memory, over int8 with 4 and more rows as much as before; where all lies
  // in its second-level cache, 2 to 20 % more (measured).
  QUIRE_INLINE void fetch_again(const E* from, int d) const {
    if (next_head_ == 0 || d % static_cast<int>(kLine / sizeof(E)) != 0) return;
    _mm_prefetch(reinterpret_cast<const char*>(from + next_head_), _MM_HINT_T1);
    _mm_prefetch(reinterpret_cast<const char*>(from + second_head_), _MM_HINT_T1);
  }

 private:
  static constexpr uintptr_t kLine = kCacheLineBytes;
  static constexpr uintptr_t kGap = 256;  // scales between the rows of an int8 cache are needed too

  struct Run {
    uintptr_t at, end;  // of its first line; behind its last byte
  };

  int next_head_ = 0, second_head_ = 0;  // elements further; 0: there is none
  uintptr_t at_ = 0, end_ = 0;
  const Run* next_;
  const Run* last_;
  Run runs_[kKeyBlock + 1];  // from the second on: `last` begins at the first
};

}  // namespace quire::attention
