// Arithmetic on one row of activations, such as a norm or a rotation. The result depends on that
// row alone.
#pragma once

#include "native/simd.h"

namespace quire {

// Parts of a row: two whole vectors at a time while it is long enough, one whole vector, and part
// of one at its end.
struct Two {};
struct Whole {};
struct Part {
  int n;
};
template <class E>
QUIRE_INLINE vf2 get(const E* p, Two) {
  return load_both(p);
}
template <class E>
QUIRE_INLINE vf get(const E* p, Whole) {
  return load(p);
}
template <class E>
QUIRE_INLINE vf get(const E* p, Part part) {
  return load_part(p, part.n);
}
template <class E>
QUIRE_INLINE void put(E* p, vf2 x, Two) {
  store_both(p, x);
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

// Calls body(i, Two) as long as possible, then body as each_vector() does.
template <class F>
QUIRE_INLINE void each_two(int64_t first, int64_t last, F&& body) {
  int64_t i = first;
  for (; i + 2 * kLanes <= last; i += 2 * kLanes) body(i, Two());
  each_vector(i, last, body);
}

// Clears the lanes after the end of a row.
QUIRE_INLINE vf2 kept(vf2 x, Two) { return x; }
QUIRE_INLINE vf kept(vf x, Whole) { return x; }
QUIRE_INLINE vf kept(vf x, Part part) { return select(lanes(0, part.n), x, zero()); }

// Returns the sum, lane by lane, of what step(sum, i, Two or Whole or Part) adds over a row. Two
// alternating sums hide half of the latency; their order depends on the width and the types alone.
template <class F>
QUIRE_INLINE vf lane_sums_over(int64_t width, F&& step) {
  vf2 total{zero(), zero()};
  int64_t i = 0;
  for (; i + 2 * kLanes <= width; i += 2 * kLanes) total = step(total, i, Two());
  each_vector(i, width, [&](int64_t at, auto size) { total.a = step(total.a, at, size); });
  return add(total.a, total.b);
}
template <class F>
QUIRE_INLINE float sum_over(int64_t width, F&& step) {
  return sum(lane_sums_over(width, step));
}

// Stores elements of x + y, rounded to the element type.
template <class E, class Size>
QUIRE_INLINE void put_sum(const E* x, const E* y, E* total, Size size) {
  put(total, add(get(x, size), get(y, size)), size);
}

template <class E, class V, class Size>
QUIRE_INLINE V add_squares(const E* p, V total, Size size) {
  const V x = get(p, size);
  return fma(x, x, total);
}
#if defined(__AVX512BF16__)
QUIRE_INLINE vf2 add_squares(const bf16* p, vf2 total, Two) {
  const auto x = reinterpret_cast<__m512bh>(_mm512_loadu_si512(p));
  return {total.b, _mm512_dpbf16_ps(total.a, x, x)};
}
#endif

// Returns the sum of squares of a row, lane by lane. before(i, size) fills in the elements from i
// on.
template <class E, class F>
QUIRE_INLINE vf squares_of(const E* x, int64_t width, F&& before) {
  return lane_sums_over(width, [&](auto total, int64_t i, auto size) {
    before(i, size);
    return add_squares(x + i, total, size);
  });
}
template <class E>
QUIRE_INLINE vf squares_of(const E* x, int64_t width) {
  return squares_of(x, width, [](int64_t, auto) {});
}

// Returns the factor of RMSNorm for a row.
QUIRE_INLINE float rms_scale(vf squares, int64_t width, float eps) {
  const float mean = sum(squares) / static_cast<float>(width);
  return 1.0f / std::sqrt(mean + eps);
}

// Returns elements of RMSNorm, not yet rounded. The normed x is rounded before the weight
// multiplies it.
template <class E, class V>
QUIRE_INLINE V normed(V x, V weight, vf scale) {
  return mul(weight, rounded<E>(mul(x, scale)));
}

template <class E>
QUIRE_INLINE void normalise(const E* x, const E* weight, vf scale, E* out, int64_t width) {
  each_two(0, width, [&](int64_t i, auto size) {
    put(out + i, normed<E>(get(x + i, size), get(weight + i, size), scale), size);
  });
}

// Applies LayerNorm, with the variance from differences to the mean. weight, bias: may be null.
template <class E>
QUIRE_INLINE void layer_normalise(const E* x, const E* weight, const E* bias, E* out,
                                  int64_t width, float eps) {
  const float count = static_cast<float>(width);
  const vf mean = set1(sum_over(width, [&](auto total, int64_t i, auto size) {
                         return add(total, get(x + i, size));
                       }) / count);
  const float squares = sum_over(width, [&](auto total, int64_t i, auto size) {
    const auto difference = kept(sub(get(x + i, size), mean), size);
    return fma(difference, difference, total);
  });
  const vf scale = set1(1.0f / std::sqrt(squares / count + eps));
  each_two(0, width, [&](int64_t i, auto size) {
    auto value = mul(sub(get(x + i, size), mean), scale);
    if (weight != nullptr) value = mul(value, get(weight + i, size));
    if (bias != nullptr) value = add(value, get(bias + i, size));
    put(out + i, value, size);
  });
}

}  // namespace quire
