// Attention over an int8 cache by exact products of 8-bit integers (AVX512_VNNI).
//
// Widening int8 to float32 keeps a core busier than its memory. Here queries and weights become
// integers of 16 bits with one float step per query row and, for weights, per key block: score =
// step · Σ q k, output += step · Σ w v, both sums exact. That is far below what bfloat16 queries
// resolve, so these alone come here: those of more digits keep to float32. What a query computes
// depends on its own keys alone, as in attention_tile.h.
#pragma once

#include "attention_range.h"
#include "simd_int.h"

namespace quire::attention {

constexpr int kMaxIntegerDim = 512;  // of a head: Σ q k stays within 32 bits

#if defined(__AVX512VNNI__)

constexpr bool kIntegerProducts = true;
constexpr int kQueryTop = 127 * 256, kWeightTop = 65535;

QUIRE_INLINE vi dot(vi sum, raw unsigned_bytes, raw signed_bytes) {
  return (vi)_mm512_dpbusd_epi32((raw)sum, unsigned_bytes, signed_bytes);
}
QUIRE_INLINE raw join_bytes(vi high, vi low) {
  return _mm512_add_epi32(_mm512_slli_epi32((raw)high, 8), (raw)low);
}
// Bytes [0, n) of p, n < kBytes; zeros after them.
QUIRE_INLINE raw load_bytes(const int8_t* p, int n) {
  return _mm512_maskz_loadu_epi8((__mmask64{1} << n) - 1, p);
}

// Sums of the lanes of 16 vectors, in three steps; integers come out alike in any order.
// Halves of a vector onto each other: what is left of a lies in the lower half, of b above.
QUIRE_INLINE raw fold_halves(raw a, raw b) {
  return _mm512_add_epi32(_mm512_shuffle_i64x2(a, b, 0x4E), _mm512_mask_blend_epi64(0xF0, a, b));
}
// Quarters within each half: a's and b's in turn.
QUIRE_INLINE raw fold_quarters(raw a, raw b) {
  const raw crossed = _mm512_mask_blend_epi64(0x33, a, b);
  return _mm512_add_epi32(_mm512_shuffle_i64x2(crossed, crossed, 0xB1),
                          _mm512_mask_blend_epi64(0xCC, a, b));
}
// Lanes within each quarter: of x[0], x[1], x[2], x[3].
QUIRE_INLINE raw fold_lanes(const raw (&x)[4]) {
  const raw a =
      _mm512_add_epi32(_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[0], x[1]));
  const raw b =
      _mm512_add_epi32(_mm512_unpacklo_epi32(x[2], x[3]), _mm512_unpackhi_epi32(x[2], x[3]));
  return _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
}

// The step of x [n], n whole vectors, whose largest magnitude becomes `top`: 0 when everything is
// next to nothing, NaN when something is not finite.
QUIRE_INLINE float integer_step(const float* x, int n, float top) {
  vf most = zero(), broken = zero();
  for (int i = 0; i < n; i += kLanes) {
    most = max(absolute(load(x + i)), most);
    broken = fma(load(x + i), zero(), broken);
  }
  if (sum(broken) != 0.0f) return std::numeric_limits<float>::quiet_NaN();
  const float step = maximum(most) / top;
  return step < std::numeric_limits<float>::min() ? 0.0f : step;
}

// Calls put(i, x[i …] / step rounded to integers) over whole vectors; zeros unless step > 0.
template <class F>
QUIRE_INLINE void to_integers(const float* x, int n, float step, F&& put) {
  const vf inverse = set1(step > 0.0f ? 1.0f / step : 0.0f);
  for (int i = 0; i < n; i += kLanes)
    put(i, step > 0.0f ? _mm512_cvtps_epi32(mul(load(x + i), inverse)) : _mm512_setzero_si512());
}

// One query row [width], scaled floats, into its place among the integers.
inline void round_query(const float* q, int width, int depth, int row, const IntegerScratch& out) {
  int8_t* high = out.q + int64_t{row} * 2 * depth;
  int8_t* low = high + depth;
  std::memset(high, 0, 2 * depth);
  const float step = integer_step(q, width, kQueryTop);
  raw total = _mm512_setzero_si512();
  to_integers(q, width, step, [&](int i, raw x) {
    total = _mm512_add_epi32(total, x);
    // x = 256 · high + low, -128 <= low <= 127
    const raw upper = _mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(128)), 8);
    store_bytes(high + i, (vi)upper);
    store_bytes(low + i, (vi)x);
  });
  out.q_step[row] = step;
  out.q_offset[row] = 128 * _mm512_reduce_add_epi32(total);
}

