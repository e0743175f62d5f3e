// Rows of activations as 8-bit integers, in the order in which a format of integer weights reads
// them.
#pragma once

#include <algorithm>
#include <limits>

#include "linear/integers/rotation.h"
#include "linear/panels.h"
#include "native/simd_int.h"

namespace quire::linear_int {

constexpr float kSmallest = 1e-30f;  // rows whose largest magnitude is below count as zeros

inline bool is_usable(float largest) {
  return largest <= std::numeric_limits<float>::max() && largest >= kSmallest;
}
// Returns the scale of the integers of a row.
inline float scale_of_row(float largest) {
  if (is_usable(largest)) return largest / 127.0f;
  return largest < kSmallest ? 0.0f : std::numeric_limits<float>::quiet_NaN();
}

// Rows of x as integers. inputs: in the order of the format. sums: [groups, rows], the sum of a
// group's integers times a factor of the format. scales: [rows]. A format whose groups have scales
// keeps these, as bits [groups, rows], behind the sums.
struct QuantizedRows {
  int32_t* inputs;
  int32_t* sums;
  float* scales;
  int64_t rows;
};

// Quantizes N rows of x into `target`, from its row r on. Two rows share cache lines, which are
// then written once. ahead: memory to prefetch meanwhile, a cache line per kFetchQuads quads.
// given: largest magnitudes of the whole rows where x is only part of them, else null.
template <int N, class Format, class E, class A>
void quantize_rows(const Format& format, const E* x, int64_t x_stride, int64_t depth,
                   QuantizedRows target, int64_t r, A& ahead, const float* given) {
  vf inverse[N];
  vi keep[N];
  for (int i = 0; i < N; ++i) {
    float largest = given != nullptr ? given[i] : 0.0f;
    if constexpr (!kIsSplit<E>) {  // split ones come with theirs
      if (given == nullptr) largest = largest_magnitude(x + i * x_stride, depth);
    }
    const bool usable = is_usable(largest);
    target.scales[r + i] = scale_of_row(largest);
    inverse[i] = set1(usable ? 127.0f / largest : 0.0f);
    keep[i] = set1_int(usable ? -1 : 0);
  }
  const auto to_numbers = [&](vf values, int i) {
    return and_int(to_int(mul(values, inverse[i])), keep[i]);
  };
  const auto stored = [](vi numbers) { return add_int(numbers, set1_int(Format::kAdded)); };
  const auto inputs = [&](int64_t quad, int i) {
    return target.inputs + format.position(quad, r + i, target.rows) * Format::kQuadInputs;
  };
  constexpr int64_t kFetchQuads = 8;
  const int64_t group_size = Format::kSums ? format.group_size : depth;
  int64_t quad = 0;
  for (int64_t first = 0, group = 0; first < depth; first += group_size, ++group) {
    const int64_t end = std::min(depth, first + group_size);
    vi total[N];
    for (vi& sum : total) sum = set1_int(0);
    int64_t k = first;
    // A group is whole lines of quads, so that 8 quads are adjacent.
    if constexpr (Format::kQuadInputs == 1 && kLanes == 16) {
      for (; k + 2 * kLanes <= end; k += 2 * kLanes, quad += kLanes / 2) {
        for (int i = 0; i < N; ++i) {
          const vf2 values = load_both(x + i * x_stride + k);
          const vi a = to_numbers(values.a, i), b = to_numbers(values.b, i);
          total[i] = add_int(total[i], add_int(a, b));
          store_bytes(order_of(x), inputs(quad, i), stored(a), stored(b));
          ahead.fetch_line();
        }
      }
    }
    if constexpr (!kIsSplit<E>) {  // a group of split numbers has no rest
      for (; k < end; k += kLanes, quad += kLanes / 4) {
        for (int i = 0; i < N; ++i) {
          const vi numbers = to_numbers(load_at_most(x + i * x_stride + k, end - k), i);
          total[i] = add_int(total[i], numbers);
          if constexpr (Format::kQuadInputs == 1) {
            store_bytes(inputs(quad, i), stored(numbers));
          } else {
            static_assert(Format::kAdded == 0);
            put_byte_inputs(numbers, inputs(quad, i));
          }
          if (quad % kFetchQuads == 0) ahead.fetch_line();
        }
      }
    }
    if constexpr (Format::kSums) {
      for (int i = 0; i < N; ++i) {
        target.sums[group * target.rows + r + i] = sum(total[i]) * format.sum_factor;
      }
    }
  }
}

// Quantizes one row into row r of `target`, with a scale for each group. A group is whole vectors.
template <class Format, class E, class A>
void quantize_groups(const Format& format, const E* x, int64_t depth, QuantizedRows target,
                     int64_t r, A& ahead) {
  int64_t quad = 0;
  for (int64_t first = 0, at = r; first < depth; first += format.group_size, at += target.rows) {
    const E* const group = x + first;
    const float largest = largest_magnitude(group, format.group_size);
    const bool usable = is_usable(largest);
    const float scale = scale_of_row(largest);
    const vf inverse = set1(usable ? 127.0f / largest : 0.0f);
    const vi keep = set1_int(usable ? -1 : 0);
    vi total = set1_int(0);
    for (int64_t k = 0; k < format.group_size; k += kLanes, quad += kLanes / 4) {
      const vi numbers = and_int(to_int(mul(load(group + k), inverse)), keep);
      total = add_int(total, numbers);
      auto* const inputs =
          target.inputs + format.position(quad, r, target.rows) * Format::kQuadInputs;
      if constexpr (Format::kQuadInputs == 1) {
        store_bytes(inputs, add_int(numbers, set1_int(Format::kAdded)));
      } else {
        put_byte_inputs(numbers, inputs);
      }
    }
    ahead.fetch_line();
    target.sums[at] = sum(total);
    std::memcpy(target.sums + depth / format.group_size * target.rows + at, &scale, sizeof scale);
  }
  target.scales[r] = 1.0f;
}

// Quantizes rows [r, min(r + 2, target.rows)) of `target`. x: its first row. largest: for all of
// its rows, as in LinearCall, and so is rotation. Returns false without memory for rotated rows.
template <class Format, class E, class A>
bool quantize_pair(const Format& format, const E* x, int64_t x_stride, int64_t depth,
                   QuantizedRows target, int64_t r, A& ahead, const float* largest,
                   int64_t rotation) {
  const E* from = x + r * x_stride;
  const int64_t count = std::min<int64_t>(2, target.rows - r);
  if constexpr (Format::kGroupScales) {
    for (int64_t i = 0; i < count; ++i, from += x_stride) {
      quantize_groups(format, from, depth, target, r + i, ahead);
    }
  } else {
    const auto quantize = [&](const auto* rows, int64_t stride, const float* given) {
      if (count == 2) quantize_rows<2>(format, rows, stride, depth, target, r, ahead, given);
      if (count == 1) quantize_rows<1>(format, rows, stride, depth, target, r, ahead, given);
    };
    const float* const given = largest == nullptr ? nullptr : largest + r;
    if (rotation == 1) {
      quantize(from, x_stride, given);
    } else if (count > 0) {
      float own[2];
      const auto rotate_to = [&](auto* rows) {
        for (int64_t i = 0; i < count && rows != nullptr; ++i) {
          own[i] = rotate_row(from + i * x_stride, rows + i * depth, depth, rotation);
        }
        return rows;
      };
      if constexpr (std::is_same_v<E, bf16> && Format::kQuadInputs == 1 && kLanes == 16) {
        if (rotation >= 2 * kLanes) {  // split numbers are widened and narrowed faster
          const auto* const rows = rotate_to(rotated_rows<Split<E>>(count * depth));
          if (rows == nullptr) return false;
          quantize(rows, depth, given == nullptr ? own : given);
          return true;
        }
      }
      const auto* const rows = rotate_to(rotated_rows(count * depth));
      if (rows == nullptr) return false;
      quantize(&rows->number, depth, given == nullptr ? own : given);
    }
  }
  return true;
}

}  // namespace quire::linear_int
