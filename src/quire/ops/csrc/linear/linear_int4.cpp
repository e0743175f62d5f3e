// y = x (scale · (W - zero))ᵀ + b with 4-bit weights in groups along the inputs.
//
// Packed weights are panels of kWidth output columns; a panel is a sequence of groups. A group
// holds the quads of its columns for k = 0 … 3, then for k = 4 … 7, and so on, with columns i and
// kLanes + i in the low and the high half of a byte; then the float16 scales of the columns. Zero
// points, if any, are stored apart: [panels, groups, kWidth / 2], two per byte in the same way. The
// sum over a group starts at minus the zero point times the sum of the integers.
#include "rows/ids.h"
#include "linear/integers/int4.h"
#include "linear/integers/int4_tiles.h"
#include "linear/integers/int4_wide.h"
#include "linear/widened/widened.h"
#include "native/replay.h"

namespace quire::linear_int {
namespace {

constexpr int kBlockQuads = Vectors::kLineQuads;  // at most what add_nibbles takes

// Adds the products of kBlockQuads quads to the sums of a tile.
template <int R, class A>
QUIRE_INLINE void add_block(vi (&sums)[R][2], const uint8_t* panel, const int32_t* inputs,
                            A& ahead) {
  const vi mask = set1_int(0x0f0f0f0f);
  vi parts[R][2];
  each_sum<R>([&](int r, int half) { parts[r][half] = open_sum(sums[r][half]); });
  QUIRE_UNROLL
  for (int q = 0; q < kBlockQuads; ++q) {
    const vi both = load_int(panel + q * kQuadBytes);
    const vi low = and_int(both, mask), high = and_int(shift_right_16bit(both, 4), mask);
    ahead.fetch_line();
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) {
      const vi value = set1_int(inputs[r * kBlockQuads + q]);
      parts[r][0] = add_nibbles(parts[r][0], low, value);
      parts[r][1] = add_nibbles(parts[r][1], high, value);
    }
  }
  each_sum<R>([&](int r, int half) { sums[r][half] = close_sum(sums[r][half], parts[r][half]); });
}

template <bool kZeros>
struct Int4Format : Int4Weights<kZeros>, Vectors {
  // Rows of a register tile. It holds float32 sums, sums of a group and, without VNNI, sums of a
  // block.
  static constexpr int kMaxRows = kLanes == 8 ? 2 : kSumsInPlace ? 6 : 3;
  static constexpr int64_t kBlockRows = 264;
  // See Int8Format. Without prefetch 1 row takes 4 % less time, 2 rows the same, 4 rows a seventh
  // more (measured).
  static constexpr int kStreamedRows = kSumsInPlace ? 1 : 0;

  Int4Format(const uint8_t* weight, const uint8_t* zeros, int64_t group_size, int64_t groups)
      : Int4Weights<kZeros>{weight, zeros, group_size, groups, groups * group_size / 4} {}

  template <int R, Fetch kFetch>
  static void tile(const Int4Format& format, const QuantizedRows& x, const uint8_t* panel,
                   Ahead memory, float* out, int64_t index) {
    const int64_t groups = format.groups, blocks = format.group_quads() / kBlockQuads;
    const int32_t* inputs = x.inputs;
    auto ahead = ahead_of_tile<Int4Format, R, kFetch>(memory);
    vf totals[R][2];
    each_sum<R>([&](int r, int half) { totals[r][half] = zero(); });
    for (int64_t g = 0; g < groups; ++g) {
      vi sums[R][2];
      format.template start_group<R>(sums, x.sums + g * R, index, g);
      for (int64_t b = 0; b < blocks; ++b) {
        add_block<R>(sums, panel, inputs, ahead);
        inputs += kBlockQuads * R;
        panel += kBlockQuads * kQuadBytes;
      }
      const fp16* columns = reinterpret_cast<const fp16*>(panel);
      const vf scales[2] = {load(columns), load(columns + kLanes)};
      ahead.fetch_line();
      each_sum<R>([&](int r, int half) {
        totals[r][half] = fma(to_float(sums[r][half]), scales[half], totals[r][half]);
      });
      panel += kScaleBytes;
    }
    each_sum<R>([&](int r, int half) { store(out + place(r, half), totals[r][half]); });
  }
};

// Positions of the parts of a packed matrix.
struct Int4Layout {
  int64_t group_size, groups;