// One row's weights of a key block, after the softmax.
inline void round_weights(const float* weights, int row, const IntegerScratch& out) {
  uint8_t* high = out.weights + int64_t{row} * 2 * kKeyBlock;
  const float step = integer_step(weights, kKeyBlock, kWeightTop);
  to_integers(weights, kKeyBlock, step, [&](int i, raw x) {
    store_bytes(high + i, (vi)_mm512_srli_epi32(x, 8));
    store_bytes(high + kKeyBlock + i, (vi)x);
  });
  out.weight_step[row] = step;
}

// scores[r][j] = q[r] · k[j] for NR adjacent rows and kLanes / NR keys. Keys become unsigned by
// adding 128, which q_offset takes back.
template <int NR>
QUIRE_INLINE void integer_scores(const IntegerScratch& ints, int row, int depth, int head_dim,
                                 const int8_t* const* k, int64_t at, float* scores,
                                 Ahead<int8_t>* ahead) {
  constexpr int NK = 8 / NR;  // keys at a time, in two halves
  const int8_t* q = ints.q + int64_t{row} * 2 * depth;
  const raw flip = _mm512_set1_epi8(-128);
  raw halves[2][4];
  QUIRE_UNROLL
  for (int half = 0; half < 2; ++half) {
    vi high[8], low[8];
    QUIRE_UNROLL
    for (int i = 0; i < 8; ++i) high[i] = low[i] = set1_int(0);
    auto multiply = [&](int d, auto&& load_key) __attribute__((always_inline)) {
      raw queries[NR][2];
      QUIRE_UNROLL
      for (int r = 0; r < NR; ++r)
        for (int part = 0; part < 2; ++part)
          queries[r][part] = _mm512_loadu_si512(q + (2 * r + part) * depth + d);
      QUIRE_UNROLL
      for (int j = 0; j < NK; ++j) {
        const raw key =
            _mm512_xor_si512(load_key(k[4 * half + j % 4 + 8 * (j / 4)] + at + d), flip);
        QUIRE_UNROLL
        for (int r = 0; r < NR; ++r) {
          high[4 * r + j] = dot(high[4 * r + j], key, queries[r][0]);
          low[4 * r + j] = dot(low[4 * r + j], key, queries[r][1]);
        }
      }
    };
    int d = 0;
    for (; d + kBytes <= head_dim; d += kBytes) {
      if (ahead != nullptr) ahead->fetch(NK * kBytes);
      multiply(d, [](const int8_t* key) __attribute__((always_inline)) {
        return _mm512_loadu_si512(key);
      });
    }
    if (d < head_dim)
      multiply(d, [&](const int8_t* key) __attribute__((always_inline)) {
        return load_bytes(key, head_dim - d);
      });
    QUIRE_UNROLL
    for (int i = 0; i < 4; ++i)
      halves[half][i] =
          fold_halves(join_bytes(high[i], low[i]), join_bytes(high[4 + i], low[4 + i]));
  }
  raw quarters[4];
  QUIRE_UNROLL
  for (int i = 0; i < 4; ++i) quarters[i] = fold_quarters(halves[0][i], halves[1][i]);
  const raw sums = fold_lanes(quarters);
  QUIRE_UNROLL
  for (int r = 0; r < NR; ++r) {
    const raw sum = _mm512_sub_epi32(sums, _mm512_set1_epi32(ints.q_offset[row + r]));
    const vf score = mul(_mm512_cvtepi32_ps(sum), set1(ints.q_step[row + r]));
    const vmask mine = lanes(r * kLanes / NR, (r + 1) * kLanes / NR);
    _mm512_mask_storeu_ps(scores + r * kKeyBlock - r * kLanes / NR, mine, score);
  }
}

// Bytes d … d + 63 of four tokens: out[i] holds, in quarter j, the four dims 16 j + 4 i …, each
// with its four tokens side by side.
QUIRE_INLINE void interleave(const int8_t* const* v, int64_t at, int n, raw (&out)[4]) {
  const bool whole = n == kBytes;
  auto bytes = [&](int i) {
    return whole ? _mm512_loadu_si512(v[i] + at) : load_bytes(v[i] + at, n);
  };
  const raw a = bytes(0), b = bytes(1), c = bytes(2), d = bytes(3);
  const raw ab_low = _mm512_unpacklo_epi8(a, b), ab_high = _mm512_unpackhi_epi8(a, b);
  const raw cd_low = _mm512_unpacklo_epi8(c, d), cd_high = _mm512_unpackhi_epi8(c, d);
  out[0] = _mm512_unpacklo_epi16(ab_low, cd_low);
  out[1] = _mm512_unpackhi_epi16(ab_low, cd_low);
  out[2] = _mm512_unpacklo_epi16(ab_high, cd_high);
  out[3] = _mm512_unpackhi_epi16(ab_high, cd_high);
}

