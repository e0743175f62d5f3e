// y = x Wᵀ + b with integer weights: the part that all formats share. Rows of x become 8-bit
// integers: a few rows in every thread, many rows once for all. A format multiplies a tile of rows
// by panels of kWidth output columns. The sums are scaled and stored here.
//
// Every output is a function of its row and its column alone: integers are exact, and the float32
// operations after them have one order. So the bits do not depend on rows, panels, threads or
// instruction set.
#pragma once

#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>

#include "linear/integers/int_rows.h"
#include "linear/panel_parts.h"
#include "native/scratch.h"
#include "linear/staged_outputs.h"

namespace quire::linear_int {

constexpr int64_t kCacheLine = 64;
// Multiplications per part of a panel (linear/panel_parts.h): about 10 µs with VNNI.
constexpr int64_t kWorkPerPart = 1 << 21;
// Most elements of x that every thread quantizes for itself, prefetching its first weights
// meanwhile.
constexpr int64_t kOwnElements = 1 << 14;

// Use of the sums of a tile: outputs; or, for part of the inputs, float32 sums times the scales of
// the outputs, or unscaled integers, each in the place of a float32.
enum class Sums { kOutputs, kScaled, kIntegers };

// scale, bias: per output, padded to the end of the last panel; bias may be null. largest: largest
// magnitude of each whole row where x is only part of the rows, else null. rotation: inputs of a
// block that is rotated before it is quantized, 1 for none.
struct LinearCall {
  int64_t rows;
  Outputs outputs;
  int64_t depth, x_stride;
  const float* scale;
  const float* bias;
  Team* team;
  const float* largest = nullptr;
  Sums sums = Sums::kOutputs;
  int64_t rotation = 1;

  // Returns `largest` from row `first` on.
  const float* largest_from(int64_t first) const {
    return largest == nullptr ? nullptr : largest + first;
  }
};

// Stores at most n elements.
template <class E>
QUIRE_INLINE void put(E* y, vf value, int64_t n) {
  if (n >= kLanes) {
    store(y, value);
  } else if (n > 0) {
    store_part(y, value, static_cast<int>(n));
  }
}

// Stores at most n elements of the columns of a panel.
template <class E>
QUIRE_INLINE void put_pair(E* y, vf low, vf high, int64_t n) {
  if (n >= kWidth) {
    store_pair(y, low, high);
  } else {
    put(y, low, n);
    put(y + kLanes, high, n - kLanes);
  }
}

// Common part of the formats in vector registers; a format in tile registers defines these itself.
// Rows are stored line by line: 8 quads of integers of every row, then the next 8 of every row, and
// so on. So a tile reads them at constant distances.
struct Vectors {
  static constexpr int kLineQuads = 8;
  static constexpr int kQuadInputs = 1;  // numbers of 32 bits per quad
  static constexpr bool kGroupScales = false;  // groups of a row have a scale each
  static constexpr bool kWholePanels = false;  // a format computes all tiles of a panel itself
  // Tiles of up to kStreamedRows rows prefetch nothing where hardware_keeps_up(). Tiles of more
  // rows, up to kSparseRows, then prefetch one line in four and must do so by fetch_lines().
  static constexpr int kStreamedRows = 0, kSparseRows = 0;
  static constexpr int64_t kBeyond = 0;  // bytes that a tile may read past its inputs
  // Returns the index of a quad of row r among those of `rows` rows.
  static int64_t position(int64_t quad, int64_t r, int64_t rows) {
    return (quad / kLineQuads * rows + r) * kLineQuads + quad % kLineQuads;
  }
  // Makes what lives in a thread while it computes tiles of at most `rows` rows.
  static int enter(int64_t) { return 0; }
};

// Memory to prefetch into the second-level cache. A tile fetches `step` bytes, at most a cache
// line, per cache line of its panel.
struct Ahead {
  const uint8_t* start;
  int64_t step;