  int64_t group_bytes() const { return group_size / 4 * kQuadBytes + kScaleBytes; }
  int64_t group_start(int64_t panel, int64_t g) const {
    return (panel * groups + g) * group_bytes();
  }
  int64_t scale_start(int64_t panel, int64_t g) const {
    return group_start(panel, g) + group_size / 4 * kQuadBytes;
  }
  // Returns the byte that holds element k of a group for column c of a panel.
  int64_t byte_in_group(int64_t k, int64_t c) const {
    return k / 4 * kQuadBytes + c % kLanes * 4 + k % 4;
  }
};

// Returns the shift to the half of a byte that belongs to column c of a panel.
int shift_of(int64_t c) { return c < kLanes ? 0 : 4; }

void set_half(uint8_t& byte, int64_t c, uint8_t value) {
  byte = static_cast<uint8_t>(byte | (value & 15) << shift_of(c));
}

struct Int4Source {
  const uint8_t* weight;
  const uint16_t* scale;
  const uint8_t* zero;
  Outputs outputs;
  int64_t depth;
};

// Packs the existing columns into one panel of zeros.
void pack_panel(const Int4Source& source, const Int4Layout& layout, int64_t panel, uint8_t* packed,
                uint8_t* packed_zeros) {
  for (int64_t c = 0; c < source.outputs.columns(panel); ++c) {
    const int64_t column = source.outputs.output(panel) + c;
    for (int64_t g = 0; g < layout.groups; ++g) {
      const uint8_t* values = source.weight + column * source.depth + g * layout.group_size;
      uint8_t* target = packed + layout.group_start(panel, g);
      for (int64_t k = 0; k < layout.group_size; ++k) {
        set_half(target[layout.byte_in_group(k, c)], c, values[k]);
      }
      const int64_t from = column * layout.groups + g;
      std::memcpy(packed + layout.scale_start(panel, g) + 2 * c, source.scale + from, 2);
      if (source.zero != nullptr) {
        set_half(packed_zeros[(panel * layout.groups + g) * kLanes + c % kLanes], c,
                 source.zero[from]);
      }
    }
  }
}

struct Int4Table {
  const uint8_t* packed;
  const uint8_t* packed_zeros;
  const float* power;
  Int4Layout layout;
};

// Unpacks group g of row `id`, kLanes values at a time.
template <class E>
void unpack_group(const Int4Table& table, int64_t id, int64_t g, E* out) {
  const Int4Layout& layout = table.layout;
  const int64_t panel = id / kWidth, c = id % kWidth;
  const uint8_t* source = table.packed + layout.group_start(panel, g);
  fp16 scales[kLanes] = {};
  std::memcpy(scales, table.packed + layout.scale_start(panel, g) + 2 * c, 2);
  float scale[kLanes], values[kLanes];
  store(scale, load(scales));
  int zero = kSymmetricZero;
  if (table.packed_zeros != nullptr) {
    const int64_t at = (panel * layout.groups + g) * kLanes + c % kLanes;
    zero = table.packed_zeros[at] >> shift_of(c) & 15;
  }
  const vf factor = set1(scale[0] * table.power[id]);
  for (int64_t k = 0; k < layout.group_size; k += kLanes) {
    for (int64_t i = 0; i < kLanes; ++i) {
      const int value = source[layout.byte_in_group(k + i, c)] >> shift_of(c) & 15;
      values[i] = static_cast<float>(value - zero);
    }
    store(out + k, mul(load(values), factor));
  }
}

// Panels of a packed matrix as floats. factor: number to multiply by.
struct Int4Panels {
  Int4Table table;
  Outputs outputs;
  float factor;

