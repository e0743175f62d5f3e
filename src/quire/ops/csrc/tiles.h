// Products by tile registers: AMX, Intel SDM volume 1 chapter 18, instructions in volume 2.
//
// A step multiplies 64 bytes of each of at most 32 rows of x by 16 lines of a panel; a line is 4
// bytes of every column: two bf16 or four 8-bit integers. Registers 0 to 3 hold the sums of
// (rows 0 … 15, columns 0 … 15), (same, 16 … 31), (rows 16 … 31, columns 0 … 15), (same, 16 … 31);
// 4 and 5 hold the rows of x, 6 and 7 the columns of the panel.
//
// An output is one chain over the steps, whatever the number of rows. An instruction leaves out rows
// that its registers are not configured for, so a row does not depend on those beside it.
#pragma once

#if defined(__AMX_TILE__)

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "panels.h"

namespace quire {

constexpr int kTileRows = 16, kTileBytes = 64;  // of a register
constexpr int kStepRows = 2 * kTileRows;        // of x
constexpr int kStepLines = kTileRows;           // of a panel
constexpr int kLineBytes = 4 * kWidth;
// A tile with fewer rows than the registers are configured for reads as many rows further on, and
// nobody reads their sums.
constexpr int64_t kBeyondTile = (kStepRows - 1) * kTileBytes;

// To the compiler tile loads read no memory. What is written stays on its side of this.
QUIRE_INLINE void order_memory() { asm volatile("" ::: "memory"); }

// The registers of this thread, configured for `rows` rows of x, free again at the end.
class Tiles {
 public:
  explicit Tiles(int64_t rows) {
    Configuration all;
    const auto upper = static_cast<uint8_t>(std::min<int64_t>(rows, kTileRows));
    const auto lower = static_cast<uint8_t>(rows - upper);
    for (const int tile : {0, 1, 4}) all.set(tile, upper);
    for (const int tile : {2, 3, 5}) all.set(tile, lower);
    for (const int tile : {6, 7}) all.set(tile, kStepLines);
    order_memory();
    _tile_loadconfig(&all);
    order_memory();
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

 private:
  struct alignas(64) Configuration {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, uint8_t count) {  // no rows mean no bytes either: the register is not used
      rows[tile] = count;
      row_bytes[tile] = count == 0 ? 0 : kTileBytes;
    }
  };
};

// The instructions of a step. They take the numbers of registers as literals.
#if defined(__AMX_BF16__)
struct Bf16Products {
  QUIRE_INLINE static void add_upper() {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
  }
  QUIRE_INLINE static void add_lower() {
    _tile_dpbf16ps(3, 5, 7);
    _tile_dpbf16ps(2, 5, 6);
  }
};
#endif
#if defined(__AMX_INT8__)
struct Int8Products {  // signed x, unsigned weights
  QUIRE_INLINE static void add_upper() {
    _tile_dpbsud(0, 4, 6);
    _tile_dpbsud(1, 4, 7);
  }
  QUIRE_INLINE static void add_lower() {
    _tile_dpbsud(3, 5, 7);
    _tile_dpbsud(2, 5, 6);
  }
};
#endif

template <class Products, bool kLower>
QUIRE_INLINE void add_step(const void* x, const void* panel) {
  _tile_loadd(6, panel, kLineBytes);
  _tile_loadd(7, static_cast<const uint8_t*>(panel) + kTileBytes, kLineBytes);
  _tile_loadd(4, x, kTileBytes);
  Products::add_upper();
  if constexpr (kLower) {
    _tile_loadd(5, static_cast<const uint8_t*>(x) + kTileRows * kTileBytes, kTileBytes);
    Products::add_lower();
  }
}

// x: step after step, kTileBytes of each row, filled up with zeros, and kBeyondTile readable bytes
// after them. ahead: memory to fetch into the second-level cache meanwhile, `ahead_bytes` for each
// line. out: 32-bit sums [kStepRows, kWidth], of which `rows` are meant. kLower: whether there are
// more than kTileRows rows.
template <class Products, bool kLower>
[[gnu::noinline]] void multiply_tiles(const void* x, int rows, const void* panel, int64_t lines,
                                      const void* ahead, int64_t ahead_bytes, void* out) {
  const auto* values = static_cast<const uint8_t*>(x);
  const auto* line = static_cast<const uint8_t*>(panel);
  const auto* fetched = static_cast<const char*>(ahead);
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kLower) {
    _tile_zero(2);
    _tile_zero(3);
  }
  order_memory();
  for (; lines >= kStepLines; lines -= kStepLines) {
    for (int64_t byte = 0; byte < kStepLines * ahead_bytes; byte += 64) {
      _mm_prefetch(fetched + byte, _MM_HINT_T1);
    }
    fetched += kStepLines * ahead_bytes;
    add_step<Products, kLower>(values, line);
    values += rows * kTileBytes;
    line += kStepLines * kLineBytes;
  }
  if (lines > 0) {  // zeros after the last line, not what lies behind the panel
    alignas(64) uint8_t rest[kStepLines * kLineBytes] = {};
    std::memcpy(rest, line, lines * kLineBytes);
    order_memory();
    add_step<Products, kLower>(values, rest);
    order_memory();
  }
  auto* sums = static_cast<uint8_t*>(out);
  _tile_stored(0, sums, kLineBytes);
  _tile_stored(1, sums + kTileBytes, kLineBytes);
  if constexpr (kLower) {
    sums += kTileRows * kLineBytes;
    _tile_stored(2, sums, kLineBytes);
    _tile_stored(3, sums + kTileBytes, kLineBytes);
  }
}

}  // namespace quire

#endif
