// y = x Wᵀ + b with weights of few bits in blocks along the inputs (block_kinds.h), and 8-bit
// activations with a scale for each group: one loop over tiles for all kinds.
#include "linear/integers/block_kinds.h"
#include "linear/integers/wide_tile.h"
#include "linear/widened/widened.h"
#include "native/replay.h"
#include "rows/ids.h"

namespace quire::linear_int {
namespace {

// Shape of the inputs: `blocks` blocks of `groups` groups.
struct BlockShape {
  int64_t blocks, groups;
};

// Rows of a register tile, as for Int4Format.
struct DirectTile {
  static constexpr int kMaxRows = kLanes == 8 ? 2 : kSumsInPlace ? 6 : 3;
};

// Scales and offsets of a group, for the two halves of the columns.
template <class K>
struct Columns {
  vf scale[2], offset[2];

  QUIRE_INLINE void open_block(const uint8_t*& packed) {
    for (int half = 0; half < 2; ++half) {
      scale[half] = load(reinterpret_cast<const fp16*>(packed) + half * kLanes);
      if constexpr (K::kOffsets == Offset::kMinimum) {
        offset[half] = load(reinterpret_cast<const fp16*>(packed) + kWidth + half * kLanes);
      } else if constexpr (K::kOffsets == Offset::kZero) {
        const vi zeros = load_signed(packed + 2 * kWidth + half * kLanes);
        offset[half] = mul(scale[half], to_float(sub_int(set1_int(0), zeros)));
      }
    }
    packed += K::kHeadBytes;
  }
  QUIRE_INLINE Columns open_group(const uint8_t*& packed) const {
    Columns group = *this;
    if constexpr (K::kHasFactors) {
      for (int half = 0; half < 2; ++half) {
        const uint8_t* factors = packed + half * kLanes;
        group.scale[half] = mul(scale[half], to_float(load_signed(factors)));
        if constexpr (K::kOffsets == Offset::kMinimum) {
          group.offset[half] = mul(offset[half], to_float(load_unsigned(factors + kWidth)));
        }
      }
    }
    packed += K::kFactorBytes;
    return group;
  }
};

// Calls f(q, low, high) for the quads of a group.
template <class K, int q = 0, class F>
QUIRE_INLINE void each_quad(const uint8_t* packed, vi levels, F&& f) {
  if constexpr (q < K::kGroupQuads) {
    vi low, high;
    K::template load_quad<q % kChunkQuads>(packed + q / kChunkQuads * K::kChunkBytes, levels, low,
                                           high);
    f(std::integral_constant<int, q>(), low, high);
    each_quad<K, q + 1>(packed, levels, f);
  }
}

// Adds a group for R rows to sums that start at -kZero times the sums of the inputs.
template <class K, int R, class A>
QUIRE_INLINE void add_group(vi (&sums)[R][2], const uint8_t* packed, vi levels,
                            const int32_t* inputs, A& ahead) {
  constexpr int kQuads = K::kGroupQuads, kPlanes = static_cast<int>(K::kChunkBytes / kPlane);
  vi parts[R][2];
  each_quad<K>(packed, levels, [&](auto quad, vi low, vi high) __attribute__((always_inline)) {
    constexpr int q = decltype(quad)::value, in_chunk = q % kChunkQuads;
    ahead.template fetch_lines<(in_chunk + 1) * kPlanes / kChunkQuads -
                               in_chunk * kPlanes / kChunkQuads>();
    if constexpr (K::kIsWide) {
      const Bytes weights[2] = {weights_of(low), weights_of(high)};
      QUIRE_UNROLL
      for (int r = 0; r < R; ++r) {
        const Inputs value = broadcast(inputs + (r * kQuads + q) * kByteInputs);
        sums[r][0] = add_bytes(sums[r][0], weights[0], value);
        sums[r][1] = add_bytes(sums[r][1], weights[1], value);
      }
    } else {
      if constexpr (q % K::kSafeQuads == 0) {
        each_sum<R>([&](int r, int half) { parts[r][half] = open_sum(sums[r][half]); });
      }
      QUIRE_UNROLL
      for (int r = 0; r < R; ++r) {
        const vi value = set1_int(inputs[r * kQuads + q]);
        parts[r][0] = add_nibbles(parts[r][0], low, value);
        parts[r][1] = add_nibbles(parts[r][1], high, value);
      }
      if constexpr (q % K::kSafeQuads == K::kSafeQuads - 1 || q == kQuads - 1) {
        each_sum<R>(
            [&](int r, int half) { sums[r][half] = close_sum(sums[r][half], parts[r][half]); });
      }
    }
  });
}

template <class K, int R, Fetch kFetch>
void multiply_blocks(const BlockShape& shape, const QuantizedRows& x, const uint8_t* panel,
                     Ahead memory, float* out) {
  constexpr int kInputs = K::kGroupQuads * (K::kIsWide ? kByteInputs : 1);
  const vi levels = K::levels();
  const int32_t *inputs = x.inputs, *x_sums = x.sums;
  const int32_t* x_scales = x_sums + shape.blocks * shape.groups * R;
  auto ahead = ahead_of_tile<DirectTile, R, kFetch>(memory);
  vf totals[R][2];
  each_sum<R>([&](int r, int half) { totals[r][half] = zero(); });
  for (int64_t b = shape.blocks; b > 0; --b) {
    Columns<K> block;
    block.open_block(panel);
    ahead.fetch_line();
    for (int64_t g = shape.groups; g > 0; --g) {
      const Columns<K> group = block.open_group(panel);
      if constexpr (K::kHasFactors) ahead.fetch_line();
      vi sums[R][2];
      each_sum<R>([&](int r, int half) {
        sums[r][half] = set1_int(K::kZero == 0 ? 0 : -K::kZero * x_sums[r]);
      });
      add_group<K>(sums, panel, levels, inputs, ahead);
      panel += K::kGroupBytes - K::kFactorBytes;
      inputs += kInputs * R;
      each_sum<R>([&](int r, int half) {
        const vf sum = scaled_sum(sums[r][half], x_scales + r);
        totals[r][half] = fma(sum, group.scale[half], totals[r][half]);
        if constexpr (K::kOffsets != Offset::kNone) {
          const vf x_sum = scaled_sum(set1_int(x_sums[r]), x_scales + r);
          totals[r][half] = fma(x_sum, group.offset[half], totals[r][half]);
        }
      });
      x_sums += R;
      x_scales += R;
    }
  }
  each_sum<R>([&](int r, int half) { store(out + place(r, half), totals[r][half]); });
}

using BlockTile = void (*)(const BlockShape&, const QuantizedRows&, const uint8_t*, Ahead, float*);

// Common part of the formats of all kinds. A line of rows of x is one group.
template <int kQuads, int kInputs>
struct Blocks : Vectors {
  static constexpr int kLineQuads = kQuads, kQuadInputs = kInputs;
  static constexpr bool kGroupScales = true, kStages = false;
  const uint8_t* packed;
  BlockShape shape;
  int64_t panel_bytes;
  int64_t groups = shape.blocks * shape.groups, group_size = 4 * kQuads;
  int64_t sums_per_row = 2 * groups, inputs_per_row = groups * kQuads * kInputs;

