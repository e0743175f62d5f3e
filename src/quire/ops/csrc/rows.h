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

// Zero in the lanes after the end of a row.
QUIRE_INLINE vf kept(vf x, Whole) { return x; }
QUIRE_INLINE vf kept(vf x, Part part) { return select(lanes(0, part.n), x, zero()); }

// The sum over a row of what step(sum, i, Whole or Part) adds. Two sums in turn hide half of the
// latency; their order depends on the width alone.
template <class F>
QUIRE_INLINE float sum_over(int64_t width, F&& step) {
  vf even = zero(), odd = zero();
  int64_t i = 0;
  for (; i + 2 * kLanes <= width; i += 2 * kLanes) {
    even = step(even, i, Whole());
    odd = step(odd, i + kLanes, Whole());
  }
  each_vector(i, width, [&](int64_t at, auto size) { even = step(even, at, size); });
  return sum(add(even, odd));
}

// Elements [first, last) of x + y, rounded to the element type.
template <class E>
QUIRE_INLINE void add_rows(const E* x, const E* y, E* total, int64_t first, int64_t last) {
  each_vector(first, last, [&](int64_t i, auto size) {
    put(total + i, add(get(x + i, size), get(y + i, size)), size);
  });
}

// What RMSNorm multiplies a row by.
template <class E>
QUIRE_INLINE float rms_scale(const E* x, int64_t width, float eps) {
  const float squares = sum_over(width, [&](vf total, int64_t i, auto size) {
    const vf value = get(x + i, size);
    return fma(value, value, total);
  });
  const float mean = squares / static_cast<float>(width);
  return 1.0f / std::sqrt(mean + eps);
}

// A vector of RMSNorm, not yet rounded; the norm is before it is multiplied by the weight.
template <class E, class Size>
QUIRE_INLINE vf normed(const E* x, const E* weight, vf scale, Size size) {
  return mul(get(weight, size), rounded<E>(mul(get(x, size), scale)));
}

template <class E>
QUIRE_INLINE void normalise(const E* x, const E* weight, E* out, int64_t width, float eps) {
  const vf scale = set1(rms_scale(x, width, eps));
  each_vector(0, width, [&](int64_t i, auto size) {
    put(out + i, normed(x + i, weight + i, scale, size), size);
  });
}

// LayerNorm, the variance from differences to the mean. weight, bias: may be null.
template <class E>
QUIRE_INLINE void layer_normalise(const E* x, const E* weight, const E* bias, E* out,
                                  int64_t width, float eps) {
  const float count = static_cast<float>(width);
  const vf mean = set1(sum_over(width, [&](vf total, int64_t i, auto size) {
                         return add(total, get(x + i, size));
                       }) / count);
  const float squares = sum_over(width, [&](vf total, int64_t i, auto size) {
    const vf difference = kept(sub(get(x + i, size), mean), size);
    return fma(difference, difference, total);
  });
  const vf scale = set1(1.0f / std::sqrt(squares / count + eps));
  each_vector(0, width, [&](int64_t i, auto size) {
    vf value = mul(sub(get(x + i, size), mean), scale);
    if (weight != nullptr) value = mul(value, get(weight + i, size));
    if (bias != nullptr) value = add(value, get(bias + i, size));
    put(out + i, value, size);
  });
}

// Dim i of the first 2 · half with i + half, in place. value(i, Whole or Part): the elements from i
// on, which is all that is read of x.
template <class E, class F>
QUIRE_INLINE void rotate_halves(E* x, const float* cos, const float* sin, int64_t half, F&& value) {
  each_vector(0, half, [&](int64_t i, auto size) {
    const vf a = value(i, size), b = value(half + i, size);
    const vf c = get(cos + i, size), s = get(sin + i, size);
    put(x + i, sub(mul(a, c), mul(b, s)), size);
    put(x + half + i, add(mul(b, c), mul(a, s)), size);
  });
}

}  // namespace quire
