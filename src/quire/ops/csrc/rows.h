// Arithmetic on one row of activations: a norm, a rotation. What comes out depends on that row alone.
#pragma once

#include "simd.h"

namespace quire {

// A row is whole vectors and, at its end, part of one.
struct Whole {};
struct Part {
  int n;
};
template <class E>
QUIRE_INLINE vf get(const E* p, Whole) {
  return load(p);
}
template <class E>
QUIRE_INLINE vf get(const E* p, Part part) {
  return load_part(p, part.n);
}
template <class E>
QUIRE_INLINE void put(E* p, vf x, Whole) {
  store(p, x);
}
template <class E>
QUIRE_INLINE void put(E* p, vf x, Part part) {
  store_part(p, x, part.n);
}

// Calls body(i, Whole or Part) over [first, last).
template <class F>
QUIRE_INLINE void each_vector(int64_t first, int64_t last, F&& body) {
  int64_t i = first;
  for (; i + kLanes <= last; i += kLanes) body(i, Whole());
  if (i < last) body(i, Part{static_cast<int>(last - i)});
}

// Two sums in turn hide half of the add latency; their order depends on the width alone.
template <class E>
QUIRE_INLINE float sum_of_squares(const E* x, int64_t width) {
  vf even = zero(), odd = zero();
  int64_t i = 0;
  for (; i + 2 * kLanes <= width; i += 2 * kLanes) {
    const vf a = load(x + i), b = load(x + i + kLanes);
    even = fma(a, a, even);
    odd = fma(b, b, odd);
  }
  each_vector(i, width, [&](int64_t at, auto size) {
    const vf a = get(x + at, size);
    even = fma(a, a, even);
  });
  return sum(add(even, odd));
}

template <class E>
QUIRE_INLINE void normalise(const E* x, const E* weight, E* out, int64_t width, float eps,
                            bool unit_offset) {
  const float mean = sum_of_squares(x, width) / static_cast<float>(width);
  const vf scale = set1(1.0f / std::sqrt(mean + eps));
  if (unit_offset) {
    each_vector(0, width, [&](int64_t i, auto size) {
      const vf normed = mul(get(x + i, size), scale);
      put(out + i, mul(normed, add(set1(1.0f), get(weight + i, size))), size);
    });
  } else {
    each_vector(0, width, [&](int64_t i, auto size) {
      const vf normed = mul(get(x + i, size), scale);
      put(out + i, mul(get(weight + i, size), rounded<E>(normed)), size);
    });
  }
}

template <class E>
QUIRE_INLINE void rotate_halves(E* x, const float* cos, const float* sin, int64_t half) {
  each_vector(0, half, [&](int64_t i, auto size) {
    const vf a = get(x + i, size), b = get(x + half + i, size);
    const vf c = get(cos + i, size), s = get(sin + i, size);
    put(x + i, sub(mul(a, c), mul(b, s)), size);
    put(x + half + i, add(mul(b, c), mul(a, s)), size);
  });
}

template <class E>
QUIRE_INLINE void rotate_pairs(E* x, const float* cos, const float* sin, int64_t half) {
  float pairs[2 * kLanes];
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t n = half - i < kLanes ? half - i : kLanes;
    each_vector(0, 2 * n, [&](int64_t j, auto size) { store(pairs + j, get(x + 2 * i + j, size)); });
    for (int64_t j = 0; j < n; ++j) {
      const float a = pairs[2 * j], b = pairs[2 * j + 1], c = cos[i + j], s = sin[i + j];
      pairs[2 * j] = a * c - b * s;
      pairs[2 * j + 1] = b * c + a * s;
    }
    each_vector(0, 2 * n, [&](int64_t j, auto size) { put(x + 2 * i + j, load(pairs + j), size); });
  }
}

}  // namespace quire