  QUIRE_INLINE void fetch_line() {
    _mm_prefetch(start, _MM_HINT_T1);
    start += step;
  }
  template <int kLines>
  QUIRE_INLINE void fetch_lines() {
    QUIRE_UNROLL
    for (int line = 0; line < kLines; ++line) fetch_line();
  }
};
// Ahead in whole lines, of which every fourth is fetched. The address tells which, so that nothing
// has to be counted.
struct SomeAhead {
  const uint8_t* start;

  template <int kLines>
  QUIRE_INLINE void fetch_lines() {
    static_assert(4 % kLines == 0);
    constexpr uintptr_t kEvery = 4 * kCacheLine;
    if (reinterpret_cast<uintptr_t>(start) % kEvery < kLines * kCacheLine) {
      _mm_prefetch(start, _MM_HINT_T1);
    }
    start += kLines * kCacheLine;
  }
};
struct NothingAhead {
  QUIRE_INLINE void fetch_line() const {}
  template <int>
  QUIRE_INLINE void fetch_lines() const {}
};

// Returns the sum of a group times its scale in a row.
QUIRE_INLINE vf scaled_sum(vi sum, const int32_t* x_scale) {
  return mul(to_float(sum), float_of(set1_int(*x_scale)));
}

// Calls f(row, half) for every vector of a tile's sums.
template <int R, class F>
QUIRE_INLINE void each_sum(F&& f) {
  QUIRE_UNROLL
  for (int r = 0; r < R; ++r) {
    f(r, 0);
    f(r, 1);
  }
}
// Returns the position of a vector of sums in the result of a tile, [R, kWidth].
QUIRE_INLINE int place(int r, int half) { return r * kWidth + half * kLanes; }

// Stores sums of part of the inputs, with the arguments of put_tile().
template <class Y>
[[gnu::noinline]] void put_partial(const LinearCall& call, const QuantizedRows& rows,
                                   const float* sums, int64_t index, Y* y, int64_t stride) {
  const int64_t output = call.outputs.output(index), left = call.outputs.columns(index);
  const bool scaled = call.sums == Sums::kScaled;
  for (int64_t r = 0; r < rows.rows; ++r, sums += kWidth, y += stride) {
    vf value[2] = {load(sums), load(sums + kLanes)};
    for (int half = 0; scaled && half < 2; ++half) {
      value[half] = mul(value[half], load(call.scale + output + half * kLanes));
    }
    put_pair(y, value[0], value[1], left);
  }
}

// Stores the sums of a tile, [rows, kWidth], for panel `index`: scaled, with bias, rounded, and the
// existing columns alone. y: rows of these columns with a stride.
template <class Y>
void put_tile(const LinearCall& call, const QuantizedRows& rows, const float* sums, int64_t index,
              Y* y, int64_t stride) {
  if constexpr (std::is_same_v<Y, float>) {
    if (call.sums != Sums::kOutputs) return put_partial(call, rows, sums, index, y, stride);
  }
  const int64_t output = call.outputs.output(index), left = call.outputs.columns(index);
  const vf scale[2] = {load(call.scale + output), load(call.scale + output + kLanes)};
  for (int64_t r = 0; r < rows.rows; ++r, sums += kWidth, y += stride) {
    const vf row_scale = set1(rows.scales[r]);
    vf value[2];
    for (int half = 0; half < 2; ++half) {
      value[half] = mul(mul(load(sums + half * kLanes), row_scale), scale[half]);
      if (call.bias != nullptr) {
        value[half] = add(value[half], load(call.bias + output + half * kLanes));
      }
    }
    put_pair(y, value[0], value[1], left);
  }
}

// Share of the memory ahead that a tile prefetches.
enum class Fetch { kNothing, kSome, kAll };

// everything: fetch all whatever the number of rows, as where hardware does not keep up.
template <class Format>
constexpr Fetch fetch_of(int rows, bool everything) {
  if (everything) return Fetch::kAll;
  if (rows <= Format::kStreamedRows) return Fetch::kNothing;
  return rows <= Format::kSparseRows ? Fetch::kSome : Fetch::kAll;
}

// Returns the prefetch of a tile of R rows. Row counts that only a single tile has fetch whole
// lines, a step that the compiler can know.
template <class Format, int R, Fetch kFetch>
QUIRE_INLINE auto ahead_of_tile(Ahead ahead) {
  constexpr bool kSingle = 2 * R < Format::kMaxRows;
  if constexpr (kFetch == Fetch::kNothing) {
    return NothingAhead{};
  } else if constexpr (kFetch == Fetch::kSome) {
    static_assert(kSingle);
    return SomeAhead{ahead.start};
  } else {
    return Ahead{ahead.start, kSingle ? kCacheLine : ahead.step};
  }
}

// out: [rows, kWidth].
template <class Format>
using Tile = void (*)(const Format&, const QuantizedRows&, const uint8_t* panel, Ahead ahead,
                      float* out, int64_t index);
template <class Format, bool kEverything, std::size_t... I>
constexpr std::array<Tile<Format>, Format::kMaxRows> tiles_of(std::index_sequence<I...>) {
  return {Format::template tile<I + 1, fetch_of<Format>(I + 1, kEverything)>...};
}
template <class Format, bool kEverything>  // indexed by rows - 1; kEverything: see fetch_of()
constexpr auto kTiles = tiles_of<Format, kEverything>(std::make_index_sequence<Format::kMaxRows>());

// True for formats that compute panels by a loop of their own, made by Format::loop(block).
template <class Format>
constexpr bool kLoops = false;

// Panels as the tiles of a thread read them. Keeps the last panel that had to be opened, of a gated
// layer the last pair.
template <class Format>
class OpenPanels {
 public:
  // Returns null without memory.
  const uint8_t* open(const Format& format, const Outputs& outputs, int64_t index) {
    if constexpr (!Format::kOpens) {
      return format.panel(index);
    } else {
      const int64_t bytes = format.open_bytes(), place = outputs.is_second(index);
      if (memory_ == nullptr) {
        memory_ = static_cast<uint8_t*>(
            thread_scratch<OpenPanels>(outputs.panels_in_turn() * bytes));
        if (memory_ == nullptr) return nullptr;
      }
      uint8_t* const panel = memory_ + place * bytes;
      if (indices_[place] != index) format.open(index, panel);
      indices_[place] = index;
      return panel;
    }
  }