// Tokens first <= t < last of one head, first and last multiples of four, into ints.values.
inline void interleave_values(const int8_t* const* v, int64_t at, int head_dim, int depth,
                              int first, int last, const IntegerScratch& ints) {
  for (int k = first; k < last; k += 4) {
    for (int d = 0; d < head_dim; d += kBytes) {
      raw quads[4];
      interleave(v + k, at + d, std::min(kBytes, head_dim - d), quads);
      int8_t* to = ints.values + int64_t{k} * depth + 4 * d;
      for (int i = 0; i < 4; ++i) _mm512_storeu_si512(to + i * kBytes, quads[i]);
    }
  }
}

// out[i] = quarter i of x[0], x[1], x[2], x[3].
QUIRE_INLINE void transpose_quarters(const raw (&x)[4], raw (&out)[4]) {
  const raw a = _mm512_shuffle_i32x4(x[0], x[1], 0x44);
  const raw b = _mm512_shuffle_i32x4(x[0], x[1], 0xEE);
  const raw c = _mm512_shuffle_i32x4(x[2], x[3], 0x44);
  const raw d = _mm512_shuffle_i32x4(x[2], x[3], 0xEE);
  out[0] = _mm512_shuffle_i32x4(a, c, 0x88);
  out[1] = _mm512_shuffle_i32x4(a, c, 0xDD);
  out[2] = _mm512_shuffle_i32x4(b, d, 0x88);
  out[3] = _mm512_shuffle_i32x4(b, d, 0xDD);
}

// The sums of a key block grow chunk by chunk: the first begins them, the last adds them to acc.
struct Turn {
  bool begins, ends;
};

// acc[r][d …] += step · Σ_k weights[r][k] · v[k][d …] over first <= k < last for NR adjacent rows
// and kBytes dims. quads_of(k, out): the values of tokens k … k + 3, as interleave() gives them.
template <int NR, class F>
QUIRE_INLINE void weigh_integers(const IntegerScratch& ints, int row, int depth, int first,
                                 int last, Turn turn, float* acc, int width, int d, F&& quads_of) {
  const uint8_t* weights = ints.weights + int64_t{row} * 2 * kKeyBlock;
  int32_t* so_far = ints.sums + int64_t{row} * depth + d;
  vi sums[NR][2][4];
  QUIRE_UNROLL
  for (int r = 0; r < NR; ++r)
    QUIRE_UNROLL
    for (int i = 0; i < 4; ++i) {
      sums[r][0][i] = set1_int(0);
      sums[r][1][i] = turn.begins ? set1_int(0) : load_int(so_far + r * depth + i * kLanes);
    }
  for (int k = first; k < last; k += 4) {
    raw quads[4];
    quads_of(k, quads);
    QUIRE_UNROLL
    for (int r = 0; r < NR; ++r)
      QUIRE_UNROLL
      for (int part = 0; part < 2; ++part) {
        int32_t four;
        std::memcpy(&four, weights + (2 * r + part) * kKeyBlock + k, 4);
        const raw weight = _mm512_set1_epi32(four);
        QUIRE_UNROLL
        for (int i = 0; i < 4; ++i) sums[r][part][i] = dot(sums[r][part][i], weight, quads[i]);
      }
  }
  QUIRE_UNROLL
  for (int r = 0; r < NR; ++r) {
    raw joined[4], dims[4];
    QUIRE_UNROLL
    for (int i = 0; i < 4; ++i) joined[i] = join_bytes(sums[r][0][i], sums[r][1][i]);
    if (!turn.ends) {
      QUIRE_UNROLL
      for (int i = 0; i < 4; ++i)
        _mm512_storeu_si512(so_far + r * depth + i * kLanes, joined[i]);
      continue;
    }
    transpose_quarters(joined, dims);
    const vf step = set1(ints.weight_step[row + r]);
    float* to = acc + r * width + d;
    QUIRE_UNROLL
    for (int i = 0; i < 4; ++i)
      if (d + i * kLanes < width)
        store(to + i * kLanes, fma(step, _mm512_cvtepi32_ps(dims[i]), load(to + i * kLanes)));
  }
}

