// y = x Wᵀ + b with any arithmetic of linear/tile.h: blocks of rows, tiles, panels, threads.
#pragma once

#include <array>
#include <utility>

#include "linear/tile.h"
#include "linear/panel_parts.h"
#include "native/scratch.h"
#include "linear/staged_outputs.h"

namespace quire::linear {

// True for arithmetics that compute panels by a loop of their own, made by A::loop(block, x, y).
template <class A>
constexpr bool kLoops = false;

template <class A>
constexpr int64_t kLeastBlockRows = 4 * A::kRows;
// Most bytes of gathered rows that every thread copies for itself. That takes less time than to
// wait for the others and then to fetch what they copied.
constexpr int64_t kOwnBytes = 256 << 10;

// Multiplications per part of a panel (linear/panel_parts.h): about 10 µs by pairs, 20 by fma.
constexpr int64_t kWorkPerPart = 1 << 20;

struct Problem {
  int64_t rows;
  Outputs outputs;
  int64_t depth, x_stride;
  const float* bias;
  Team* team;
};

template <class A>
using Tile = void (*)(const typename A::X*, const typename A::W*, int64_t, Ahead<typename A::W>,
                      float*);
// kAll: tiles of so few rows that hardware may keep up with them prefetch too.
template <class A, bool kAll, std::size_t... I>
constexpr std::array<Tile<A>, A::kRows> tiles_of(std::index_sequence<I...>) {
  return {multiply_tile<A, I + 1, kAll || (I + 1 > A::kStreamedRows)>...};
}
template <class A, bool kAll>  // indexed by rows - 1
constexpr auto kTiles = tiles_of<A, kAll>(std::make_index_sequence<A::kRows>());

// Returns K rounded up to whole lines.
template <class A>
int64_t gathered_depth(int64_t depth) {
  return (depth + A::kLine - 1) / A::kLine * A::kLine;
}

// Gathers rows [0, rows) of x, line by line; `ahead` advances by its step with each line of a row.
template <class A, class E>
void gather_rows(const E* x, int64_t stride, int64_t depth, int rows, Ahead<typename A::W> ahead,
                 typename A::X* out) {
  for (int64_t k = 0; k < depth; k += A::kLine) {
    const int n = static_cast<int>(std::min<int64_t>(A::kLine, depth - k));
    for (int r = 0; r < rows; ++r, out += A::kLine, ahead.start += ahead.step) {
      _mm_prefetch(reinterpret_cast<const char*>(ahead.start), _MM_HINT_T1);
      A::put_line(x + r * stride + k, n, out);
    }
  }
}

// Stores one row of the columns of panel `index`: with bias, rounded, and the existing columns
// alone.
template <class E>
QUIRE_INLINE void put_columns(const Problem& problem, const float* sums, int64_t index, E* y) {
  int64_t output = problem.outputs.output(index), left = problem.outputs.columns(index);
  for (; left > 0; left -= kLanes, output += kLanes, sums += kLanes, y += kLanes) {
    const int n = static_cast<int>(std::min<int64_t>(kLanes, left));
    vf value = load(sums);
    if (problem.bias != nullptr) value = add(value, load_at_most(problem.bias + output, n));
    if (n == kLanes) {
      store(y, value);
    } else {
      store_part(y, value, n);
    }
  }
}

// Rows whose gathered x stays in the caches: tiles of `height` rows and one with the remainder.
template <class A>
struct Block {
  using X = typename A::X;
  const Problem& problem;
  const typename A::W* weight;
  int64_t height, num_tiles, num_panels;

  Block(const Problem& problem, const typename A::W* weight)
      : problem(problem), weight(weight), num_panels(problem.outputs.panels()) {
    const int64_t least = (problem.rows + A::kRows - 1) / A::kRows;
    height = (problem.rows + least - 1) / least;
    num_tiles = (problem.rows + height - 1) / height;
  }

  const typename A::W* panel(int64_t index) const {
    return weight + index * panel_elements(problem.depth);
  }
  int64_t tile_offset(int64_t t) const { return t * height * gathered_depth<A>(problem.depth); }
  int rows_of(int64_t t) const {
    return static_cast<int>(std::min(height, problem.rows - t * height));
  }