 private:
  uint8_t* memory_ = nullptr;
  int64_t indices_[2] = {-1, -1};
};

// Up to block_rows_of(format) quantized rows in the fewest tiles, of nearly equal height.
template <class Format, class Y>
struct Block {
  const Format& format;
  const LinearCall& call;
  const QuantizedRows x;
  Y* y;
  std::atomic<bool>& out_of_memory;
  int64_t num_tiles, num_panels;

  Block(const Format& format, const LinearCall& call, QuantizedRows x, Y* y,
        std::atomic<bool>& out_of_memory)
      : format(format), call(call), x(x), y(y), out_of_memory(out_of_memory),
        num_tiles((call.rows + Format::kMaxRows - 1) / Format::kMaxRows),
        num_panels(call.outputs.panels()) {}

  int64_t height() const { return (call.rows + num_tiles - 1) / num_tiles; }
  int64_t first_row(int64_t t) const { return t * call.rows / num_tiles; }
  QuantizedRows tile_rows(int64_t t) const {
    const int64_t first = first_row(t);
    return {x.inputs + first * format.inputs_per_row, x.sums + first * format.sums_per_row,
            x.scales + first, first_row(t + 1) - first};
  }

  // Multiplies tiles [first, last) by a panel; all tiles where a format computes whole panels. A
  // single tile reads the panel from memory and may prefetch further. Several tiles find it in the
  // caches, so the last tiles of the block prefetch the next panel, each a piece.
  template <class Out>
  void multiply_panel(int64_t index, int64_t first, int64_t last, OpenPanels<Format>& panels,
                      Out& out) const {
    if constexpr (Out::kWait) out.make_room(index, first_row(first), first_row(last));
    if constexpr (Format::kWholePanels) {
      prefetch_scales(index);
      const float* sums =
          format.multiply_panel(index, num_tiles, [&](int64_t t) { return tile_rows(t); });
      if (sums == nullptr) return out_of_memory.store(true, std::memory_order_relaxed);
      for (int64_t t = 0; t < num_tiles; ++t) {
        put(tile_rows(t), index, sums + t * Format::kMaxRows * kWidth, out);
      }
    } else {
      multiply_tiles_of(index, first, last, panels, out);
    }
  }
  template <class Out>  // Out: see linear/staged_outputs.h
  Out thread_outputs() const {
    const int64_t bytes = num_panels * (format.panel(1) - format.panel(0));
    return Out(call.outputs, y, call.rows, bytes / team_size(call.team));
  }