// Calls body(row, count) over all rows, 2 or 1 at a time.
template <class F>
QUIRE_INLINE void each_pair(int rows, F&& body) {
  int row = 0;
  for (; row + 2 <= rows; row += 2) body(row, std::integral_constant<int, 2>());
  if (row < rows) body(row, std::integral_constant<int, 1>());
}

// All queries of a tile into integers, once.
inline void round_queries(const Tile& tile, const Scratch& scratch) {
  for (int row = 0; row < tile.num_states(); ++row)
    round_query(scratch.q + int64_t{row} * tile.width, tile.width, tile.depth(), row,
                scratch.integers);
}

// Scores of all rows of one kv head.
inline void score_integers(const Tile& tile, const Range& range, int head, const int8_t* const* k,
                           const Scratch& scratch, Ahead<int8_t>* ahead) {
  each_pair(tile.rows, [&](int row, auto count) {
    constexpr int NR = count, NK = kLanes / NR;
    const int first = range.low(tile, row), last = range.high(tile, row + NR - 1);
    const int state = head * tile.rows + row;
    for (int key = first / NK * NK; key < last; key += NK)
      integer_scores<NR>(scratch.integers, state, tile.depth(), tile.head_dim, k + key,
                         int64_t{head} * tile.head_dim, scratch.scores + state * kKeyBlock + key,
                         row == 0 ? ahead : nullptr);
  });
}

// acc += weights · values for all rows of one kv head. More than two share what is interleaved.
inline void weigh_values(const Tile& tile, const Range& range, Turn turn, int head,
                         const int8_t* const* v, const Scratch& scratch, Ahead<int8_t>* ahead) {
  const IntegerScratch& ints = scratch.integers;
  const int64_t at = int64_t{head} * tile.head_dim;
  const bool shared = tile.rows > 2;
  if (shared)
    interleave_values(v, at, tile.head_dim, tile.depth(), range.from / 4 * 4, range.to, ints);
  each_pair(tile.rows, [&](int row, auto count) {
    constexpr int NR = count;
    const int first = range.low(tile, row) / 4 * 4, last = range.high(tile, row + NR - 1);
    const int state = head * tile.rows + row;
    for (int d = 0; d < tile.head_dim; d += kBytes) {
      const int bytes = std::min(kBytes, tile.head_dim - d);
      float* acc = scratch.span.acc + state * tile.width;
      weigh_integers<NR>(ints, state, tile.depth(), first, last, turn, acc, tile.width, d,
                         [&](int k, raw(&quads)[4]) {
                           if (row == 0 && ahead != nullptr) ahead->fetch(4 * bytes);
                           if (!shared) return interleave(v + k, at + d, bytes, quads);
                           const int8_t* from = ints.values + int64_t{k} * tile.depth() + 4 * d;
                           for (int i = 0; i < 4; ++i)
                             quads[i] = _mm512_loadu_si512(from + i * kBytes);
                         });
    }
  });
}

// One key block of a tile, as attend_block and attend_wide_block do it in float32.
inline void attend_integer_block(const Tile& tile, const Range& range,
                                 const KeyBlock<int8_t>& block, const KeyBlock<int8_t>* after,
                                 Scratch& scratch) {
  each_chunk(tile, range, block.k, block.v + range.from / kChunk * kChunk,
             [&](const Range& chunk, int head, Ahead<int8_t>* ahead) {
               score_integers(tile, chunk, head, block.k, scratch, ahead);
             });
  for (int head = 0; head < tile.kv_heads; ++head) soften_keys(tile, range, block, head, scratch);
  for (int row = 0; row < tile.num_states(); ++row)
    round_weights(scratch.scores + row * kKeyBlock, row, scratch.integers);
  each_chunk(tile, range, block.v, after != nullptr ? after->k : nullptr,
             [&](const Range& chunk, int head, Ahead<int8_t>* ahead) {
               const Turn turn{chunk.from == range.from, chunk.to == range.to};
               weigh_values(tile, chunk, turn, head, block.v, scratch, ahead);
             });
}

#else

constexpr bool kIntegerProducts = false;

inline void round_queries(const Tile&, const Scratch&) {}

#endif

// Only int8_t with kIntegerProducts comes here.
template <class E>
inline void attend_integer_block(const Tile&, const Range&, const KeyBlock<E>&, const KeyBlock<E>*,
                                 Scratch&) {}

}  // namespace quire::attention
