// Rotation of rows by a Hadamard matrix in blocks of neighbours, as ops/linear/rotate/reference.py
// defines it, in the same order of additions: so it has the same bits in any instruction set.
#pragma once

#include <algorithm>
#include <type_traits>

#include "native/rows.h"
#include "native/scratch.h"
#include "native/simd_int.h"

namespace quire::linear_int {

// Returns the sum of each pair of lanes kDistance apart in the first of them, and the difference in
// the second.
template <int kDistance>
QUIRE_INLINE vf add_lanes(vf x) {
  if constexpr (kDistance < kLanes) {
    constexpr uint64_t kSecond = kDistance == 1 ? 0xaaaa : kDistance == 2 ? 0xcccc
                               : kDistance == 4 ? 0xf0f0 : 0xff00;
    const vf sign = select(lanes_of(kSecond), set1(-1.0f), set1(1.0f));
    return fma(x, sign, swap_lanes<kDistance>(x));
  } else {
    return x;
  }
}

// The same with vectors, for this distance and all larger ones.
template <int kDistance, int kVectors>
QUIRE_INLINE void add_vectors(vf (&x)[kVectors]) {
  if constexpr (kDistance < kVectors) {
    QUIRE_UNROLL
    for (int pair = 0; pair < kVectors / 2; ++pair) {
      const int i = pair / kDistance * 2 * kDistance + pair % kDistance;
      const vf first = x[i], second = x[i + kDistance];
      x[i] = add(first, second);
      x[i + kDistance] = sub(first, second);
    }
    add_vectors<2 * kDistance>(x);
  }
}

// Numbers of rotated rows. In split ones the even ones of 2 kLanes come before the odd ones, as
// load_both() gives those of E.
struct Natural {
  float number;
};
template <class E>
struct Split {
  float number;
};
using quire::load_both;
template <class E>
QUIRE_INLINE vf2 load_both(const Split<E>* p) {
  return {quire::load(&p->number), quire::load(&p[kLanes].number)};
}
template <class E>
constexpr bool kIsSplit = false;
template <class E>
constexpr bool kIsSplit<Split<E>> = true;
// Returns a pointer of the type that tells the order of load_both().
template <class E>
QUIRE_INLINE const E* order_of(const E* x) {
  return x;
}
template <class E>
QUIRE_INLINE const E* order_of(const Split<E>*) {
  return nullptr;
}

// Loads kVectors vectors of x and adds its neighbours, up to the width of a vector.
template <int kVectors, class E>
QUIRE_INLINE void load_added(const E* x, vf (&values)[kVectors], Natural*) {
  QUIRE_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    const vf value = add_lanes<2>(add_lanes<1>(quire::load(x + i * kLanes)));
    values[i] = add_lanes<8>(add_lanes<4>(value));
  }
  add_vectors<1>(values);
}
// The same for split numbers: even and odd ones are neighbours.
template <int kVectors, class E>
QUIRE_INLINE void load_added(const E* x, vf (&values)[kVectors], Split<E>*) {
  QUIRE_UNROLL
  for (int i = 0; i < kVectors; i += 2) {
    const vf2 both = quire::load_both(x + i * kLanes);
    values[i] = add(both.a, both.b);
    values[i + 1] = sub(both.a, both.b);
  }
  QUIRE_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    const vf value = add_lanes<2>(add_lanes<1>(values[i]));
    values[i] = add_lanes<8>(add_lanes<4>(value));
  }
  add_vectors<2>(values);
}

// Rotates a row in pieces of kVectors vectors. Returns its largest magnitude, lane by lane as bits.
template <int kVectors, class E, class Number>
vi rotate_pieces(const E* x, Number* to, int64_t depth) {
  float* const out = &to->number;
  vi top = set1_int(0);
  for (int64_t k = 0; k < depth; k += kVectors * kLanes) {
    vf values[kVectors];
    load_added(x + k, values, to);
    QUIRE_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      top = max_int(top, and_int(bits_of(values[i]), set1_int(0x7fffffff)));
      store(out + k + i * kLanes, values[i]);
    }
  }
  return top;
}

// Writes x to out, both [depth], rotated in blocks of `block`: a power of two from 16 on that
// divides the depth, of split numbers from 2 kLanes on. out may be x. Returns the largest magnitude,
// infinity or NaN if there is one.
template <class E, class Number>
float rotate_row(const E* x, Number* to, int64_t depth, int64_t block) {
  constexpr int64_t kMostVectors = 16;  // in registers
  constexpr bool kNatural = std::is_same_v<Number, Natural>;
  float* const out = &to->number;
  const int64_t piece = std::min(block, kMostVectors * kLanes);
  const vi top = [&] {
    switch (piece / kLanes) {
      case 1: return rotate_pieces<kNatural ? 1 : 2>(x, to, depth);
      case 2: return rotate_pieces<2>(x, to, depth);
      case 4: return rotate_pieces<4>(x, to, depth);
      case 8: return rotate_pieces<8>(x, to, depth);
      default: return rotate_pieces<kMostVectors>(x, to, depth);
    }
  }();
  if (piece == block) return first_lane(float_of(set1_int(maximum(top))));
  for (int64_t distance = piece; distance < block; distance *= 2) {
    for (int64_t first = 0; first < depth; first += 2 * distance) {
      for (float* at = out + first; at < out + first + distance; at += kLanes) {
        const vf a = quire::load(at), b = quire::load(at + distance);
        store(at, add(a, b));
        store(at + distance, sub(a, b));
      }
    }
  }
  return largest_magnitude(out, depth);
}

// Returns memory of this thread for rotated rows, or null.
template <class Number = Natural>
Number* rotated_rows(int64_t elements) {
  return static_cast<Number*>(thread_scratch<Natural>(elements * sizeof(Number)));
}

// Makes a row of a table and stores it at `out` as it was before it was rotated; block: 1 for none.
// unpack(to): writes `depth` numbers, as E or as float. Returns false without memory.
template <class E, class F>
bool put_unrotated(E* out, int64_t depth, int64_t block, F&& unpack) {
  if (block == 1) {
    unpack(out);
    return true;
  }
  Natural* const rotated = rotated_rows(depth);
  if (rotated == nullptr) return false;
  float* const row = &rotated->number;
  unpack(row);
  rotate_row(row, rotated, depth, block);
  each_vector(0, depth, [&](int64_t k, auto size) { quire::put(out + k, get(row + k, size), size); });
  return true;
}

}  // namespace quire::linear_int
