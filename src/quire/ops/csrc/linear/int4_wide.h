// 4-bit weights for many rows: every panel is widened once, in scratch of the thread, and all tiles
// read it there.
//
// Weights minus their zero points are signed, which vpdpbusd takes as its second factor only; so
// the integers of x go up by 128, and a group's sums start at -128 times the sum of its weights.
// That is one load for all rows, where zero points beside unsigned weights cost a product for each.
// The integers that come out are those of Int4Format, and so is what follows.
#pragma once

#if defined(__AVX512VNNI__)

#include "linear/int4.h"

namespace quire::linear_int {

// add_bytes that stays where it is written: gcc moves loads ahead otherwise, and spills sums.
QUIRE_INLINE void add_in_place(vi& sum, vi x, vi w) {
  asm volatile("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
}

// Pointers keep what they are here: gcc computes them anew behind a loop otherwise, from numbers in
// vector registers, for which the loads of the next group wait.
QUIRE_INLINE void keep(const int32_t*& inputs, const uint8_t*& wide, const uint8_t*& ahead) {
  asm volatile("" : "+r"(inputs), "+r"(wide), "+r"(ahead));
}

template <bool kZeros>
struct Int4Wide : Int4Weights<kZeros>, Vectors {
  static constexpr bool kOpens = true, kSums = false;
  static constexpr int32_t kAdded = 128;
  // Of a tile: 14 float32 sums and 14 of a group, two weights and one x leave one of 32 registers.
  static constexpr int kMaxRows = 7;
  static constexpr int64_t kBlockRows = 266;
  // From here on it takes less time than Int4Format (measured: 3 % more at 32, 3 % less at 64, 8 %
  // less at 240).
  static constexpr int64_t kLeastRows = 48;
  // Bytes of a widened quad, and of what stands before and behind those of a group.
  static constexpr int64_t kWideQuad = 4 * kWidth, kWideStart = 4 * kWidth, kWideEnd = 4 * kWidth;
  // A tile among so many fetches at most a quarter of a line for a quad (Block).
  static constexpr int kQuadsPerFetch = 4;

  Int4Wide(const uint8_t* weight, const uint8_t* zeros, int64_t group_size, int64_t groups)
      : Int4Weights<kZeros>{weight, zeros, group_size, groups, groups * group_size / 4} {}

  // The int32 [kWidth] that the sums of a group start at, its quads in bytes, its float32 [kWidth]
  // scales; then the next group.
  void open(int64_t index, uint8_t* wide) const {
    for (int64_t g = 0; g < this->groups; ++g) wide = widen_group(index, g, wide);
  }
  int64_t open_bytes() const {
    return this->groups * (kWideStart + this->group_quads() * kWideQuad + kWideEnd);
  }

  template <int R, Fetch>
  static void tile(const Int4Wide& format, const QuantizedRows& x, const uint8_t* wide, Ahead ahead,
                   float* out, int64_t) {
    const int64_t blocks = format.group_quads() / kLineQuads;
    const int32_t* inputs = x.inputs;
    const int64_t step = kQuadsPerFetch * ahead.step;
    vf totals[R][2];
    each_sum<R>([&](int r, int half) { totals[r][half] = zero(); });
    for (int64_t g = format.groups; g > 0; --g) {
      vi sums[R][2];
      each_sum<R>([&](int r, int half) { sums[r][half] = load_int(wide + half * 4 * kLanes); });
      wide += kWideStart;
      for (int64_t b = blocks; b > 0; --b) {
        QUIRE_UNROLL
        for (int q = 0; q < kLineQuads; ++q) {
          const vi low = load_int(wide + q * kWideQuad);
          const vi high = load_int(wide + q * kWideQuad + kWideQuad / 2);
          if (q % kQuadsPerFetch == 0) {
            _mm_prefetch(ahead.start, _MM_HINT_T1);
            ahead.start += step;
          }
          QUIRE_UNROLL
          for (int r = 0; r < R; ++r) {
            const vi value = set1_int(inputs[r * kLineQuads + q]);
            add_in_place(sums[r][0], value, low);
            add_in_place(sums[r][1], value, high);
          }
        }
        inputs += kLineQuads * R;
        wide += kLineQuads * kWideQuad;
        keep(inputs, wide, ahead.start);
      }
      const float* columns = reinterpret_cast<const float*>(wide);
      const vf scales[2] = {load(columns), load(columns + kLanes)};
      ahead.fetch_line();
      each_sum<R>([&](int r, int half) {
        totals[r][half] = fma(to_float(sums[r][half]), scales[half], totals[r][half]);
      });
      wide += kWideEnd;
    }
    each_sum<R>([&](int r, int half) { store(out + place(r, half), totals[r][half]); });
  }

 private:
  // Returns where the next group goes.
  uint8_t* widen_group(int64_t index, int64_t g, uint8_t* to) const {
    const vi mask = set1_int(0x0f0f0f0f), all_128 = set1_int(-0x7f7f7f80);
    vi zero[2] = {set1_int(kSymmetricZero), set1_int(kSymmetricZero)};
    if (kZeros) {
      const uint8_t* of_group = this->zeros + (index * this->groups + g) * kLanes;
      load_halves(of_group, zero[0], zero[1]);
      _mm_prefetch(of_group + this->groups * kLanes, _MM_HINT_T1);  // of the next panel
    }
    for (vi& z : zero) z = repeat_byte(z);
    vi sums[2][2] = {};  // in turn, since each product waits for the one before
    const uint8_t* packed = this->panel(index) + g * this->group_bytes();
    uint8_t* const start = to;
    to += kWideStart;
    for (int64_t q = 0; q < this->group_quads(); q += 2) {
      for (auto& sum : sums) {
        const vi both = load_int(packed);
        const vi low = sub_bytes(and_int(both, mask), zero[0]);
        const vi high = sub_bytes(and_int(shift_right_16bit(both, 4), mask), zero[1]);
        sum[0] = add_bytes(sum[0], all_128, low);
        sum[1] = add_bytes(sum[1], all_128, high);
        store_int(to, low);
        store_int(to + kWideQuad / 2, high);
        packed += kQuadBytes;
        to += kWideQuad;
      }
    }
    const fp16* columns = reinterpret_cast<const fp16*>(packed);
    for (int half = 0; half < 2; ++half) {
      const int64_t at = half * 4 * kLanes;
      store_int(start + at, sub_int(set1_int(0), add_int(sums[0][half], sums[1][half])));
      store(reinterpret_cast<float*>(to + at), load(columns + half * kLanes));
    }
    return to + kWideEnd;
  }
};

}  // namespace quire::linear_int

#endif