 private:
  template <class Out>
  void multiply_tiles_of(int64_t index, int64_t first, int64_t last, OpenPanels<Format>& panels,
                         Out& out) const {
    const uint8_t* panel = panels.open(format, call.outputs, index);
    if (panel == nullptr) {
      out_of_memory.store(true, std::memory_order_relaxed);
      return;
    }
    if (num_tiles == 1) {
      return multiply(0, index, panel, {panel + ahead_bytes(), kCacheLine}, out);
    }
    const int64_t pieces = num_tiles < 4 ? 2 : 4, step = kCacheLine / pieces;
    const uint8_t* next = format.panel(std::min(index + 1, num_panels - 1));
    const int64_t piece_bytes = (format.panel(1) - format.panel(0)) / pieces;
    for (int64_t t = first; t < last; ++t) {
      const int64_t piece = t - (num_tiles - pieces);
      multiply(t, index, panel,
               piece < 0 ? Ahead{panel, 0} : Ahead{next + piece * piece_bytes, step}, out);
    }
  }

  template <class Out>
  void multiply(int64_t t, int64_t index, const uint8_t* panel, Ahead ahead, Out& out) const {
    alignas(64) float sums[Format::kMaxRows * kWidth];
    prefetch_scales(index);
    const QuantizedRows rows = tile_rows(t);
    if (!Out::kWait) prefetch_outputs(rows, index);
    const auto& tiles = hardware_keeps_up() ? kTiles<Format, false> : kTiles<Format, true>;
    tiles[rows.rows - 1](format, rows, panel, ahead, sums, index);
    put(rows, index, sums, out);
  }

