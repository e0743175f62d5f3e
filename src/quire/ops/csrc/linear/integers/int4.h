// Common part of the ways to multiply by 4-bit weights. linear_int4.cpp describes the packed form.
#pragma once

#include "linear/integers/int.h"

namespace quire::linear_int {

constexpr int kQuadBytes = 2 * kWidth;   // in a panel
constexpr int kScaleBytes = 2 * kWidth;  // in a group of a panel
constexpr int kSymmetricZero = 8;
constexpr int64_t kZerosAhead = 256;  // bytes, as far ahead as weights are prefetched

// kZeros: there are zero points.
template <bool kZeros>
struct Int4Weights {
  const uint8_t* weight;
  const uint8_t* zeros;
  int64_t group_size, groups, inputs_per_row;
  int64_t sums_per_row = groups;
  int32_t sum_factor = kZeros ? -1 : -kSymmetricZero;

  static constexpr int32_t kAdded = 0;  // added to the integers of x
  int64_t group_quads() const { return group_size / 4; }
  int64_t group_bytes() const { return group_quads() * kQuadBytes + kScaleBytes; }
  const uint8_t* panel(int64_t index) const { return weight + index * groups * group_bytes(); }
  // True where tiles read panels as open(index, memory) lays them out instead of the packed form.
  static constexpr bool kOpens = false;
  static constexpr bool kSums = true;  // tiles need the sums of the integers
  static constexpr bool kStages = false;  // staged outputs take up to 5 % more time (measured)

  // Starts the sums of a group at minus the zero point times the sum of the integers. If all zero
  // points are the same, minus_sums already is that product.
  template <int R>
  QUIRE_INLINE void start_group(vi (&sums)[R][2], const int32_t* minus_sums, int64_t index,
                                int64_t g) const {
    vi zero[2];
    if (kZeros) {
      const uint8_t* of_group = zeros + (index * groups + g) * kLanes;
      load_halves(of_group, zero[0], zero[1]);
      _mm_prefetch(of_group + kZerosAhead, _MM_HINT_T1);
    }
    each_sum<R>([&](int r, int half) {
      const vi sum = set1_int(minus_sums[r]);
      sums[r][half] = kZeros ? pairs(zero[half], sum) : sum;
    });
  }
};

}  // namespace quire::linear_int