  // Gathers tile t of the rows of x. A step of 0 prefetches nothing new.
  template <class E>
  void gather(int64_t t, const E* x, Ahead<typename A::W> ahead, X* gathered) const {
    ahead.start += tile_offset(t) / A::kLine * ahead.step;
    gather_rows<A>(x + t * height * problem.x_stride, problem.x_stride, problem.depth, rows_of(t),
                   ahead, gathered + tile_offset(t));
  }

  // Returns the holder of a thread's outputs (linear/staged_outputs.h). y: outputs of all rows.
  template <class Out, class E>
  Out thread_outputs(E* y) const {
    const int64_t bytes = num_panels * panel_elements(problem.depth) * sizeof(typename A::W);
    return Out(problem.outputs, y, problem.rows, bytes / team_size(problem.team));
  }

  // Multiplies tile t by panel `index`.
  template <class Out>
  void multiply(const X* x, int64_t t, int64_t index, Ahead<typename A::W> ahead, Out& out) const {
    alignas(64) float sums[A::kRows * kWidth];
    const int rows = rows_of(t);
    const auto& tiles = hardware_keeps_up() ? kTiles<A, false> : kTiles<A, true>;
    tiles[rows - 1](x + tile_offset(t), panel(index), pairs_of(problem.depth), ahead, sums);
    auto* const columns = out.columns(index, t * height);
    put_panel<A::kRows>(problem.outputs, index, rows, columns, out.stride(),
                        [&](auto* row, int64_t stride) {
                          for (int64_t r = 0; r < rows; ++r, row += stride) {
                            put_columns(problem, sums + r * kWidth, index, row);
                          }
                        });
  }

  // Multiplies tiles [first, last) by one panel. A single tile reads the panel from memory and may
  // prefetch further. Several tiles find it in the caches, so the last tiles of the block prefetch
  // the next panel, each a piece.
  template <class Out>
  void multiply_panel(const X* x, int64_t index, int64_t first, int64_t last, Out& out) const {
    out.make_room(index, first * height, std::min(last * height, problem.rows));
    if (num_tiles == 1) return multiply(x, 0, index, further(index), out);
    int64_t pieces = std::max(1, kPairElements / kCacheLine<typename A::W>);
    while (pieces > num_tiles) pieces /= 2;
    const int64_t step = kPairElements / pieces;
    const auto* next = panel(std::min(index + 1, num_panels - 1));
    for (int64_t t = first; t < last; ++t) {
      const int64_t piece = t - (num_tiles - pieces);
      const auto* start = next + piece * step * pairs_of(problem.depth);
      multiply(x, t, index, {start, piece < 0 ? 0 : step}, out);
    }
  }

