// Products with tile registers: AMX, Intel SDM volume 1 chapter 18, instructions in volume 2.
//
// A step multiplies 64 bytes of each of at most 32 rows of x by 16 lines of a panel. A line is 4
// bytes of every column: two bf16 or four 8-bit integers. Registers 0 and 1 hold the sums of rows 0
// … 15 with columns 0 … 15 and 16 … 31, registers 2 and 3 those of rows 16 … 31. Registers 4 and 5
// hold the rows of x, 6 and 7 the columns of the panel.
//
// An output is one chain over the steps, whatever the number of rows. An instruction skips rows
// that its registers are not configured for, so a row does not depend on those beside it.
#pragma once

#if defined(__AMX_TILE__)

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "linear/panels.h"

namespace quire {

constexpr int kTileRows = 16, kTileBytes = 64;  // rows and bytes of a register
constexpr int kStepRows = 2 * kTileRows;        // rows of x in a step
constexpr int kStepLines = kTileRows;           // lines of a panel in a step
constexpr int kLineBytes = 4 * kWidth;
// A tile with fewer rows than the registers are configured for also reads the missing rows, past
// its own. Their sums are never used.
constexpr int64_t kBeyondTile = (kStepRows - 1) * kTileBytes;

// Keeps memory accesses on their side of this: the compiler assumes that tile loads read no memory.
QUIRE_INLINE void order_memory() { asm volatile("" ::: "memory"); }

// Rows of each register, and bytes of such a row.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int64_t count, int64_t bytes) {
    rows[tile] = static_cast<uint8_t>(count);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
  void load() const {
    order_memory();
    _tile_loadconfig(this);
    order_memory();
  }
};

// Configures the registers of this thread for `rows` rows of x, and releases them at the end.
class Tiles {
 public:
  explicit Tiles(int64_t rows) {
    TileShapes shapes;
    const int64_t upper = std::min<int64_t>(rows, kTileRows), lower = rows - upper;
    // Without rows a register has no bytes either: it is not used.
    for (const int tile : {0, 1, 4}) shapes.set(tile, upper, upper == 0 ? 0 : kTileBytes);
    for (const int tile : {2, 3, 5}) shapes.set(tile, lower, lower == 0 ? 0 : kTileBytes);
    for (const int tile : {6, 7}) shapes.set(tile, kStepLines, kTileBytes);
    shapes.load();
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// Instructions of a step, which take the numbers of registers as literals.
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

}  // namespace quire

#endif
