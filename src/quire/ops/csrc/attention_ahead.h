// Memory that attention fetches ahead of its use.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention_keys.h"

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

 private:
  static constexpr uintptr_t kLine = kCacheLineBytes;
  static constexpr uintptr_t kGap = 256;  // scales between the rows of an int8 cache are needed too

  struct Run {
    uintptr_t at, end;  // of its first line; behind its last byte
  };

  uintptr_t at_ = 0, end_ = 0;
  const Run* next_;
  const Run* last_;
  Run runs_[kKeyBlock + 1];  // from the second on: `last` begins at the first
};

}  // namespace quire::attention