  void prefetch_scales(int64_t index) const {  // needed at the end of a tile
    const float* scale = call.scale + call.outputs.output(index);
    _mm_prefetch(scale, _MM_HINT_T0);
    _mm_prefetch(scale + kLanes, _MM_HINT_T0);
  }
  // Avoids first_row(): divisions delay a tile.
  int64_t first_of(const QuantizedRows& rows) const { return rows.scales - x.scales; }
  void prefetch_outputs(const QuantizedRows& rows, int64_t index) const {
    const int64_t stride = call.outputs.stride();
    const Y* first = y + first_of(rows) * stride + call.outputs.column(index);
    for (int64_t r = 0; r < rows.rows; ++r) __builtin_prefetch(first + r * stride, 1);
  }
  template <class Out>
  void put(const QuantizedRows& rows, int64_t index, const float* sums, Out& out) const {
    put_panel<Format::kMaxRows>(
        call.outputs, index, rows.rows, out.columns(index, first_of(rows)), out.stride(),
        [&](Y* to, int64_t stride) { put_tile(call, rows, sums, index, to, stride); });
  }
};

// Multiplies a block by all panels. enter(weights) makes what a thread needs, which will probably
// read these weights first. compute(index, first, last, entered) multiplies tiles [first, last) by
// panel `index`.
template <class Format, class Enter, class F>
void multiply_panels(const Format& format, const LinearCall& call, int64_t num_tiles,
                     Enter&& enter, F&& compute) {
  const int64_t work = call.outputs.panels_in_turn() * kWidth * call.rows * call.depth;
  int64_t parts = 1;
  if constexpr (!kLoops<Format>) {
    if (!Format::kWholePanels) parts = work / kWorkPerPart;
  }
  const PanelParts all(call.outputs, num_tiles, parts);
  all.share(
      work, call.team, [&](int64_t index) { return enter(format.panel(index)); }, compute);
}

// Returns memory of this thread for `rows` quantized rows; inputs is null if there is none.
template <class Format>
QuantizedRows scratch_for(const Format& format, int64_t rows) {
  struct Quantized;
  auto* const inputs = static_cast<int32_t*>(thread_scratch<Quantized>(
      4 * rows * (format.inputs_per_row + format.sums_per_row + 1) + Format::kBeyond));
  if (inputs == nullptr) return {};
  int32_t* const sums = inputs + rows * format.inputs_per_row;
  return {inputs, sums, reinterpret_cast<float*>(sums + rows * format.sums_per_row), rows};
}

// Quantizes the rows once for all threads. Out: holds the outputs of a thread.
template <class Out, class Format, class E, class Y>
void multiply_shared(const Format& format, const LinearCall& call, const E* x, Y* y,
                     std::atomic<bool>& out_of_memory) {
  const QuantizedRows rows = scratch_for(format, call.rows);
  if (rows.inputs == nullptr) return out_of_memory.store(true, std::memory_order_relaxed);
  const Block<Format, Y> block(format, call, rows, y, out_of_memory);
  // Two rows of a tile at a time, and adjacent pairs in one thread: they share cache lines.
  const int64_t pairs = (block.height() + 1) / 2;  // per tile
  const int64_t pairs_at_once = kWorkPerTask / (call.depth * 32 + 1) + 1;
  parallel_ranges(block.num_tiles * pairs, pairs_at_once, call.team, [&](int64_t index) {
    const int64_t t = index / pairs;
    NothingAhead nothing;
    const bool done = quantize_pair(
        format, x + block.first_row(t) * call.x_stride, call.x_stride, call.depth,
        block.tile_rows(t), index % pairs * 2, nothing, call.largest_from(block.first_row(t)),
        call.rotation);
    if (!done) out_of_memory.store(true, std::memory_order_relaxed);
  });
  if constexpr (kLoops<Format>) {
    multiply_panels(
        format, call, block.num_tiles, [&](const uint8_t*) { return format.loop(block); },
        [&](int64_t index, int64_t first, int64_t last, auto& loop) {
          loop.multiply(index, first, last);
        });
  } else {
    struct Worker {
      decltype(format.enter(0)) entered;
      OpenPanels<Format> panels;
      Out out;
    };
    multiply_panels(
        format, call, block.num_tiles,
        [&](const uint8_t*) {
          return Worker{format.enter(block.height()), {}, block.template thread_outputs<Out>()};
        },
        [&](int64_t index, int64_t first, int64_t last, Worker& worker) {
          block.multiply_panel(index, first, last, worker.panels, worker.out);
        });
  }
}

// Multiplies the few rows of one tile, which every thread quantizes for itself.
template <class Out, class Format, class E, class Y>
void multiply_own(const Format& format, const LinearCall& call, const E* x, Y* y,
                  std::atomic<bool>& out_of_memory) {
  struct Worker {
    Block<Format, Y> block;
    decltype(format.enter(0)) entered;
    OpenPanels<Format> panels;
    Out out;
  };
  const auto enter = [&](const uint8_t* weights) {
    QuantizedRows rows = scratch_for(format, call.rows);
    Ahead ahead{weights, kCacheLine};
    for (int64_t r = 0; r < rows.rows; r += 2) {
      if (!quantize_pair(format, x, call.x_stride, call.depth, rows, r, ahead, call.largest,
                         call.rotation)) {
        rows = {};
      }
    }
    const Block<Format, Y> block(format, call, rows, y, out_of_memory);
    return Worker{block, format.enter(call.rows), {}, block.template thread_outputs<Out>()};
  };
  const auto compute = [&](int64_t index, int64_t first, int64_t last, Worker& worker) {
    if (worker.block.x.inputs == nullptr) {
      out_of_memory.store(true, std::memory_order_relaxed);
    } else {
      worker.block.multiply_panel(index, first, last, worker.panels, worker.out);
    }
  };
  multiply_panels(format, call, 1, enter, compute);
}

// Returns the rows of a block: the most that stay in the caches while all weights are read.
template <class Out, class Format>
int64_t block_rows_of(const Format& format) {
  if constexpr (kLoops<Format>) {
    const int64_t fitting = Format::kBlockBytes / (4 * format.inputs_per_row + 1);
    return std::clamp(fitting, int64_t{4 * Format::kMaxRows}, Out::kMostRows);
  } else {
    static_assert(Format::kBlockRows <= Out::kMostRows);
    return Format::kBlockRows;
  }
}

// x: rows with a stride; y: rows with the stride of call.outputs. Returns 0, or 2 without memory
// for scratch.
template <class Out, class Format, class E, class Y>
int multiply_into(const Format& format, LinearCall call, const E* x, Y* y) {
  static_assert(Out::kWait || !kLoops<Format>);  // for Out::kMostRows, which a loop relies on
  const int64_t rows = call.rows;
  if (rows == 0) return 0;
  std::atomic<bool> out_of_memory{false};
  const auto failure = [&] { return out_of_memory.load(std::memory_order_relaxed) ? 2 : 0; };
  if constexpr (!kLoops<Format> && !Format::kOpens) {
    if (rows <= Format::kMaxRows && rows * call.depth <= kOwnElements) {
      multiply_own<Out>(format, call, x, y, out_of_memory);
      return failure();
    }
  }
  const int64_t most = block_rows_of<Out>(format);
  const int64_t blocks = (rows + most - 1) / most;
  const int64_t block_rows = (rows + blocks - 1) / blocks;  // the last is not much smaller
  const LinearCall all = call;
  for (int64_t first = 0; first < rows && failure() == 0; first += block_rows) {
    call.rows = std::min(block_rows, rows - first);
    call.largest = all.largest_from(first);
    multiply_shared<Out>(format, call, x + first * call.x_stride, y + first * call.outputs.stride(),
                         out_of_memory);
  }
  return failure();
}

template <class Format, class E, class Y>
int multiply(const Format& format, const LinearCall& call, const E* x, Y* y) {
  if constexpr (kLoops<Format>) {
    return multiply_into<StagedOutputs<Y>>(format, call, x, y);
  } else {
    if constexpr (Format::kStages) {
      if (pays_to_wait()) return multiply_into<StagedOutputs<Y>>(format, call, x, y);
    }
    return multiply_into<DirectOutputs<Y>>(format, call, x, y);
  }
}

template <class Format>
int multiply(const Format& format, const LinearCall& call, int32_t x_dtype, int32_t y_dtype,
             const void* x, void* y) {
  int failed = 0;
  const int unknown = dispatch_result(x_dtype, y_dtype, [&](auto* x_tag, auto* y_tag) {
    using E = std::remove_pointer_t<decltype(x_tag)>;
    using Y = std::remove_pointer_t<decltype(y_tag)>;
    failed = multiply(format, call, static_cast<const E*>(x), static_cast<Y*>(y));
  });
  return unknown != 0 ? unknown : failed;
}

}  // namespace quire::linear_int