  template <class K>
  Blocks(K, const uint8_t* packed, BlockShape shape)
      : packed(packed), shape(shape),
        panel_bytes(shape.blocks * (K::kHeadBytes + shape.groups * K::kGroupBytes)) {}
  const uint8_t* panel(int64_t index) const { return packed + index * panel_bytes; }
  static int64_t position(int64_t quad, int64_t r, int64_t rows) {
    return (quad / kQuads * rows + r) * kQuads + quad % kQuads;
  }
};

template <int kQuads, int kInputs>
struct DirectBlocks : Blocks<kQuads, kInputs>, DirectTile {
  static constexpr bool kOpens = false;
  static constexpr int32_t kAdded = 0;
  static constexpr int64_t kBlockRows = 264;
  static constexpr int kStreamedRows = kSumsInPlace ? 1 : 0;  // see Int4Format
  std::array<BlockTile, DirectTile::kMaxRows> tiles;  // indexed by rows - 1
  BlockTile streamed;

  template <class K>
  DirectBlocks(K kind, const uint8_t* packed, BlockShape shape)
      : Blocks<kQuads, kInputs>(kind, packed, shape),
        tiles(tiles_of<K>(std::make_index_sequence<DirectTile::kMaxRows>())),
        streamed(multiply_blocks<K, 1, Fetch::kNothing>) {}

