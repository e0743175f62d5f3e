// y = x Wᵀ + b with integer weights: what the formats share. The rows of x become 8-bit integers once
// per call; a format multiplies a tile of rows by panels of kWidth output columns; the sums are
// scaled and stored here.
//
// Every output is a function of its row and its column alone: integers are exact, and what follows
// in float32 has one order. So the bits do not depend on rows, panels, threads or instruction set.
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "panels.h"
#include "parallel.h"
#include "scratch.h"
#include "simd_int.h"

namespace quire::linear_int {

constexpr float kSmallest = 1e-30f;  // of a row's largest magnitude; below, the row counts as zeros
// How far ahead of what is computed memory is fetched into the second-level cache: some 400 ns
// at the speed of memory. Measured best of 1, 2, 4, 8 and 16 KB, over all numbers of rows.
constexpr int64_t kAhead = 8192;

// scale, bias: of the output columns, up to a whole number of panels; bias may be null.
struct LinearCall {
  int64_t rows, outputs, depth, x_stride;
  const float* scale;
  const float* bias;
  Team* team;
};

// Rows of x as integers: inputs [groups · inputs of a group, rows], sums [groups, rows] with the
// sum of a group's integers times a factor of the format, scales [rows].
struct QuantizedRows {
  int32_t* inputs;
  int32_t* sums;
  float* scales;
  int64_t rows;
};

template <class E>
QUIRE_INLINE vf load_at_most(const E* x, int64_t n) {
  return n >= kLanes ? load(x) : load_part(x, static_cast<int>(n));
}

// At most n elements.
template <class E>
QUIRE_INLINE void put(E* y, vf value, int64_t n) {
  if (n >= kLanes) {
    store(y, value);
  } else {
    store_part(y, value, static_cast<int>(n));
  }
}

// The largest magnitude, infinity or NaN if the row has one: their bits are the largest.
template <class E>
float largest_magnitude(const E* x, int64_t depth) {
  vi largest = set1_int(0);
  for (int64_t k = 0; k < depth; k += kLanes) {
    const vf value = load_at_most(x + k, depth - k);
    largest = max_int(largest, and_int(bits_of(value), set1_int(0x7fffffff)));
  }
  const int32_t bits = maximum(largest);
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Row r of `target` from one row of x. Format::kInputs numbers carry a quad of integers.
template <class Format, class E>
void quantize_row(const Format& format, const E* x, int64_t depth, QuantizedRows target, int64_t r) {
  const float largest = largest_magnitude(x, depth);
  const bool finite = largest <= std::numeric_limits<float>::max();
  const bool usable = finite && largest >= kSmallest;
  target.scales[r] = usable   ? largest / 127.0f
                     : finite ? 0.0f
                              : std::numeric_limits<float>::quiet_NaN();
  const vf inverse = set1(usable ? 127.0f / largest : 0.0f);
  const vi keep = set1_int(usable ? -1 : 0);
  int32_t* inputs = target.inputs + r;
  for (int64_t first = 0, group = 0; first < depth; first += format.group_size, ++group) {
    const int64_t end = std::min(depth, first + format.group_size);
    vi total = set1_int(0);
    for (int64_t k = first; k < end; k += kLanes) {
      const vi numbers = and_int(to_int(mul(load_at_most(x + k, end - k), inverse)), keep);
      total = add_int(total, numbers);
      int32_t quads[kLanes / 4], expanded[Format::kInputs];
      store_bytes(quads, numbers);
      const int64_t count = std::min<int64_t>(kLanes / 4, (end - k + 3) / 4);
      for (int64_t q = 0; q < count; ++q) {
        Format::expand(quads[q], expanded);
        for (const int32_t value : expanded) {
          *inputs = value;
          inputs += target.rows;
        }
      }
    }
    target.sums[group * target.rows + r] = sum(total) * format.sum_factor;
  }
}

// Columns [column, column + kWidth) of one row: scales, bias, rounding, and no more than there are.
template <class E>
QUIRE_INLINE void put_columns(const LinearCall& call, const float* sums, float row_scale,
                              int64_t column, E* y) {
  for (int half = 0; half < 2; ++half, column += kLanes, sums += kLanes) {
    const int64_t left = call.outputs - column;
    if (left <= 0) return;
    vf value = mul(mul(load(sums), set1(row_scale)), load(call.scale + column));
    if (call.bias != nullptr) value = add(value, load(call.bias + column));
    put(y + column, value, left);
  }
}

// f(row, half) for every vector of a tile's sums.
template <int R, class F>
QUIRE_INLINE void each_sum(F&& f) {
  QUIRE_UNROLL
  for (int r = 0; r < R; ++r) {
    f(r, 0);
    f(r, 1);
  }
}
// Where a vector of sums stands in what a tile gives out, [R, kWidth].
QUIRE_INLINE int place(int r, int half) { return r * kWidth + half * kLanes; }

// out: [rows, kWidth]. ahead: memory to fetch meanwhile, as much as a panel.
template <class Format>
using Tile = void (*)(const Format&, const QuantizedRows&, const uint8_t* panel,
                      const uint8_t* ahead, float* out, int64_t index);
template <class Format, std::size_t... I>
constexpr std::array<Tile<Format>, Format::kMaxRows> tiles_of(std::index_sequence<I...>) {
  return {Format::template tile<I + 1>...};
}
template <class Format>  // by rows - 1
constexpr auto kTiles = tiles_of<Format>(std::make_index_sequence<Format::kMaxRows>());

// Up to Format::kBlockRows rows, quantized in tiles of `height` rows and one with what is left.
template <class Format, class Y>
struct Block {
  const Format& format;
  const LinearCall& call;
  const QuantizedRows& x;
  Y* y;
  int64_t height, num_tiles, num_panels;

  QuantizedRows tile_rows(int64_t t) const {
    const int64_t first = t * height;
    return {x.inputs + first * format.inputs_per_row, x.sums + first * format.sums_per_row,
            x.scales + first, std::min(height, call.rows - first)};
  }

  // All tiles by one panel. The last one finds it in the caches, so the next one comes meanwhile.
  void multiply_panel(int64_t index) const {
    const int64_t following = std::min(index + 1, num_panels - 1);
    for (int64_t t = 0; t < num_tiles; ++t) {
      const bool from_memory = t == 0, has_time = t > 0 && t == num_tiles - 1;
      multiply(t, index,
               format.panel(has_time ? following : index) + (from_memory ? kAhead : 0));
    }
  }

  void multiply(int64_t t, int64_t index, const uint8_t* ahead) const {
    alignas(64) float sums[Format::kMaxRows * kWidth];
    const QuantizedRows rows = tile_rows(t);
    kTiles<Format>[rows.rows - 1](format, rows, format.panel(index), ahead, sums, index);
    for (int64_t r = 0; r < rows.rows; ++r) {
      put_columns(call, sums + r * kWidth, rows.scales[r], index * kWidth,
                  y + (t * height + r) * call.outputs);
    }
  }
};

template <class Format, class E, class Y>
void multiply_block(const Format& format, const LinearCall& call, const E* x, QuantizedRows rows,
                    Y* y) {
  const int64_t least_tiles = (call.rows + Format::kMaxRows - 1) / Format::kMaxRows;
  const int64_t height = (call.rows + least_tiles - 1) / least_tiles;
  const Block<Format, Y> block{format, call, rows, y, height, (call.rows + height - 1) / height,
                               panels_of(call.outputs)};
  parallel_for(call.rows, kWorkPerTask / (call.depth * 64 + 1) + 1, call.team, [&](int64_t r) {
    quantize_row(format, x + r * call.x_stride, call.depth, block.tile_rows(r / height),
                 r % height);
  });
  parallel_for(block.num_panels, kWorkPerTask / (kWidth * call.rows * call.depth + 1) + 1,
               call.team, [&](int64_t index) { block.multiply_panel(index); });
}

// 0, or 2 without memory for scratch. x: rows with a stride; y: contiguous.
template <class Format, class E, class Y>
int multiply(const Format& format, LinearCall call, const E* x, Y* y) {
  const int64_t rows = call.rows, block_rows = std::min(rows, Format::kBlockRows);
  if (rows == 0) return 0;
  struct Quantized;
  int32_t* inputs = static_cast<int32_t*>(thread_scratch<Quantized>(
      4 * block_rows * (format.inputs_per_row + format.sums_per_row + 1)));
  if (inputs == nullptr) return 2;
  int32_t* sums = inputs + block_rows * format.inputs_per_row;
  float* scales = reinterpret_cast<float*>(sums + block_rows * format.sums_per_row);
  for (int64_t first = 0; first < rows; first += block_rows) {
    call.rows = std::min(block_rows, rows - first);
    multiply_block(format, call, x + first * call.x_stride,
                   QuantizedRows{inputs, sums, scales, call.rows}, y + first * call.outputs);
  }
  return 0;
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