  template <class W>
  void widen(int64_t index, W* to) const {
    const Int4Layout& layout = table.layout;
    const uint8_t* quad = table.packed + layout.group_start(index, 0);
    const float* columns = table.power + outputs.output(index);
    const vf powers[2] = {mul(load(columns), set1(factor)),
                          mul(load(columns + kLanes), set1(factor))};
    const vi mask = set1_int(0x0f0f0f0f), middle = set1_int(kSymmetricZero);
    vi zeros[2] = {middle, middle};
    for (int64_t g = 0; g < layout.groups; ++g) {
      if (table.packed_zeros != nullptr) {
        load_halves(table.packed_zeros + (index * layout.groups + g) * kLanes, zeros[0], zeros[1]);
      }
      const uint8_t* start = table.packed + layout.scale_start(index, g);
      const auto* halves = reinterpret_cast<const fp16*>(start);
      const vf scales[2] = {mul(load(halves), powers[0]), mul(load(halves + kLanes), powers[1])};
      const vf zero[2] = {to_float(zeros[0]), to_float(zeros[1])};
      for (int64_t left = layout.group_size; left > 0; left -= 4, quad += kQuadBytes) {
        const vi both = load_int(quad);
        const vi low = and_int(both, mask), high = and_int(shift_right_16bit(both, 4), mask);
        to = linear::put_quad(to, low, high, [&](vf byte, int half) __attribute__((always_inline)) {
          return mul(sub(byte, zero[half]), scales[half]);
        });
      }
      quad += kScaleBytes;
    }
  }
};

int multiply_groups(const Int4Layout& layout, const LinearCall& call, const uint8_t* packed,
                    const uint8_t* packed_zeros, int32_t x_dtype, int32_t y_dtype, const void* x,
                    void* y) {
  const auto by = [&](auto zeros) {
    constexpr bool kZeros = decltype(zeros)::value;
#if defined(__AMX_INT8__)
    if (call.rows >= Int4Tiles<kZeros>::kLeastRows) {
      const Int4Tiles<kZeros> format(packed, packed_zeros, layout.group_size, layout.groups);
      return multiply(format, call, x_dtype, y_dtype, x, y);
    }
#elif defined(__AVX512VNNI__)
    if (call.rows >= Int4Wide<kZeros>::kLeastRows) {
      const Int4Wide<kZeros> format(packed, packed_zeros, layout.group_size, layout.groups);
      return multiply(format, call, x_dtype, y_dtype, x, y);
    }
#endif
    const Int4Format<kZeros> format(packed, packed_zeros, layout.group_size, layout.groups);
    return multiply(format, call, x_dtype, y_dtype, x, y);
  };
  return packed_zeros == nullptr ? by(std::false_type()) : by(std::true_type());
}

}  // namespace
}  // namespace quire::linear_int

// Packs a matrix. weight: contiguous [outputs, groups · group_size], one value per byte. scale
// (float16), zero (bytes, or null): [outputs, groups]. packed, packed_zeros (or null): see above,
// filled with zeros. gate: see pointwise/gate.h.
QUIRE_API int quire_linear_int4_pack(const uint8_t* weight, const uint16_t* scale,
                                     const uint8_t* zero, uint8_t* packed, uint8_t* packed_zeros,
                                     int64_t outputs, int64_t groups, int64_t group_size,
                                     int32_t gate, quire::Team* team) {
  using namespace quire;
  using namespace quire::linear_int;
  const int64_t depth = groups * group_size;
  const Int4Source source{weight, scale, zero, {outputs, gate}, depth};
  const Int4Layout layout{group_size, groups};
  const int64_t grain = kWorkPerTask / (depth * kWidth * 8 + 1) + 1;
  parallel_for(source.outputs.panels(), grain, team, [&](int64_t panel) {
    pack_panel(source, layout, panel, packed, packed_zeros);
  });
  return 0;
}