  template <int R, Fetch kFetch>
  static void tile(const DirectBlocks& format, const QuantizedRows& x, const uint8_t* panel,
                   Ahead memory, float* out, int64_t) {
    const BlockTile multiply = kFetch == Fetch::kNothing ? format.streamed : format.tiles[R - 1];
    multiply(format.shape, x, panel, memory, out);
  }

 private:
  template <class K, std::size_t... I>
  static constexpr std::array<BlockTile, DirectTile::kMaxRows> tiles_of(std::index_sequence<I...>) {
    return {multiply_blocks<K, I + 1, Fetch::kAll>...};
  }
};

#if defined(__AVX512VNNI__)
// Widens a panel for many rows.
template <class K>
void widen_panel(const BlockShape& shape, const uint8_t* packed, uint8_t* to) {
  const vi all_128 = set1_int(every_byte(128)), zero = set1_int(every_byte(K::kZero));
  const vi levels = K::levels();
  for (int64_t b = 0; b < shape.blocks; ++b) {
    Columns<K> block;
    block.open_block(packed);
    for (int64_t g = 0; g < shape.groups; ++g) {
      const Columns<K> group = block.open_group(packed);
      uint8_t* const start = to;
      to += WideGroup::kStart;
      vi sums[2][2] = {};  // alternate, since each product waits for the one before
      each_quad<K>(packed, levels, [&](auto quad, vi low, vi high) __attribute__((always_inline)) {
        auto& sum = sums[decltype(quad)::value % 2];
        low = sub_bytes(low, zero);
        high = sub_bytes(high, zero);
        sum[0] = add_bytes(sum[0], all_128, low);
        sum[1] = add_bytes(sum[1], all_128, high);
        store_int(to, low);
        store_int(to + WideGroup::kQuad / 2, high);
        to += WideGroup::kQuad;
      });
      packed += K::kGroupBytes - K::kFactorBytes;
      put_starts(start, add_int(sums[0][0], sums[1][0]), add_int(sums[0][1], sums[1][1]));
      const auto put = [&](const vf(&columns)[2]) {
        store(reinterpret_cast<float*>(to), columns[0]);
        store(reinterpret_cast<float*>(to) + kLanes, columns[1]);
        to += WideGroup::kColumns;
      };
      put(group.scale);
      if constexpr (K::kOffsets != Offset::kNone) put(group.offset);
    }
  }
}

template <int kQuads>
struct WideBlocks : Blocks<kQuads, 1> {
  static constexpr bool kOpens = true;
  static constexpr int32_t kAdded = WideGroup::kAdded;
  static constexpr int kMaxRows = WideGroup::kMaxRows;
  static constexpr int64_t kBlockRows = WideGroup::kBlockRows;
  static constexpr int64_t kLeastRows = 32;
  bool offsets;
  void (*widen)(const BlockShape&, const uint8_t*, uint8_t*);

