// Activation functions on vectors. NaN stays NaN.
#pragma once

#include "native/simd.h"

namespace quire {

enum class Activation : int32_t {
  kGelu = 0, kGeluTanh = 1, kRelu = 2, kSilu = 3, kClampedSwiglu = 4, kReluSquared = 5
};

// Returns e^-x for x >= 0; 0 where that is below 2^-126.
QUIRE_INLINE vf exp_of_minus(vf x) { return exp2_negative(mul(x, set1(-kLog2E))); }

// Returns tanh x = (1 - e^-2|x|) / (1 + e^-2|x|) with the sign of x; this is 1 from 20 on. Near
// zero, where that difference has few digits, takes the series of x to x⁷: the next term is below
// 1e-8 of the sum.
QUIRE_INLINE vf tanh_of(vf x) {
  x = max(set1(-20.0f), min(set1(20.0f), x));
  const vf size = absolute(x), square = mul(x, x);
  vf series = fma(square, set1(-17.0f / 315.0f), set1(2.0f / 15.0f));
  series = fma(series, square, set1(-1.0f / 3.0f));
  series = fma(mul(series, square), x, x);
  const vf e = exp_of_minus(add(size, size));
  const vf ratio = div(sub(set1(1.0f), e), mul(size, add(set1(1.0f), e)));
  return select(less(size, set1(0.15f)), series, mul(ratio, x));
}

// GELU: x Φ(x) = x (1 + erf(x / √2)) / 2 (Hendrycks & Gimpel 2016, arXiv:1606.08415, section 2),
// with 1 - erf(z) ≈ (a1 t + … + a5 t⁵) e^-z², t = 1 / (1 + p z), z >= 0, off by at most 1.5e-7
// (Abramowitz & Stegun, "Handbook of Mathematical Functions", 7.1.26).
struct Gelu {
  QUIRE_INLINE vf operator()(vf x) const {
    const vf z = mul(absolute(x), set1(0.70710678f));
    const vf t = div(set1(1.0f), fma(z, set1(0.3275911f), set1(1.0f)));
    vf p = set1(1.061405429f);
    p = fma(p, t, set1(-1.453152027f));
    p = fma(p, t, set1(1.421413741f));
    p = fma(p, t, set1(-0.284496736f));
    p = fma(p, t, set1(0.254829592f));
    const vf tail = mul(mul(mul(p, t), exp_of_minus(mul(z, z))), set1(0.5f));  // Φ(-|x|)
    return mul(x, select(less(x, zero()), tail, sub(set1(1.0f), tail)));
  }
};

// GELU by tanh, the same paper's approximation: x (1 + tanh u) / 2 = x / (1 + e^-2u), u = √(2/π) (x
// + 0.044715 x³).
struct GeluTanh {
  QUIRE_INLINE vf operator()(vf x) const {
    const vf cubic = fma(mul(mul(x, x), set1(0.044715f)), x, x);
    const vf u = mul(cubic, set1(2.0f * 0.79788456f));
    const vf e = exp_of_minus(absolute(u));
    return div(mul(x, select(less(u, zero()), e, set1(1.0f))), add(set1(1.0f), e));
  }
};

struct Relu {
  QUIRE_INLINE vf operator()(vf x) const { return max(zero(), x); }
};

struct ReluSquared {
  QUIRE_INLINE vf operator()(vf x) const {
    const vf positive = max(zero(), x);
    return mul(positive, positive);
  }
};

// Returns 1 / (1 + e^-x).
QUIRE_INLINE vf logistic(vf x) {
  return div(set1(1.0f), add(set1(1.0f), exp2_saturating(mul(x, set1(-kLog2E)))));
}

// SiLU: x / (1 + e^-x).
struct Silu {
  QUIRE_INLINE vf operator()(vf x) const {
    return div(x, add(set1(1.0f), exp2_saturating(mul(x, set1(-kLog2E)))));
  }
};

// SwiGLU with clamps: x / (1 + e^-1.702x) of x up to 7, for a gate whose other factor u is 1 + u,
// |u| <= 7 (OpenAI 2025, arXiv:2508.10925, section 2.2).
struct ClampedSwiglu {
  static constexpr float kAlpha = 1.702f, kLimit = 7.0f;  // in ops/pointwise/activation/contract.py
  QUIRE_INLINE vf operator()(vf x) const {
    x = min(set1(kLimit), x);
    return mul(x, logistic(mul(x, set1(kAlpha))));
  }
  QUIRE_INLINE vf factor(vf up) const {
    up = max(set1(-kLimit), min(set1(kLimit), up));
    return add(up, set1(1.0f));
  }
};

// Returns the other factor of a gate.
template <class A>
QUIRE_INLINE vf factor_of(A, vf up) {
  return up;
}
QUIRE_INLINE vf factor_of(ClampedSwiglu gate, vf up) { return gate.factor(up); }

// Calls f with the activation. Returns 1 if it is unknown.
template <class F>
QUIRE_INLINE int dispatch_activation(int32_t kind, F&& f) {
  switch (static_cast<Activation>(kind)) {
    case Activation::kGelu:
      f(Gelu());
      return 0;
    case Activation::kGeluTanh:
      f(GeluTanh());
      return 0;
    case Activation::kRelu:
      f(Relu());
      return 0;
    case Activation::kSilu:
      f(Silu());
      return 0;
    case Activation::kClampedSwiglu:
      f(ClampedSwiglu());
      return 0;
    case Activation::kReluSquared:
      f(ReluSquared());
      return 0;
  }
  return 1;
}

// Calls f with a null pointer of the element type, and the activation. Returns 1 if one of them is
// unknown.
template <class F>
int dispatch(DType dtype, int32_t kind, F&& f) {
  int unknown = 0;
  const int unknown_kind = dispatch_activation(kind, [&](auto activation) {
    unknown = dispatch(dtype, [&](auto* tag) { f(tag, activation); });
  });
  return unknown_kind != 0 ? unknown_kind : unknown;
}

}  // namespace quire
