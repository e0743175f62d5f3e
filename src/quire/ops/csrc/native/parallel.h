// Loops whose iterations a team of threads shares.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "native/team.h"

namespace quire {

inline int team_size(const Team* team) { return team == nullptr ? 1 : team->size(); }

// Calls body(i) once for each 0 <= i < count, in no order. Threads take `grain` indices at a time.
// team: null for the caller alone. The result of enter() lives in each thread while it works on the
// loop.
template <class F, class Enter>
void parallel_for(int64_t count, int64_t grain, Team* team, F&& body, Enter&& enter) {
  if (team == nullptr || count <= grain) {
    [[maybe_unused]] const auto& entered = enter();
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  std::atomic<int64_t> next{0};
  auto share = [&] {
    [[maybe_unused]] const auto& entered = enter();
    for (;;) {
      const int64_t first = next.fetch_add(grain, std::memory_order_relaxed);
      if (first >= count) return;
      const int64_t last = first + grain < count ? first + grain : count;
      for (int64_t i = first; i < last; ++i) body(i);
    }
  };
  team->run([](void* context) { (*static_cast<decltype(share)*>(context))(); }, &share);
}

template <class F>
void parallel_for(int64_t count, int64_t grain, Team* team, F&& body) {
  parallel_for(count, grain, team, body, [] { return 0; });
}

// Number of indices that a thread takes at a time: `few` of the last 2 · many of a range, so that
// no thread waits long for another, and `many` before. If `few` is 1, the indices taken at once lie
// between two adjacent multiples of `many`.
struct Grain {
  int64_t many, few;
};

// Calls body(first, last, needed) for index ranges [first, last) that cover all indices once.
// Unlike in parallel_for, every thread takes adjacent indices: it starts in a range of its own and
// goes on in those of the others when that is empty. enter(first) makes what a thread needs,
// `first` being the index it will probably start with; body receives it as `needed`.
template <class F, class Enter>
void parallel_ranges_of(int64_t count, Grain grain, Team* team, F&& body, Enter&& enter) {
  if (team == nullptr || count <= grain.few) {
    auto&& needed = enter(0);
    body(0, count, needed);
    return;
  }
  constexpr int64_t kMost = 64;
  struct alignas(64) Range {
    std::atomic<int64_t> next;
    int64_t end;
  };
  Range ranges[kMost];
  const int64_t size = std::min<int64_t>(team_size(team), kMost);
  const int64_t whole = grain.few < grain.many ? grain.many : 1;
  const int64_t wholes = count / whole;
  for (int64_t i = 0, start = 0; i < size; ++i) {
    const int64_t end = i + 1 < size ? (i + 1) * wholes / size * whole : count;
    ranges[i].next.store(start, std::memory_order_relaxed);
    ranges[i].end = end;
    start = end;
  }
  std::atomic<int64_t> entrants{0};
  auto share = [&] {
    const int64_t own = entrants.fetch_add(1, std::memory_order_relaxed) % size;
    const auto range_at = [&](int64_t i) -> Range& { return ranges[(own + i) % size]; };
    int64_t at = 0;
    while (range_at(at).next.load(std::memory_order_relaxed) >= range_at(at).end) {
      if (++at == size) return;  // late: return before enter(), which may be long
    }
    auto&& needed = enter(range_at(at).next.load(std::memory_order_relaxed));
    for (; at < size; ++at) {
      Range& range = range_at(at);
      int64_t first = range.next.load(std::memory_order_relaxed);
      while (first < range.end) {
        const int64_t left = range.end - first;
        const int64_t last = first + std::min(left, left > 2 * grain.many ? grain.many : grain.few);
        if (range.next.compare_exchange_weak(first, last, std::memory_order_relaxed)) {
          body(first, last, needed);
          first = range.next.load(std::memory_order_relaxed);
        }
      }
    }
  };
  team->run([](void* context) { (*static_cast<decltype(share)*>(context))(); }, &share);
}

// Calls body(i) index by index, for threads that need nothing.
template <class F>
void parallel_ranges(int64_t count, int64_t grain, Team* team, F&& body) {
  const auto each = [&](int64_t first, int64_t last, int) {
    for (int64_t i = first; i < last; ++i) body(i);
  };
  parallel_ranges_of(count, {grain, grain}, team, each, [](int64_t) { return 0; });
}

}  // namespace quire