  template <class K>
  WideBlocks(K kind, const uint8_t* packed, BlockShape shape)
      : Blocks<kQuads, 1>(kind, packed, shape), offsets(K::kOffsets != Offset::kNone),
        widen(widen_panel<K>) {}
  void open(int64_t index, uint8_t* wide) const { widen(this->shape, this->panel(index), wide); }
  int64_t open_bytes() const { return this->groups * WideGroup::bytes(kQuads, offsets); }

  template <int R, Fetch>
  static void tile(const WideBlocks& format, const QuantizedRows& x, const uint8_t* wide,
                   Ahead ahead, float* out, int64_t) {
    const auto multiply =
        format.offsets ? multiply_wide<R, kQuads, true, true> : multiply_wide<R, kQuads, true, false>;
    multiply(format.groups, 1, x.inputs, x.sums, wide, ahead, out);
  }
};
#endif

// Tensors of a matrix to pack: codes [outputs, inputs] and scale [outputs, blocks]. If the kind has
// them: minimum [outputs, blocks], factors [outputs, groups], and lows, which are either [outputs,
// groups] that multiply the minimum or zero points [outputs, blocks].
struct BlockSource {
  const uint8_t* codes;
  const uint16_t *scale, *minimum;
  const int8_t* factors;
  const uint8_t* lows;
};

// Packs one column into a panel of zeros.
template <class K>
void pack_column(const BlockSource& source, const BlockShape& shape, int64_t output, int64_t c,
                 uint8_t* packed) {
  constexpr int64_t kGroupSize = 4 * K::kGroupQuads;
  const int64_t groups = shape.blocks * shape.groups;
  const uint8_t* codes = source.codes + output * groups * kGroupSize;
  for (int64_t b = 0; b < shape.blocks; ++b) {
    const int64_t block = output * shape.blocks + b;
    std::memcpy(packed + 2 * c, source.scale + block, 2);
    if constexpr (K::kOffsets == Offset::kMinimum) {
      std::memcpy(packed + 2 * (kWidth + c), source.minimum + block, 2);
    } else if constexpr (K::kOffsets == Offset::kZero) {
      packed[2 * kWidth + c] = source.lows[block];
    }
    packed += K::kHeadBytes;
    for (int64_t g = 0; g < shape.groups; ++g) {
      const int64_t group = output * groups + b * shape.groups + g;
      if constexpr (K::kHasFactors) {
        packed[c] = static_cast<uint8_t>(source.factors[group]);
        if constexpr (K::kOffsets == Offset::kMinimum) packed[kWidth + c] = source.lows[group];
      }
      for (int64_t k = 0; k < kGroupSize; ++k, ++codes) {
        const int64_t chunk = k / (4 * kChunkQuads), q = k / 4 % kChunkQuads;
        K::put_code(packed + K::kFactorBytes + chunk * K::kChunkBytes, q, k % 4, c, *codes);
      }
      packed += K::kGroupBytes;
    }
  }
}

// Unpacks column c of a panel to numbers [inputs], with the roundings of the definition.
template <class K, class E>
void unpack_column(const BlockShape& shape, const uint8_t* packed, int64_t c, float power, E* out) {
  constexpr int kGroupSize = 4 * K::kGroupQuads;
  const vi levels = K::levels();
  for (int64_t b = 0; b < shape.blocks; ++b) {
    Columns<K> block;
    block.open_block(packed);
    for (int64_t g = 0; g < shape.groups; ++g) {
      const Columns<K> group = block.open_group(packed);
      float scale[kWidth], offset[kWidth] = {}, numbers[kGroupSize];
      for (int half = 0; half < 2; ++half) {
        store(scale + half * kLanes, mul(group.scale[half], set1(power)));
        if constexpr (K::kOffsets != Offset::kNone) {
          store(offset + half * kLanes, mul(group.offset[half], set1(power)));
        }
      }
      each_quad<K>(packed, levels, [&](auto quad, vi low, vi high) {
        uint8_t bytes[2 * kPlane];
        store_int(bytes, low);
        store_int(bytes + kPlane, high);
        for (int j = 0; j < 4; ++j) {
          const float level = static_cast<float>(bytes[4 * c + j] - K::kZero);
          numbers[4 * decltype(quad)::value + j] = scale[c] * level + offset[c];
        }
      });
      packed += K::kGroupBytes - K::kFactorBytes;
      for (int k = 0; k < kGroupSize; k += kLanes) store(out + k, load(numbers + k));
      out += kGroupSize;
    }
  }
}

// Panels of a packed matrix as floats. power: see LinearCall::scale.
template <class K>
struct BlockPanels {
  const uint8_t* packed;
  BlockShape shape;
  const float* power;
  Outputs outputs;