  Ahead<typename A::W> further(int64_t index) const {
    return {panel(index) + A::kAheadBytes / sizeof(typename A::W), kPairElements};
  }
};

// Multiplies all rows of a block by all panels. rows(weights) returns the gathered rows of a
// thread, null without memory for them; the thread will probably read these weights first. Out: see
// linear/staged_outputs.h.
template <class Out, class A, class Y, class Rows>
void multiply_block(const Block<A>& block, const Rows& rows, Y* y) {
  const Problem& problem = block.problem;
  const int64_t in_turn = problem.outputs.panels_in_turn(), threads = team_size(problem.team);
  const int64_t work = in_turn * kWidth * problem.rows * problem.depth;
  // Enough parts to give all threads work where there is enough, and to make the last parts short;
  // those of a loop are short anyway.
  const int64_t busy = threads == 1 ? 1 : 1 + (4 * threads * in_turn - 1) / block.num_panels;
  const int64_t least = std::min(busy, work / kWorkPerTask);
  const int64_t wanted = kLoops<A> ? least : std::max(least, work / kWorkPerPart);
  const PanelParts all(problem.outputs, block.num_tiles, wanted);
  const auto rows_for = [&](int64_t index) { return rows(block.panel(index)); };
  if constexpr (kLoops<A>) {
    struct Worker {
      const typename A::X* x;
      decltype(A::loop(block, x, y)) loop;
    };
    const auto enter = [&](int64_t index) {
      const auto* x = rows_for(index);
      return Worker{x, A::loop(block, x, y)};
    };
    all.share(work, problem.team, enter,
              [&](int64_t index, int64_t first, int64_t last, Worker& worker) {
                if (worker.x != nullptr) worker.loop.multiply(index, first, last);
              });
  } else {
    struct Worker {
      const typename A::X* x;
      Out out;
    };
    const auto enter = [&](int64_t index) {
      return Worker{rows_for(index), block.template thread_outputs<Out>(y)};
    };
    all.share(work, problem.team, enter,
              [&](int64_t index, int64_t first, int64_t last, Worker& worker) {
                if (worker.x == nullptr) return;
                block.multiply_panel(worker.x, index, first, last, worker.out);
              });
  }
}

// Returns 0, or 2 without memory for scratch.
template <class Out, class A, class E, class Y>
int multiply_into(const Problem& problem, const E* x, const typename A::W* weight, Y* y) {
  using X = typename A::X;
  static_assert(Out::kWait || !kLoops<A>);  // for Out::kMostRows, which a loop relies on
  if (problem.rows == 0) return 0;
  struct Gathered;
  const int64_t depth = gathered_depth<A>(problem.depth), row_bytes = depth * sizeof(X);
  constexpr int64_t kMost = Out::kMostRows / A::kRows * A::kRows;  // whole tiles
  if (problem.rows * row_bytes <= kOwnBytes && problem.rows <= kMost) {
    const Block<A> block(problem, weight);
    std::atomic<bool> failed{false};
    const auto own_rows = [&](const typename A::W* weights) {
      X* own = static_cast<X*>(thread_scratch<Gathered>(problem.rows * row_bytes + A::kBeyond));
      if (own == nullptr) failed.store(true, std::memory_order_relaxed);
      for (int64_t t = 0; t < block.num_tiles && own != nullptr; ++t) {
        block.gather(t, x, {weights, kCacheLine<typename A::W>}, own);
      }
      return own;
    };
    multiply_block<Out>(block, own_rows, y);
    return failed.load(std::memory_order_relaxed) ? 2 : 0;
  }
  const int64_t fitting = std::clamp(A::kBlockBytes / (row_bytes + 1), kLeastBlockRows<A>, kMost);
  const int64_t blocks = (problem.rows + fitting - 1) / fitting;
  const int64_t even = (problem.rows + blocks - 1) / blocks;  // the last is not much smaller
  const int64_t most = std::min(problem.rows, (even + A::kRows - 1) / A::kRows * A::kRows);
  X* gathered = static_cast<X*>(thread_scratch<Gathered>(most * row_bytes + A::kBeyond));
  if (gathered == nullptr) return 2;
  for (int64_t first = 0; first < problem.rows; first += most) {
    Problem part = problem;
    part.rows = std::min(most, problem.rows - first);
    const Block<A> block(part, weight);
    const E* rows = x + first * problem.x_stride;
    const int64_t grain = kWorkPerTask / 8 / (block.height * depth + 1) + 1;
    parallel_for(block.num_tiles, grain, problem.team, [&](int64_t t) {
      block.gather(t, rows, {weight, 0}, gathered);
    });
    multiply_block<Out>(
        block, [&](const typename A::W*) { return gathered; },
        y + first * problem.outputs.stride());
  }
  return 0;
}

template <class A, class E, class Y>
int multiply(const Problem& problem, const E* x, const typename A::W* weight, Y* y) {
  if constexpr (kLoops<A>) {
    return multiply_into<StagedOutputs<Y>, A>(problem, x, weight, y);
  } else if (pays_to_wait()) {
    return multiply_into<StagedOutputs<Y>, A>(problem, x, weight, y);
  } else {
    return multiply_into<DirectOutputs<Y>, A>(problem, x, weight, y);
  }
}

}  // namespace quire::linear
