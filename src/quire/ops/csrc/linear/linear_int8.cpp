// y = x (scale · W)ᵀ + b with 8-bit weights, one scale per output column.
//
// Packed weights are panels of kWidth output columns. A panel holds the quads of all columns for k
// = 0 … 3, then for k = 4 … 7, and so on, as weight + 128, which vpdpbusd takes. The sums of a row
// start at -128 times the sum of its integers.
#include "rows/ids.h"
#include "linear/integers/int.h"
#include "native/replay.h"
#include "linear/tile_loop.h"
#include "linear/widened/widened.h"

namespace quire::linear_int {
namespace {

constexpr int kQuadBytes = 4 * kWidth;  // in a panel

struct Int8Weights {
  const uint8_t* weight;
  int64_t quads, group_size, inputs_per_row;
  int64_t sums_per_row = 1;
  int32_t sum_factor = -128;
  bool keeps_integers = false;  // a tile returns its sums as they are

  Int8Weights(const uint8_t* weight, int64_t quads, int64_t inputs_per_row)
      : weight(weight), quads(quads), group_size(4 * quads), inputs_per_row(inputs_per_row) {}
  const uint8_t* panel(int64_t index) const { return weight + index * quads * kQuadBytes; }
  static constexpr bool kOpens = false, kSums = true;
  static constexpr bool kStages = true;  // outputs may be staged
  static constexpr int32_t kAdded = 0;  // added to the integers of x
};

struct Int8Format : Int8Weights, Vectors {
  static constexpr int kQuadInputs = kByteInputs;
  // Rows of a register tile: 24 (8) sums, the weights and one input in 32 (16) registers.
  static constexpr int kMaxRows = kLanes == 16 ? 12 : 4;
  // Rows whose integers stay in the caches while all weights are read.
  static constexpr int64_t kBlockRows = 22 * kMaxRows;
  // Measured on Zen 4: without prefetch 2 rows take a tenth less time from memory; 1 row takes the
  // same from memory, and a tenth less from the caches. With one line in four, 3 rows take up to 4
  // % and 4 rows 3 to 8 % less than with all lines, and both 1 to 4 % less than with none; 5 rows
  // take up to 11 %, 6 and 8 rows 14 to 28 % more than with all lines.
  static constexpr int kStreamedRows = kSumsInPlace ? 2 : 0, kSparseRows = kSumsInPlace ? 4 : 0;

  Int8Format(const uint8_t* weight, int64_t quads)
      : Int8Weights(weight, quads,
                    (quads + kLineQuads - 1) / kLineQuads * kLineQuads * kQuadInputs) {}

  template <int R, Fetch kFetch>
  static void tile(const Int8Format& format, const QuantizedRows& x, const uint8_t* panel,
                   Ahead memory, float* out, int64_t) {
    const int32_t* inputs = x.inputs;
    auto ahead = ahead_of_tile<Int8Format, R, kFetch>(memory);
    vi sums[R][2];
    each_sum<R>([&](int r, int half) { sums[r][half] = set1_int(x.sums[r]); });
    for (int64_t left = format.quads; left > 0; left -= kLineQuads) {
      const int64_t count = std::min<int64_t>(left, kLineQuads);
      for (int64_t q = 0; q < count; ++q, panel += kQuadBytes) {
        add_quad<R>(sums, panel, inputs + q * kQuadInputs, ahead);
      }
      inputs += kLineQuads * kQuadInputs * R;
    }
    each_sum<R>([&](int r, int half) {
      const vi sum = sums[r][half];
      store(out + place(r, half), format.keeps_integers ? float_of(sum) : to_float(sum));
    });
  }

 private:
  template <int R, class A>
  QUIRE_INLINE static void add_quad(vi (&sums)[R][2], const uint8_t* panel, const int32_t* inputs,
                                    A& ahead) {
    const Bytes low = weights_of(load_int(panel));
    const Bytes high = weights_of(load_int(panel + kQuadBytes / 2));
    ahead.template fetch_lines<kQuadBytes / kCacheLine>();
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) {
      const Inputs value = broadcast(inputs + r * kLineQuads * kQuadInputs);
      sums[r][0] = add_bytes(sums[r][0], low, value);
      sums[r][1] = add_bytes(sums[r][1], high, value);
    }
  }
};

#if defined(__AMX_INT8__)
// Int8Format in tile registers, whose lines are the quads of a panel. The bytes after the last quad
// of a row are arbitrary: they are multiplied by zeros.
struct Int8Tiles : Int8Weights {
  static constexpr int kQuadInputs = 1;
  static constexpr bool kGroupScales = false;
  static constexpr int kMaxRows = kStepRows;
  static constexpr int64_t kBlockBytes = kTileBlockBytes;
  static constexpr int64_t kBeyond = kBeyondTile;
  static constexpr int kRowQuads = kTileBytes / 4;  // per step
  static int64_t position(int64_t quad, int64_t r, int64_t rows) {
    return (quad / kRowQuads * rows + r) * kRowQuads + quad % kRowQuads;
  }