  // Rounds like unpack_column().
  template <class W>
  void widen(int64_t index, W* to) const {
    const uint8_t* from = Blocks<1, 1>(K(), packed, shape).panel(index);
    const float* columns = power + outputs.output(index);
    const vf powers[2] = {load(columns), load(columns + kLanes)}, zero = set1(K::kZero);
    const vi levels = K::levels();
    for (int64_t b = 0; b < shape.blocks; ++b) {
      Columns<K> block;
      block.open_block(from);
      for (int64_t g = 0; g < shape.groups; ++g) {
        Columns<K> group = block.open_group(from);
        for (int half = 0; half < 2; ++half) {
          group.scale[half] = mul(group.scale[half], powers[half]);
          if constexpr (K::kOffsets != Offset::kNone) {
            group.offset[half] = mul(group.offset[half], powers[half]);
          }
        }
        const auto weight = [&](vf byte, int half) __attribute__((always_inline)) {
          const vf scaled = mul(group.scale[half], sub(byte, zero));
          if constexpr (K::kOffsets == Offset::kNone) return scaled;
          return add(scaled, group.offset[half]);
        };
        each_quad<K>(from, levels, [&](auto, vi low, vi high) __attribute__((always_inline)) {
          to = linear::put_quad(to, low, high, weight);
        });
        from += K::kGroupBytes - K::kFactorBytes;
      }
    }
  }
};

// Returns the shape of blocks of block_size inputs in groups of the kind.
template <class K>
BlockShape shape_of(K, int64_t blocks, int64_t block_size) {
  return {blocks, block_size / (4 * K::kGroupQuads)};
}

template <class K>
int multiply_kind(K kind, const LinearCall& call, const uint8_t* packed, const BlockShape& shape,
                  int32_t x_dtype, int32_t y_dtype, const void* x, void* y) {
#if defined(__AVX512VNNI__)
  if (call.rows >= WideBlocks<K::kGroupQuads>::kLeastRows) {
    const WideBlocks<K::kGroupQuads> format(kind, packed, shape);
    return multiply(format, call, x_dtype, y_dtype, x, y);
  }
#endif
  const DirectBlocks<K::kGroupQuads, K::kIsWide ? kByteInputs : 1> format(kind, packed, shape);
  return multiply(format, call, x_dtype, y_dtype, x, y);
}

constexpr int kUnknownKind = 1;

}  // namespace
}  // namespace quire::linear_int

// Packs a matrix. codes: contiguous [outputs, blocks · block_size]. scale, minimum: float16.
// factors, lows: see BlockSource, null where a kind has none. packed: filled with zeros. gate:
// see pointwise/gate.h. Returns 1 for an unknown kind.
QUIRE_API int quire_linear_blocks_pack(const uint8_t* codes, const uint16_t* scale,
                                       const uint16_t* minimum, const int8_t* factors,
                                       const uint8_t* lows, uint8_t* packed, int64_t outputs,
                                       int64_t blocks, int64_t block_size, int32_t kind,
                                       int32_t gate, quire::Team* team) {
  using namespace quire;
  using namespace quire::linear_int;
  const BlockSource source{codes, scale, minimum, factors, lows};
  const Outputs all{outputs, gate};
  const bool known = with_kind(kind, [&](auto k) {
    const BlockShape shape = shape_of(k, blocks, block_size);
    const Blocks<1, 1> panels(k, packed, shape);
    const int64_t grain = kWorkPerTask / (blocks * block_size * kWidth * 8 + 1) + 1;
    parallel_for(all.panels(), grain, team, [&](int64_t panel) {
      for (int64_t c = 0; c < all.columns(panel); ++c) {
        pack_column<decltype(k)>(source, shape, all.output(panel) + c, c,
                                 packed + panel * panels.panel_bytes);
      }
    });
  });
  return known ? 0 : kUnknownKind;
}