// Unpacks rows power · scale · (W - zero) of the packed matrix to out, [num_ids, groups ·
// group_size], and undoes the rotation of LinearCall. id_bytes: 4 or 8. Returns 2 without memory for
// a row, 3 for an id outside the table.
QUIRE_API int quire_linear_int4_rows(const uint8_t* packed, const uint8_t* packed_zeros,
                                     const float* power, const void* ids, int32_t id_bytes,
                                     void* out, int64_t num_ids, int64_t outputs, int64_t groups,
                                     int64_t group_size, int64_t rotation, int32_t dtype,
                                     quire::Team* team) {
  using namespace quire;
  using namespace quire::linear_int;
  const Ids rows{ids, id_bytes};
  if (!rows.all_within(num_ids, outputs)) return 3;
  const Int4Table table{packed, packed_zeros, power, {group_size, groups}};
  const int64_t depth = groups * group_size;
  std::atomic<bool> out_of_memory{false};
  const int unknown = dispatch(static_cast<DType>(dtype), [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    parallel_for(num_ids, kWorkPerTask / 64 / depth + 1, team, [&](int64_t i) {
      const auto unpack = [&](auto* target) {
        for (int64_t g = 0; g < groups; ++g) {
          unpack_group(table, rows[i], g, target + g * group_size);
        }
      };
      if (!put_unrotated(static_cast<E*>(out) + i * depth, depth, rotation, unpack)) {
        out_of_memory.store(true, std::memory_order_relaxed);
      }
    });
  });
  return unknown != 0 ? unknown : out_of_memory.load(std::memory_order_relaxed) ? 2 : 0;
}
QUIRE_REPLAYABLE(quire_linear_int4_rows)

// Computes y. x: rows of groups · group_size elements with a stride. y: [rows, outputs] of x's type
// or float32; for a gated layer half as wide. power and bias (or null): float32, scale and bias of
// LinearCall, as rotation. weight_dtype: type to which weights are widened (widened.h), or
// kIntegers. gate: the packing's. y_stride: stride of the rows of y, 0 if they are contiguous.
QUIRE_API int quire_linear_int4(const void* x, int64_t x_stride, const uint8_t* packed,
                                const uint8_t* packed_zeros, const float* power, const float* bias,
                                void* y, int64_t y_stride, int64_t rows, int64_t outputs,
                                int64_t groups, int64_t group_size, int64_t rotation,
                                int32_t x_dtype, int32_t y_dtype, int32_t weight_dtype,
                                int32_t gate, quire::Team* team) {
  using namespace quire;
  using namespace quire::linear_int;
  const Outputs all{outputs, gate, y_stride};
  if (weight_dtype != linear::kIntegers) {
    const Int4Table table{packed, packed_zeros, power, {group_size, groups}};
    const Int4Panels panels{table, all, linear::rotation_part(rotation)};
    return linear::multiply_widened({rows, all, groups * group_size, x_stride, bias, team},
                                    linear::widening_of(panels), rotation, weight_dtype, x_dtype,
                                    y_dtype, x, y);
  }
  LinearCall call{rows, all, groups * group_size, x_stride, power, bias, team};
  call.rotation = rotation;
  return multiply_groups({group_size, groups}, call, packed, packed_zeros, x_dtype, y_dtype, x, y);
}
QUIRE_REPLAYABLE(quire_linear_int4)

// Computes sums over the inputs of x, which are part of those of a matrix, times the powers. sums:
// float32 [rows, outputs], contiguous. largest: [rows], of the whole rows. Other arguments: see
// above; there is no gate.
QUIRE_API int quire_linear_int4_partial(const void* x, int64_t x_stride, const uint8_t* packed,
                                        const uint8_t* packed_zeros, const float* power,
                                        const float* largest, float* sums, int64_t rows,
                                        int64_t outputs, int64_t groups, int64_t group_size,
                                        int64_t rotation, int32_t x_dtype, quire::Team* team) {
  using namespace quire;
  using namespace quire::linear_int;
  const LinearCall call{rows,  {outputs, kUngated}, groups * group_size, x_stride,
                        power, nullptr,             team,                largest,
                        Sums::kScaled, rotation};
  return multiply_groups({group_size, groups}, call, packed, packed_zeros, x_dtype,
                         static_cast<int32_t>(DType::kFloat32), x, sums);
}
QUIRE_REPLAYABLE(quire_linear_int4_partial)
