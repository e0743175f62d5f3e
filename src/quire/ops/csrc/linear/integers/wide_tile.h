// Tiles of rows by panels whose groups were widened to a signed byte per weight. For many rows,
// which all read the same widened panel in scratch memory of the thread.
//
// vpdpbusd takes signed bytes as its second factor only. So the integers of x are raised by 128,
// and the sums of a group start at -128 times the sum of its weights. That is one load for all
// rows.
#pragma once

#if defined(__AVX512VNNI__)

#include "linear/integers/int.h"

namespace quire::linear_int {

// Works like add_bytes, but stays where it is written: gcc would otherwise move loads ahead and
// spill sums.
QUIRE_INLINE void add_in_place(vi& sum, vi x, vi w) {
  asm volatile("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
}

// Keeps pointers as they are: gcc would otherwise compute them anew after a loop, from numbers in
// vector registers, and the loads of the next group would wait for that.
QUIRE_INLINE void keep(const int32_t*& inputs, const uint8_t*& wide, const uint8_t*& ahead) {
  asm volatile("" : "+r"(inputs), "+r"(wide), "+r"(ahead));
}

// Widened group: the int32 [kWidth] at which its sums start, its quads in bytes, its float32
// [kWidth] scales, and offsets of the same form if a format has any. The next group follows.
struct WideGroup {
  static constexpr int32_t kAdded = 128;  // added to the integers of x
  // Rows of a tile: 14 float32 sums, 14 sums of a group, two weights and one x leave one of 32
  // registers.
  static constexpr int kMaxRows = 7;
  static constexpr int64_t kBlockRows = 266;
  static constexpr int64_t kQuad = 4 * kWidth, kStart = 4 * kWidth, kColumns = 4 * kWidth;
  // Blocks of these formats have many tiles, so each tile fetches at most a quarter of a line per
  // quad (Block).
  static constexpr int kQuadsPerFetch = 4;

  static constexpr int64_t bytes(int64_t quads, bool offsets) {
    return kStart + quads * kQuad + (offsets ? 2 : 1) * kColumns;
  }
};

// Writes the starts of sums of products with x + 128. low, high: sums of a group's weights times
// 128.
QUIRE_INLINE void put_starts(uint8_t* to, vi low, vi high) {
  store_int(to, sub_int(set1_int(0), low));
  store_int(to + WideGroup::kStart / 2, sub_int(set1_int(0), high));
}

// Multiplies a tile by a widened panel. out: [R, kWidth]. A group is `lines` lines of kQuads quads,
// in the order of x. kScales: groups of x have scales, stored after the sums of their integers,
// x_sums [groups, R]. kOffsets: columns have offsets, which multiply these sums.
template <int R, int kQuads, bool kScales, bool kOffsets>
void multiply_wide(int64_t groups, int64_t lines, const int32_t* inputs, const int32_t* x_sums,
                   const uint8_t* wide, Ahead ahead, float* out) {
  const int32_t* x_scales = x_sums + groups * R;
  constexpr int kQuadsPerFetch = WideGroup::kQuadsPerFetch;
  constexpr int64_t kQuad = WideGroup::kQuad;
  const int64_t step = kQuadsPerFetch * ahead.step;
  vf totals[R][2];
  each_sum<R>([&](int r, int half) { totals[r][half] = zero(); });
  for (int64_t g = groups; g > 0; --g) {
    vi sums[R][2];
    each_sum<R>([&](int r, int half) { sums[r][half] = load_int(wide + half * 4 * kLanes); });
    wide += WideGroup::kStart;
    for (int64_t b = lines; b > 0; --b) {
      QUIRE_UNROLL
      for (int q = 0; q < kQuads; ++q) {
        const vi low = load_int(wide + q * kQuad), high = load_int(wide + q * kQuad + kQuad / 2);
        if (q % kQuadsPerFetch == 0) {
          _mm_prefetch(ahead.start, _MM_HINT_T1);
          ahead.start += step;
        }
        QUIRE_UNROLL
        for (int r = 0; r < R; ++r) {
          const vi value = set1_int(inputs[r * kQuads + q]);
          add_in_place(sums[r][0], value, low);
          add_in_place(sums[r][1], value, high);
        }
      }
      inputs += kQuads * R;
      wide += kQuads * kQuad;
      keep(inputs, wide, ahead.start);
    }
    const float* columns = reinterpret_cast<const float*>(wide);
    const vf scales[2] = {load(columns), load(columns + kLanes)};
    ahead.fetch_line();
    each_sum<R>([&](int r, int half) {
      const vf sum = kScales ? scaled_sum(sums[r][half], x_scales + r) : to_float(sums[r][half]);
      totals[r][half] = fma(sum, scales[half], totals[r][half]);
    });
    wide += WideGroup::kColumns;
    if constexpr (kOffsets) {
      const vf offsets[2] = {load(columns + kWidth), load(columns + kWidth + kLanes)};
      each_sum<R>([&](int r, int half) {
        const vf sum = scaled_sum(set1_int(x_sums[r]), x_scales + r);
        totals[r][half] = fma(sum, offsets[half], totals[r][half]);
      });
      wide += WideGroup::kColumns;
    }
    x_sums += R;
    x_scales += R;
  }
  each_sum<R>([&](int r, int half) { store(out + place(r, half), totals[r][half]); });
}

}  // namespace quire::linear_int

#endif