  Int8Tiles(const uint8_t* weight, int64_t quads)
      : Int8Weights(weight, quads, (quads + kRowQuads - 1) / kRowQuads * kRowQuads) {}

  template <class Y>
  auto loop(const Block<Int8Tiles, Y>& block) const;
};

// Block as its loop (linear/tile_loop.h) uses it.
template <class Y>
struct Int8Job {
  using Products = Int8Products;
  using Output = Y;
  const Block<Int8Tiles, Y>* block;

  TileRows tile(int64_t t) const {
    const QuantizedRows rows = block->tile_rows(t);
    return {rows.inputs, block->first_row(t), static_cast<int>(rows.rows)};
  }
  const uint8_t* panel(int64_t index) const { return block->format.panel(index); }
  int64_t lines() const { return block->format.quads; }
  const Outputs& outputs() const { return block->call.outputs; }
  int threads() const { return team_size(block->call.team); }
  QUIRE_INLINE void put(int64_t row, int64_t index, const uint8_t* sums, Y* to) const {
    const LinearCall& call = block->call;
    const int64_t output = outputs().output(index);
    const vi start = set1_int(block->x.sums[row]);
    if constexpr (std::is_same_v<Y, float>) {
      if (call.sums == Sums::kIntegers) {
        const vi low = load_int(sums), high = load_int(sums + kTileBytes);
        return store_pair(to, float_of(add_int(start, low)), float_of(add_int(start, high)));
      }
    }
    const vf row_scale = set1(block->x.scales[row]);
    vf value[2];
    for (int half = 0; half < 2; ++half) {
      const vf sum = to_float(add_int(start, load_int(sums + half * kTileBytes)));
      value[half] = mul(mul(sum, row_scale), load(call.scale + output + half * kLanes));
      if (call.bias != nullptr) {
        value[half] = add(value[half], load(call.bias + output + half * kLanes));
      }
    }
    store_pair(to, value[0], value[1]);
  }
};

template <class Y>
auto Int8Tiles::loop(const Block<Int8Tiles, Y>& block) const {
  return TileLoop<Int8Job<Y>>({&block}, block.y, block.call.rows, block.height());
}

using Int8 = Int8Tiles;
#else
using Int8 = Int8Format;
#endif

// Panels of a packed matrix as floats. scale: see LinearCall. factor: number to multiply by.
struct Int8Panels {
  const uint8_t* packed;
  const float* scale;
  Outputs outputs;
  int64_t depth;
  float factor;

  template <class W>
  void widen(int64_t index, W* to) const {
    const uint8_t* quad = packed + index * ((depth + 3) / 4) * kQuadBytes;
    const float* columns = scale + outputs.output(index);
    const vf scales[2] = {mul(load(columns), set1(factor)),
                          mul(load(columns + kLanes), set1(factor))};
    const auto weight = [&](vf byte, int half) __attribute__((always_inline)) {
      return mul(sub(byte, set1(128.0f)), scales[half]);
    };
    for (int64_t k = 0; k < depth; k += 4, quad += kQuadBytes) {
      const vi low = load_int(quad), high = load_int(quad + kQuadBytes / 2);
      to = depth - k > 2 ? linear::put_quad(to, low, high, weight)
                         : linear::put_quad<1>(to, low, high, weight);
    }
  }
};

}  // namespace
#if defined(__AMX_INT8__)
template <>
constexpr bool kLoops<Int8Tiles> = true;
#endif
}  // namespace quire::linear_int

// Packs weight, contiguous [outputs, depth], to packed, [panels, quads, kWidth, 4]. gate: see
// pointwise/gate.h.
QUIRE_API int quire_linear_int8_pack(const int8_t* weight, uint8_t* packed, int64_t outputs,
                                     int64_t depth, int32_t gate, quire::Team* team) {
  using namespace quire;
  using namespace quire::linear_int;
  const Outputs all{outputs, gate};
  const int64_t quads = (depth + 3) / 4;
  parallel_for(all.panels(), kWorkPerTask / (depth * kWidth * 8 + 1) + 1, team, [&](int64_t panel) {
    uint8_t* target = packed + panel * quads * 4 * kWidth;
    const int8_t* source = weight + all.output(panel) * depth;
    const int64_t columns = all.columns(panel);
    for (int64_t c = 0; c < kWidth; ++c) {
      for (int64_t k = 0; k < 4 * quads; ++k) {
        const int number = c < columns && k < depth ? source[c * depth + k] : 0;
        target[(k / 4 * kWidth + c) * 4 + k % 4] = static_cast<uint8_t>(number + 128);
      }
    }
  });
  return 0;
}

