// 4-bit weights for many rows: every panel is widened once (wide_tile.h).
//
// Weights minus their zero points are signed and need no correction per row, whereas zero points
// beside unsigned weights cost a product. The integers are those of Int4Format, and so are the
// operations after them.
#pragma once

#if defined(__AVX512VNNI__)

#include "linear/integers/int4.h"
#include "linear/integers/wide_tile.h"

namespace quire::linear_int {

template <bool kZeros>
struct Int4Wide : Int4Weights<kZeros>, Vectors {
  static constexpr bool kOpens = true, kSums = false;
  static constexpr int32_t kAdded = WideGroup::kAdded;
  static constexpr int kMaxRows = WideGroup::kMaxRows;
  static constexpr int64_t kBlockRows = WideGroup::kBlockRows;
  // Fewest rows for which this takes less time than Int4Format (measured: 3 % more at 32, 3 % less
  // at 64, 8 % less at 240).
  static constexpr int64_t kLeastRows = 48;

  Int4Wide(const uint8_t* weight, const uint8_t* zeros, int64_t group_size, int64_t groups)
      : Int4Weights<kZeros>{weight, zeros, group_size, groups, groups * group_size / 4} {}

  void open(int64_t index, uint8_t* wide) const {
    for (int64_t g = 0; g < this->groups; ++g) wide = widen_group(index, g, wide);
  }
  int64_t open_bytes() const {
    return this->groups * WideGroup::bytes(this->group_quads(), false);
  }

  template <int R, Fetch>
  static void tile(const Int4Wide& format, const QuantizedRows& x, const uint8_t* wide, Ahead ahead,
                   float* out, int64_t) {
    const int64_t lines = format.group_quads() / kLineQuads;
    multiply_wide<R, kLineQuads, false, false>(format.groups, lines, x.inputs, x.sums, wide, ahead,
                                               out);
  }

 private:
  // Widens one group. Returns the place of the next.
  uint8_t* widen_group(int64_t index, int64_t g, uint8_t* to) const {
    const vi mask = set1_int(0x0f0f0f0f), all_128 = set1_int(-0x7f7f7f80);
    vi zero[2] = {set1_int(kSymmetricZero), set1_int(kSymmetricZero)};
    if (kZeros) {
      const uint8_t* of_group = this->zeros + (index * this->groups + g) * kLanes;
      load_halves(of_group, zero[0], zero[1]);
      _mm_prefetch(of_group + this->groups * kLanes, _MM_HINT_T1);  // zero points of the next panel
    }
    for (vi& z : zero) z = repeat_byte(z);
    vi sums[2][2] = {};  // alternate, since each product waits for the one before
    const uint8_t* packed = this->panel(index) + g * this->group_bytes();
    uint8_t* const start = to;
    to += WideGroup::kStart;
    for (int64_t q = 0; q < this->group_quads(); q += 2) {
      for (auto& sum : sums) {
        const vi both = load_int(packed);
        const vi low = sub_bytes(and_int(both, mask), zero[0]);
        const vi high = sub_bytes(and_int(shift_right_16bit(both, 4), mask), zero[1]);
        sum[0] = add_bytes(sum[0], all_128, low);
        sum[1] = add_bytes(sum[1], all_128, high);
        store_int(to, low);
        store_int(to + WideGroup::kQuad / 2, high);
        packed += kQuadBytes;
        to += WideGroup::kQuad;
      }
    }
    const fp16* columns = reinterpret_cast<const fp16*>(packed);
    float* const scales = reinterpret_cast<float*>(to);
    store(scales, load(columns));
    store(scales + kLanes, load(columns + kLanes));
    put_starts(start, add_int(sums[0][0], sums[1][0]), add_int(sums[0][1], sums[1][1]));
    return to + WideGroup::kColumns;
  }
};

}  // namespace quire::linear_int

#endif
