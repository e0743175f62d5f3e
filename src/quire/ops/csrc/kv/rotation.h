// Rotation of heads by the position of their token.
#pragma once

#include "native/rows.h"

namespace quire {

// Rotation of a token: dim i of the first `half` turns with dim i + half.
struct Turn {
  const float *cos, *sin;
  int64_t half;
};

// Loads cos or sin in the order of lanes that elements of E have.
template <class E>
QUIRE_INLINE vf2 get_angle(const float* p, Two) {
  return load_both_as(static_cast<const E*>(nullptr), p);
}
template <class E, class Size>
QUIRE_INLINE vf get_angle(const float* p, Size size) {
  return get(p, size);
}

// Writes the rotated part of heads that are head_dim elements apart. value(i, size)(h) returns the
// elements of head h from i on before the rotation; x is not read otherwise. Heads share the loads
// for i.
template <class E, class F>
QUIRE_INLINE void rotate(E* x, int64_t heads, int64_t head_dim, const Turn& turn, F&& value) {
  each_two(0, turn.half, [&](int64_t i, auto size) {
    const auto c = get_angle<E>(turn.cos + i, size), s = get_angle<E>(turn.sin + i, size);
    const auto low = value(i, size), high = value(turn.half + i, size);
    for (int64_t h = 0; h < heads; ++h) {
      E* at = x + h * head_dim + i;
      const auto a = low(h), b = high(h);
      put(at, sub(mul(a, c), mul(b, s)), size);
      put(at + turn.half, add(mul(b, c), mul(a, s)), size);
    }
  });
}

}  // namespace quire