// Unpacks rows scale · W of the packed matrix to out, [num_ids, depth], and undoes the rotation of
// LinearCall. id_bytes: 4 or 8. Returns 2 without memory for a row, 3 for an id outside the table.
QUIRE_API int quire_linear_int8_rows(const uint8_t* packed, const float* scale, const void* ids,
                                     int32_t id_bytes, void* out, int64_t num_ids,
                                     int64_t outputs, int64_t depth, int64_t rotation,
                                     int32_t dtype, quire::Team* team) {
  using namespace quire;
  using namespace quire::linear_int;
  const Ids rows{ids, id_bytes};
  if (!rows.all_within(num_ids, outputs)) return 3;
  const int64_t quads = (depth + 3) / 4;
  std::atomic<bool> out_of_memory{false};
  const int unknown = dispatch(static_cast<DType>(dtype), [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    parallel_for(num_ids, kWorkPerTask / 64 / depth + 1, team, [&](int64_t i) {
      const int64_t id = rows[i], c = id % kWidth;
      const uint8_t* source = packed + id / kWidth * quads * 4 * kWidth + 4 * c;
      const auto unpack = [&](auto* target) {
        float row[kLanes];
        for (int64_t k = 0; k < depth; k += kLanes) {
          const int64_t n = std::min<int64_t>(kLanes, depth - k);
          for (int64_t j = 0; j < n; ++j) {
            row[j] = static_cast<float>(source[(k + j) / 4 * 4 * kWidth + j % 4] - 128);
          }
          put(target + k, mul(load(row), set1(scale[id])), n);
        }
      };
      if (!put_unrotated(static_cast<E*>(out) + i * depth, depth, rotation, unpack)) {
        out_of_memory.store(true, std::memory_order_relaxed);
      }
    });
  });
  return unknown != 0 ? unknown : out_of_memory.load(std::memory_order_relaxed) ? 2 : 0;
}
QUIRE_REPLAYABLE(quire_linear_int8_rows)

// Computes y. x: rows of `depth` elements with a stride. y: [rows, outputs] of x's type or float32;
// for a gated layer half as wide. scale and bias (or null): float32, of LinearCall, as rotation.
// weight_dtype: type to which weights are widened (widened.h), or kIntegers. gate: the
// packing's. y_stride: stride of the rows of y, 0 if they are contiguous.
QUIRE_API int quire_linear_int8(const void* x, int64_t x_stride, const uint8_t* packed,
                                const float* scale, const float* bias, void* y, int64_t y_stride,
                                int64_t rows, int64_t outputs, int64_t depth, int64_t rotation,
                                int32_t x_dtype, int32_t y_dtype, int32_t weight_dtype,
                                int32_t gate, quire::Team* team) {
  using namespace quire;
  using namespace quire::linear_int;
  if (weight_dtype != linear::kIntegers) {
    const Outputs all{outputs, gate, y_stride};
    const Int8Panels panels{packed, scale, all, depth, linear::rotation_part(rotation)};
    return linear::multiply_widened({rows, all, depth, x_stride, bias, team},
                                    linear::widening_of(panels), rotation, weight_dtype, x_dtype,
                                    y_dtype, x, y);
  }
  const Int8 format(packed, (depth + 3) / 4);
  LinearCall call{rows, {outputs, gate, y_stride}, depth, x_stride, scale, bias, team};
  call.rotation = rotation;
  return multiply(format, call, x_dtype, y_dtype, x, y);
}
QUIRE_REPLAYABLE(quire_linear_int8)

// Computes exact sums over the inputs of x, which are part of those of a matrix. sums: [rows,
// outputs], contiguous. largest: [rows], of the whole rows. x, packed and scale: see above; there
// is no gate.
QUIRE_API int quire_linear_int8_partial(const void* x, int64_t x_stride, const uint8_t* packed,
                                        const float* scale, const float* largest, int32_t* sums,
                                        int64_t rows, int64_t outputs, int64_t depth,
                                        int64_t rotation, int32_t x_dtype, quire::Team* team) {
  using namespace quire;
  using namespace quire::linear_int;
  Int8 format(packed, (depth + 3) / 4);
  format.keeps_integers = true;
  const LinearCall call{rows, {outputs, kUngated}, depth, x_stride, scale, nullptr, team, largest,
                        Sums::kIntegers, rotation};
  return multiply(format, call, x_dtype, static_cast<int32_t>(DType::kFloat32), x, sums);
}
QUIRE_REPLAYABLE(quire_linear_int8_partial)
