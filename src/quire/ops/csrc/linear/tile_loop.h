// Products of tiles of x and panels in tile registers, one after the other in one thread.
//
// The sums of a tile wait in memory. They become outputs row by row between the steps of the next
// tile, while the tile unit computes (measured: a tenth less time than at the end of their own
// tile).
#pragma once

#include "linear/staged_outputs.h"
#include "linear/tiles.h"

#if defined(__AMX_TILE__)

namespace quire {

// Bytes of x that stay in the second-level cache (2 MiB) while all weights are read. Measured: 1 to
// 2 MiB are nearly alike; less, or 3 MiB at 1,024 rows, takes longer.
constexpr int64_t kTileBlockBytes = 3 << 19;

// Rows of one tile. x: step after step, kTileBytes of each row, padded with zeros, then kBeyondTile
// readable bytes. first: index of the first row in the block.
struct TileRows {
  const void* x;
  int64_t first;
  int rows;
};

// Job provides Products (linear/tiles.h); Output; threads(), which share the panels; tile(t), a
// TileRows; panel(index) and its lines(); outputs(); and put(row, index, sums, to), which stores
// kWidth outputs made of as many 32-bit sums.
template <class Job>
class TileLoop {
 public:
  using Y = typename Job::Output;

  // y: outputs of all `rows`. height: rows of the highest tile.
  TileLoop(const Job& job, Y* y, int64_t rows, int64_t height)
      : job_(job),
        tiles_(height),
        staged_(job.outputs(), y, rows, thread_bytes(job)) {}
  ~TileLoop() { put_rows(kStepRows); }
  TileLoop(const TileLoop&) = delete;
  TileLoop& operator=(const TileLoop&) = delete;

  // Multiplies tiles [first, last) by panel `index`. A single tile reads the panel from memory and
  // prefetches further (except where threads share the tiles of few panels). Several tiles find it
  // in the caches and have time to prefetch the next one.
  void multiply(int64_t index, int64_t first, int64_t last) {
    const int64_t bytes = job_.lines() * kLineBytes, tiles = last - first;
    const int64_t distance = tiles == 1 ? ahead_bytes() : bytes;
    ahead_ = reinterpret_cast<const char*>(job_.panel(index)) + distance;
    ahead_end_ = ahead_ + bytes;
    step_lines_ = static_cast<int>((kStepLines * kLineBytes / kTileBytes + tiles - 1) / tiles);
    const TileRows highest = job_.tile(last - 1);
    const int64_t first_row = job_.tile(first).first, last_row = highest.first + highest.rows;
    if (!staged_.takes(index, first_row, last_row)) put_rows(kStepRows);
    staged_.make_room(index, first_row, last_row);
    for (int64_t t = first; t < last; ++t) {
      const TileRows tile = job_.tile(t);
      const auto* x = static_cast<const uint8_t*>(tile.x);
      const auto* panel = reinterpret_cast<const uint8_t*>(job_.panel(index));
      const bool lower = tile.rows > kTileRows;
      const auto sum = tiles == 1 ? lower ? &TileLoop::add<true, true> : &TileLoop::add<false, true>
                       : lower    ? &TileLoop::add<true, false>
                                  : &TileLoop::add<false, false>;
      (this->*sum)(x, tile.rows, panel);
      index_ = index;
      first_row_ = tile.first;
      to_ = staged_.columns(index, tile.first);
      row_ = 0;
      rows_ = tile.rows;
    }
  }

 private:
  static int64_t thread_bytes(const Job& job) {
    return job.outputs().panels() * job.lines() * kLineBytes / job.threads();
  }

  // kOnce: the tile is alone, so that the panel is hardly needed again.
  template <bool kLower, bool kOnce>
  [[gnu::noinline]] void add(const uint8_t* x, int rows, const uint8_t* panel) {
    int64_t lines = job_.lines();
    const int64_t steps = (lines + kStepLines - 1) / kStepLines;
    const int64_t puts = steps == 0 ? 0 : (rows_ - row_ + steps - 1) / steps;
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kLower) {
      _tile_zero(2);
      _tile_zero(3);
    }
    order_memory();
    for (; lines >= kStepLines; lines -= kStepLines) {
      add_step<kLower, kOnce>(x, panel);
      put_rows(puts);
      x += rows * kTileBytes;
      panel += kStepLines * kLineBytes;
    }
    if (lines > 0) {  // zeros after the last line, not the bytes behind the panel
      alignas(64) uint8_t rest[kStepLines * kLineBytes] = {};
      std::memcpy(rest, panel, lines * kLineBytes);
      order_memory();
      add_step<kLower, kOnce>(x, rest);
      order_memory();
    }
    put_rows(kStepRows);
    order_memory();
    _tile_stored(0, sums_, kLineBytes);
    _tile_stored(1, sums_ + kTileBytes, kLineBytes);
    if constexpr (kLower) {
      _tile_stored(3, sums_ + kTileRows * kLineBytes + kTileBytes, kLineBytes);
      _tile_stored(2, sums_ + kTileRows * kLineBytes, kLineBytes);
    }
    order_memory();
  }

  // Consecutive products share an operand, and what is loaded last is needed last: measured, a
  // tenth less time than with each product after its own loads. A panel needed once leaves the
  // first-level cache to x: with one row that takes 2 to 6 % less time, with 32 rows up to 3 %.
  template <bool kLower, bool kOnce>
  QUIRE_INLINE void add_step(const uint8_t* x, const uint8_t* panel) {
    const int lines = ahead_ < ahead_end_ ? step_lines_ : 0;
    const char* from = ahead_;
    ahead_ += lines * kTileBytes;
    const auto fetch = [&](int first) __attribute__((always_inline)) {
      for (int line = first; line < lines; line += 4) {
        _mm_prefetch(from + line * kTileBytes, _MM_HINT_T1);
      }
    };
    fetch(0);
    _tile_loadd(4, x, kTileBytes);
    fetch(1);
    if constexpr (kOnce) {
      _tile_stream_loadd(6, panel, kLineBytes);
      fetch(2);
      _tile_stream_loadd(7, panel + kTileBytes, kLineBytes);
    } else {
      _tile_loadd(6, panel, kLineBytes);
      fetch(2);
      _tile_loadd(7, panel + kTileBytes, kLineBytes);
    }
    fetch(3);
    if constexpr (kLower) _tile_loadd(5, x + kTileRows * kTileBytes, kTileBytes);
    Job::Products::add_upper();
    if constexpr (kLower) Job::Products::add_lower();
  }

  QUIRE_INLINE void put_rows(int64_t count) {
    for (; count > 0 && row_ < rows_; --count, ++row_, to_ += staged_.stride()) {
      const int64_t row = first_row_ + row_;
      const uint8_t* sums = sums_ + row_ * kLineBytes;
      put_panel<1>(job_.outputs(), index_, 1, to_, kWidth,
                   [&](Y* to, int64_t) { job_.put(row, index_, sums, to); });
    }
  }

  const Job job_;
  const Tiles tiles_;
  const char *ahead_ = nullptr, *ahead_end_ = nullptr;
  int step_lines_ = 0;  // cache lines to prefetch per step
  // State of the tile that waits: its panel, its first row, the next row, and the place of its
  // outputs.
  int64_t index_ = 0, first_row_ = 0;
  int row_ = 0, rows_ = 0;
  Y* to_ = nullptr;
  alignas(64) uint8_t sums_[kStepRows * kLineBytes];
  StagedOutputs<Y> staged_;
};

}  // namespace quire

#endif
