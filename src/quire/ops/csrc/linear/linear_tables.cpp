// y = x Wᵀ + b with weights that are table entries times scales, to which single numbers may be
// added (widened.h).
#include "linear/widened/widened.h"
#include "native/replay.h"
#include "rows/ids.h"

namespace quire::linear {
namespace {

constexpr int kQuad = 4;  // inputs whose codes are stored together

#if defined(__AVX512F__)
QUIRE_INLINE vi count_lanes() {
  return (vi)_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
QUIRE_INLINE vf gather(const float* from, vi index) {
  return _mm512_i32gather_ps((__m512i)index, from, 4);
}
#else
QUIRE_INLINE vi count_lanes() { return (vi)_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
QUIRE_INLINE vf gather(const float* from, vi index) {
  return _mm256_i32gather_ps(from, (__m256i)index, 4);
}
#endif

// Codes of a quad in a panel, bits · kLanes bytes. load(quad, k, half) returns those of input k of
// the quad in one half of the columns; put() adds one code to zeros.
template <int bits>
struct Codes;

template <>
struct Codes<8> {
  QUIRE_INLINE static vi load(const uint8_t* quad, int k, int half) {
    return load_unsigned(quad + k * kWidth + half * kLanes);
  }
  static void put(uint8_t* quad, int64_t k, int64_t c, int code) { quad[k * kWidth + c] = code; }
};

// The lower nibbles hold the first half of the columns.
template <>
struct Codes<4> {
  QUIRE_INLINE static vi load(const uint8_t* quad, int k, int half) {
    const vi both = load_unsigned(quad + k * kLanes);
    return half == 0 ? and_int(both, set1_int(15)) : shift_right_16bit(both, 4);
  }
  static void put(uint8_t* quad, int64_t k, int64_t c, int code) {
    quad[k * kLanes + c % kLanes] |= code << 4 * (c / kLanes);
  }
};

// Two lower bits of each code, two inputs per byte, then the upper bits of all.
template <>
struct Codes<3> {
  QUIRE_INLINE static vi load(const uint8_t* quad, int k, int half) {
    const vi lower = load_unsigned(quad + k / 2 * kLanes);
    const vi upper = load_unsigned(quad + 2 * kLanes);
    const vi low = and_int(shift_right_16bit(lower, 2 * place(k % 2, half)), set1_int(3));
    const vi high = and_int(shift_right_16bit(upper, place(k, half)), set1_int(1));
    return or_int(low, shift_left(high, 2));
  }
  static void put(uint8_t* quad, int64_t k, int64_t c, int code) {
    const int64_t half = c / kLanes, lane = c % kLanes;
    quad[k / 2 * kLanes + lane] |= (code & 3) << 2 * place(k % 2, half);
    quad[2 * kLanes + lane] |= (code >> 2) << place(k, half);
  }

 private:
  static constexpr int place(int64_t k, int64_t half) { return static_cast<int>(2 * k + half); }
};

// Packed weights. codes: per panel and block, the float32 scales of the columns, then the quads.
// tables: entries by code; if own_tables, each output's own, by panel, code and column. Panel p
// gets numbers ends[p] to ends[p + 1] added, in the order of places k · kWidth + column; none if
// ends is null.
struct Matrix {
  const uint8_t* codes;
  const float* tables;
  const int64_t* ends;
  const uint32_t* places;
  const float* added;
  int64_t blocks, block_size;
  int32_t own_tables;

  int64_t depth() const { return blocks * block_size; }
  int64_t block_bytes(int bits) const {
    return kWidth * static_cast<int64_t>(sizeof(float)) + block_size / kQuad * bits * kLanes;
  }
  const uint8_t* panel(int64_t index, int bits) const {
    return codes + index * blocks * block_bytes(bits);
  }
  const float* table(int64_t index, int bits) const {
    return tables + (own_tables ? index * (int64_t{1} << bits) * kWidth : 0);
  }
};

// Numbers added to one panel, from an input on.
struct Added {
  const uint32_t* place;
  const uint32_t* end;
  const float* number;

  Added(const Matrix& matrix, int64_t index) : place(nullptr), end(nullptr), number(nullptr) {
    if (matrix.ends == nullptr) return;
    place = matrix.places + matrix.ends[index];
    end = matrix.places + matrix.ends[index + 1];
    number = matrix.added + matrix.ends[index];
  }
  // Adds numbers to the weights of the quad that starts at input k.
  void add_to(int64_t k, vf (&weights)[kQuad][2]) {
    const uint32_t first = static_cast<uint32_t>(k * kWidth);
    if (place == end || *place - first >= kQuad * kWidth) return;
    float numbers[kQuad * kWidth];
    for (int i = 0; i < 2 * kQuad; ++i) store(numbers + i * kLanes, weights[i / 2][i % 2]);
    for (; place != end && *place - first < kQuad * kWidth; ++place, ++number) {
      numbers[*place - first] += *number;
    }
    for (int i = 0; i < 2 * kQuad; ++i) weights[i / 2][i % 2] = load(numbers + i * kLanes);
  }
};

// Widens panel `index` to the form that linear.cpp multiplies.
template <int bits, bool own, class W>
void widen_panel(const void* from, int64_t index, W* to) {
  const Matrix& matrix = *static_cast<const Matrix*>(from);
  const uint8_t* packed = matrix.panel(index, bits);
  const float* table = matrix.table(index, bits);
  Added added(matrix, index);
  const vi lanes[2] = {count_lanes(), add_int(count_lanes(), set1_int(kLanes))};
  constexpr int kWidthBits = kWidth == 32 ? 5 : 4;
  int64_t k = 0;
  for (int64_t b = 0; b < matrix.blocks; ++b) {
    const auto* scales = reinterpret_cast<const float*>(packed);
    const vf scale[2] = {load(scales), load(scales + kLanes)};
    packed += kWidth * sizeof(float);
    for (int64_t left = matrix.block_size; left > 0; left -= kQuad, k += kQuad) {
      vf weights[kQuad][2];
      QUIRE_UNROLL
      for (int i = 0; i < 2 * kQuad; ++i) {
        const int half = i % 2;
        vi code = Codes<bits>::load(packed, i / 2, half);
        if constexpr (own) code = add_int(shift_left(code, kWidthBits), lanes[half]);
        weights[i / 2][half] = mul(gather(table, code), scale[half]);
      }
      packed += bits * kLanes;
      added.add_to(k, weights);
      put_pair(to, weights[0], weights[1]);
      put_pair(to + kPairElements, weights[2], weights[3]);
      to += 2 * kPairElements;
    }
  }
}

template <class W>
Widen<W> widen_by(int32_t bits, bool own) {
  switch (bits) {
    case 3:
      return own ? widen_panel<3, true, W> : widen_panel<3, false, W>;
    case 4:
      return own ? widen_panel<4, true, W> : widen_panel<4, false, W>;
    case 8:
      return own ? widen_panel<8, true, W> : widen_panel<8, false, W>;
    default:
      return nullptr;
  }
}

template <int bits>
void pack_panel(const uint8_t* codes, const float* scales, const Outputs& outputs, int64_t blocks,
                int64_t block_size, int64_t index, uint8_t* packed) {
  const int64_t depth = blocks * block_size;
  for (int64_t b = 0; b < blocks; ++b) {
    auto* columns = reinterpret_cast<float*>(packed);
    packed += kWidth * sizeof(float);
    for (int64_t c = 0; c < outputs.columns(index); ++c) {
      const int64_t output = outputs.output(index) + c;
      columns[c] = scales[output * blocks + b];
      const uint8_t* from = codes + output * depth + b * block_size;
      for (int64_t k = 0; k < block_size; ++k) {
        Codes<bits>::put(packed + k / kQuad * bits * kLanes, k % kQuad, c, from[k]);
      }
    }
    packed += block_size / kQuad * bits * kLanes;
  }
}

constexpr int kUnknown = 1;

}  // namespace
}  // namespace quire::linear

// Packs a matrix. codes: contiguous [outputs, blocks · block_size], block_size a multiple of 4.
// scales: [outputs, blocks]. packed: filled with zeros, as in Matrix. bits: 3, 4 or 8. gate: see
// pointwise/gate.h.
QUIRE_API int quire_linear_tables_pack(const uint8_t* codes, const float* scales, uint8_t* packed,
                                       int64_t outputs, int64_t blocks, int64_t block_size,
                                       int32_t bits, int32_t gate, quire::Team* team) {
  using namespace quire;
  using namespace quire::linear;
  const Outputs all{outputs, gate};
  const auto pack = bits == 3   ? pack_panel<3>
                    : bits == 4 ? pack_panel<4>
                    : bits == 8 ? pack_panel<8>
                                : nullptr;
  if (pack == nullptr) return kUnknown;
  const Matrix matrix{packed, nullptr, nullptr, nullptr, nullptr, blocks, block_size, 0};
  const int64_t bytes = blocks * matrix.block_bytes(bits);
  const int64_t grain = kWorkPerTask / (matrix.depth() * kWidth * 8 + 1) + 1;
  parallel_for(all.panels(), grain, team, [&](int64_t panel) {
    pack(codes, scales, all, blocks, block_size, panel, packed + panel * bytes);
  });
  return 0;
}

// Unpacks rows of the packed matrix to out, [num_ids, blocks · block_size] of `dtype`, rounded
// once. Widens a panel for each id. id_bytes: 4 or 8. The layer must not be gated. Returns 3 for an
// id outside the table.
QUIRE_API int quire_linear_tables_rows(const uint8_t* packed, const float* tables,
                                       const int64_t* ends, const uint32_t* places,
                                       const float* added, const void* ids, int32_t id_bytes,
                                       void* out, int64_t num_ids, int64_t outputs, int64_t blocks,
                                       int64_t block_size, int32_t bits, int32_t own_tables,
                                       int32_t dtype, quire::Team* team) {
  using namespace quire;
  using namespace quire::linear;
  struct Widened;
  const Ids rows{ids, id_bytes};
  if (!rows.all_within(num_ids, outputs)) return 3;
  const Matrix matrix{packed, tables, ends, places, added, blocks, block_size, own_tables};
  const int64_t depth = matrix.depth();
  std::atomic<int> failed{0};
  const int unknown = dispatch(static_cast<DType>(dtype), [&](auto* tag) {
    using W = std::remove_pointer_t<decltype(tag)>;
    const Widen<W> widen = widen_by<W>(bits, own_tables);
    if (widen == nullptr) return failed.store(kUnknown);
    parallel_for(num_ids, kWorkPerTask / (depth * kWidth) + 1, team, [&](int64_t i) {
      W* panel = static_cast<W*>(
          thread_scratch<Widened>(panel_elements(depth) * static_cast<int64_t>(sizeof(W))));
      if (panel == nullptr) return failed.store(2);
      widen(&matrix, rows[i] / kWidth, panel);
      unpack_row(panel, depth, rows[i] % kWidth, static_cast<W*>(out) + i * depth);
    });
  });
  return unknown != 0 ? unknown : failed.load();
}
QUIRE_REPLAYABLE(quire_linear_tables_rows)

// Computes y = x Wᵀ + b. x: rows of blocks · block_size elements with a stride. y: [rows, outputs]
// of x's type or float32; for a gated layer half as wide. weight_dtype: type to which weights are
// rounded. bias: float32 or null. gate: the packing's. y_stride: stride of the rows of y, 0 if they
// are contiguous. Other arguments: see Matrix.
QUIRE_API int quire_linear_tables(const void* x, int64_t x_stride, const uint8_t* packed,
                                  const float* tables, const int64_t* ends, const uint32_t* places,
                                  const float* added, const float* bias, void* y, int64_t y_stride,
                                  int64_t rows, int64_t outputs, int64_t blocks,
                                  int64_t block_size, int32_t bits, int32_t own_tables,
                                  int32_t x_dtype, int32_t y_dtype, int32_t weight_dtype,
                                  int32_t gate, quire::Team* team) {
  using namespace quire;
  using namespace quire::linear;
  const Matrix matrix{packed, tables, ends, places, added, blocks, block_size, own_tables};
  const Problem problem{rows, {outputs, gate, y_stride}, matrix.depth(), x_stride, bias, team};
  const Widening widening{&matrix, widen_by<float>(bits, own_tables),
                          widen_by<bf16>(bits, own_tables), widen_by<fp16>(bits, own_tables)};
  if (widening.to_float32 == nullptr) return kUnknown;
  return multiply_widened(problem, widening, 1, weight_dtype, x_dtype, y_dtype, x, y);
}
QUIRE_REPLAYABLE(quire_linear_tables)