// Unpacks rows of the packed matrix to out, [num_ids, blocks · block_size]. id_bytes: 4 or 8.
// Returns 3 for an id outside the table.
QUIRE_API int quire_linear_blocks_rows(const uint8_t* packed, const float* power, const void* ids,
                                       int32_t id_bytes, void* out, int64_t num_ids,
                                       int64_t outputs, int64_t blocks, int64_t block_size,
                                       int32_t kind, int32_t dtype, quire::Team* team) {
  using namespace quire;
  using namespace quire::linear_int;
  const Ids rows{ids, id_bytes};
  if (!rows.all_within(num_ids, outputs)) return 3;
  const int64_t depth = blocks * block_size;
  int unknown = kUnknownKind;
  with_kind(kind, [&](auto k) {
    const BlockShape shape = shape_of(k, blocks, block_size);
    const Blocks<1, 1> panels(k, packed, shape);
    unknown = dispatch(static_cast<DType>(dtype), [&](auto* tag) {
      using E = std::remove_pointer_t<decltype(tag)>;
      parallel_for(num_ids, kWorkPerTask / 64 / depth + 1, team, [&](int64_t i) {
        const int64_t id = rows[i];
        unpack_column<decltype(k)>(shape, panels.panel(id / kWidth), id % kWidth, power[id],
                                   static_cast<E*>(out) + i * depth);
      });
    });
  });
  return unknown;
}
QUIRE_REPLAYABLE(quire_linear_blocks_rows)

// Computes y = x Wᵀ + b. x: rows of blocks · block_size elements with a stride. y: [rows, outputs]
// of x's type or float32; for a gated layer half as wide. power and bias (or null): float32, scale
// and bias of LinearCall. weight_dtype: type to which weights are widened (widened.h), or
// kIntegers. gate: the packing's. y_stride: stride of the rows of y, 0 if they are contiguous.
QUIRE_API int quire_linear_blocks(const void* x, int64_t x_stride, const uint8_t* packed,
                                  const float* power, const float* bias, void* y, int64_t y_stride,
                                  int64_t rows, int64_t outputs, int64_t blocks, int64_t block_size,
                                  int32_t kind, int32_t x_dtype, int32_t y_dtype,
                                  int32_t weight_dtype, int32_t gate, quire::Team* team) {
  using namespace quire;
  using namespace quire::linear_int;
  const Outputs all{outputs, gate, y_stride};
  const LinearCall call{rows, all, blocks * block_size, x_stride, power, bias, team};
  int failed = kUnknownKind;
  with_kind(kind, [&](auto k) {
    const BlockShape shape = shape_of(k, blocks, block_size);
    if (weight_dtype != linear::kIntegers) {
      const BlockPanels<decltype(k)> panels{packed, shape, power, all};
      failed = linear::multiply_widened({rows, all, call.depth, x_stride, bias, team},
                                        linear::widening_of(panels), 1, weight_dtype, x_dtype,
                                        y_dtype, x, y);
      return;
    }
    failed = multiply_kind(k, call, packed, shape, x_dtype, y_dtype, x, y);
  });
  return failed;
}
QUIRE_REPLAYABLE(quire_linear_blocks)
