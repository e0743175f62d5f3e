// Attention over an int8 cache by exact products of integers.
//
// Widening int8 to float32 keeps a core busier than its memory. Here queries and weights become
// integers of 16 bits with one float step per query row and, for weights, per key block: score =
// step · Σ q k, output += step · Σ w v, both sums exact. That is far below what bfloat16 queries
// resolve, so these alone come here: those of more digits keep to float32. What a query computes
// depends on its own keys alone, as in attention_tile.h.
#pragma once

#include "attention_range.h"
#include "int8_words.h"

namespace quire::attention {

constexpr int kMaxIntegerDim = 512;  // of a head: Σ q k stays within 32 bits
constexpr int kQueryTop = 127 * 256, kWeightTop = 32767;

// One query row [width], scaled floats, into its place among the integers. The step is 0 when
// everything is next to nothing, NaN when something is not finite.
inline void round_query(const float* q, int width, int depth, int row, const IntegerScratch& out) {
  int16_t* to = out.q + int64_t{row} * depth;
  vf most = zero(), broken = zero();
  for (int i = 0; i < width; i += kLanes) {
    most = max(absolute(load(q + i)), most);
    broken = fma(load(q + i), zero(), broken);
  }
  const bool finite = sum(broken) == 0.0f;
  const float step = maximum(most) / kQueryTop;
  const bool some = finite && step >= std::numeric_limits<float>::min();
  out.q_step[row] = some ? step : finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
  const int words = some ? width : 0;
  std::memset(to + words, 0, sizeof(int16_t) * (depth - words));
  for (int i = 0; i < words; i += kLanes) round_words(to + i, mul(load(q + i), set1(1.0f / step)));
}

// scores[r][j] = q[r] · k[j] for NR adjacent rows and kLanes / NR keys, as floats without steps.
template <int NR>
QUIRE_INLINE void score_block(const int16_t* q, int depth, int head_dim, const int8_t* const* k,
                              int64_t at, float* scores, Ahead<int8_t>* ahead) {
  constexpr int NK = kLanes / NR;
  vi dots[kLanes];
  QUIRE_UNROLL
  for (int i = 0; i < kLanes; ++i) dots[i] = set1_int(0);
  auto multiply = [&](int d, auto&& load_key) __attribute__((always_inline)) {
    if (ahead != nullptr) ahead->fetch(NK * kWords);
    raw queries[NR];
    QUIRE_UNROLL
    for (int r = 0; r < NR; ++r) queries[r] = load_words(q + r * depth + d);
    QUIRE_UNROLL
    for (int j = 0; j < NK; ++j) {
      const raw key = to_words(load_key(k[j] + at + d));
      QUIRE_UNROLL
      for (int r = 0; r < NR; ++r) dots[r * NK + j] = add_pairs(dots[r * NK + j], key, queries[r]);
    }
  };
  auto whole = [](const int8_t* key) __attribute__((always_inline)) { return load_bytes(key); };
  int d = 0;
  for (; d + 4 * kWords <= head_dim; d += 4 * kWords) {
    QUIRE_UNROLL
    for (int step = 0; step < 4; ++step) multiply(d + step * kWords, whole);
  }
  for (; d + kWords <= head_dim; d += kWords) multiply(d, whole);
  if (d < head_dim)
    multiply(d, [&](const int8_t* key) __attribute__((always_inline)) {
      return load_bytes(key, head_dim - d);
    });
  float all[kLanes];
  store(all, to_float(lane_sums(dots)));
  QUIRE_UNROLL
  for (int r = 0; r < NR; ++r)
    std::memcpy(scores + r * kKeyBlock, all + r * NK, NK * sizeof(float));
}

// Scores of all rows of one kv head.
inline void score_integers(const Tile& tile, const Range& range, int head, const int8_t* const* k,
                           const Scratch& scratch, Ahead<int8_t>* ahead) {
  each_rows(tile.rows, [&](int row, auto count) {
    constexpr int NR = count, NK = kLanes / NR;
    const int first = range.low(tile, row), last = range.high(tile, row + NR - 1);
    const int state = head * tile.rows + row;
    const int16_t* q = scratch.integers.q + int64_t{state} * tile.depth();
    for (int key = first / NK * NK; key < last; key += NK) {
      score_block<NR>(q, tile.depth(), tile.head_dim, k + key, int64_t{head} * tile.head_dim,
                      scratch.scores + state * kKeyBlock + key, row == 0 ? ahead : nullptr);
    }
  });
}

// What turns weights of the keys low <= key < high into integers: factor by key, and the step of
// their products with V. The step is NaN when a scale of V is not finite.
struct WeightScale {
  float factor[kKeyBlock];
  vmask seen[kKeyBlock / kLanes];
  float step;
  int low = -1, high = -1;

  // block: the keys of the tile; the others are left out.
  void set(const float* v_scale, const Range& block, int from, int to) {
    if (from == low && to == high) return;
    low = from;
    high = to;
    vf most = zero(), broken = zero();
    each_vector(block, [&](int k) {
      seen[k / kLanes] = lanes(low - k, high - k);
      const vf scale = select(seen[k / kLanes], load(v_scale + k), zero());
      most = max(absolute(scale), most);
      broken = fma(scale, zero(), broken);
    });
    const bool finite = sum(broken) == 0.0f;
    step = maximum(most) / kWeightTop;
    const bool some = step >= std::numeric_limits<float>::min();
    const vf inverse = set1(some && finite ? 1.0f / step : 0.0f);
    if (!some) step = 0.0f;
    if (!finite) step = std::numeric_limits<float>::quiet_NaN();
    each_vector(block, [&](int k) {
      store(factor + k, mul(select(seen[k / kLanes], load(v_scale + k), zero()), inverse));
    });
  }
};

// One row's scores of a key block become integer weights 2^(score - the block's maximum). Keys that
// the row does not see get weight 0 whatever their score is.
inline void soften_row(const Range& range, int row, const float* k_scale, const WeightScale& scale,
                       const Scratch& scratch) {
  const IntegerScratch& ints = scratch.integers;
  float* scores = scratch.scores + row * kKeyBlock;
  int16_t* weights = ints.weights + row * kKeyBlock;
  const vf q_step = set1(ints.q_step[row]);
  vf top = set1(kNegativeInfinity), total = zero();
  each_vector(range, [&](int k) {
    const vf x = mul(mul(load(scores + k), q_step), load(k_scale + k));
    store(scores + k, x);
    top = max(select(scale.seen[k / kLanes], x, set1(kNegativeInfinity)), top);
  });
  const float best = maximum(top);
  const vf base = set1(best == kNegativeInfinity ? 0.0f : best);
  each_vector(range, [&](int k) {
    const vf weight = exp2_negative(sub(load(scores + k), base));
    const vf visible = select(scale.seen[k / kLanes], weight, zero());
    total = add(total, visible);
    round_words(weights + k, mul(visible, load(scale.factor + k)));
  });
  ints.best[row] = best;
  ints.total[row] = sum(total);
  ints.weight_step[row] = scale.step;
}

// The states of all rows take in a key block, whose weights soften_row() has made: their outputs and
// sums are rescaled to the larger maximum, or the step of the weights is.
inline void rescale_rows(const Tile& tile, const Scratch& scratch) {
  const IntegerScratch& ints = scratch.integers;
  const State& state = scratch.span;
  const int num_states = tile.num_states();
  const vf one = set1(1.0f);
  for (int row = 0; row < num_states; row += kLanes) {
    const int n = std::min(kLanes, num_states - row);
    auto get = [&](const float* p) { return n == kLanes ? load(p + row) : load_part(p + row, n); };
    auto put = [&](float* p, vf x) { n == kLanes ? store(p + row, x) : store_part(p + row, x, n); };
    const vf before = get(state.max), best = get(ints.best);
    const vmask rises = less(before, best);
    const vf gap = exp2_negative(sub(min(before, best), max(before, best)));
    const vf share = select(less(set1(kNegativeInfinity), before), gap, one);
    const vf shrink = select(rises, share, one), grow = select(rises, one, share);
    put(state.max, max(best, before));
    put(state.sum, add(mul(get(state.sum), shrink), mul(grow, get(ints.total))));
    put(ints.weight_step, mul(grow, get(ints.weight_step)));
    float factors[kLanes];
    store(factors, shrink);
    for (int i = 0; i < n; ++i) {
      if (factors[i] == 1.0f) continue;
      float* acc = state.acc + (row + i) * tile.width;
      for (int d = 0; d < tile.width; d += kLanes)
        store(acc + d, mul(load(acc + d), set1(factors[i])));
    }
  }
}

// The scores of all rows become weights.
inline void soften_rows(const Tile& tile, const Range& range, const Scratch& scratch) {
  for (int head = 0; head < tile.kv_heads; ++head) {
    const HeadScales& scales = scratch.scales[head];
    WeightScale scale;
    for (int row = 0; row < tile.rows; ++row) {
      scale.set(scales.v, range, range.low(tile, row), range.high(tile, row));
      soften_row(range, head * tile.rows + row, scales.k, scale, scratch);
    }
  }
  rescale_rows(tile, scratch);
}

// Tokens first <= t < last of one head in pairs, into ints.values, dims in order; first is even.
inline void pair_values(const int8_t* const* v, int64_t at, int head_dim, int depth, int first,
                        int last, const IntegerScratch& ints) {
  for (int k = first; k < last; k += 2) {
    int16_t* to = ints.values + int64_t{k} * depth;
    for (int d = 0; d < head_dim; d += kWords, to += 2 * kWords) {
      const int n = head_dim - d;
      raw words[2];
      if (n >= kWords) {
        pair_words(load_bytes(v[k] + at + d), load_bytes(v[k + 1] + at + d), words);
      } else {
        pair_words(load_bytes(v[k] + at + d, n), load_bytes(v[k + 1] + at + d, n), words);
      }
      vi ordered[2] = {(vi)words[0], (vi)words[1]};
      in_order(ordered);
      store_words(to, (raw)ordered[0]);
      store_words(to + kWords, (raw)ordered[1]);
    }
  }
}

// acc[r][d …] += step · Σ_k weights[r][k] · v[k][d …] over first <= k < last for NR adjacent rows
// and ND · kWords dims. words_of(k, i, out): the dims d + i · kWords … of tokens k and k + 1.
// Unrolled: tokens that code takes at once. InOrder: whether the lanes of words are.
template <int NR, int ND, int Unrolled, bool InOrder, class F>
QUIRE_INLINE void weigh_integers(const IntegerScratch& ints, int row, int first, int last,
                                 float* acc, int width, int d, F&& words_of) {
  const int16_t* weights = ints.weights + int64_t{row} * kKeyBlock;
  vi sums[NR][ND][2];
  QUIRE_UNROLL
  for (int r = 0; r < NR; ++r)
    QUIRE_UNROLL
    for (int i = 0; i < ND; ++i) sums[r][i][0] = sums[r][i][1] = set1_int(0);
  auto add_two = [&](int k) __attribute__((always_inline)) {
    raw pair[NR];
    QUIRE_UNROLL
    for (int r = 0; r < NR; ++r) pair[r] = two_words(weights + r * kKeyBlock + k);
    QUIRE_UNROLL
    for (int i = 0; i < ND; ++i) {
      raw words[2];
      words_of(k, i, words);
      QUIRE_UNROLL
      for (int r = 0; r < NR; ++r)
        QUIRE_UNROLL
        for (int half = 0; half < 2; ++half)
          sums[r][i][half] = add_pairs(sums[r][i][half], pair[r], words[half]);
    }
  };
  int k = first;
  for (; Unrolled > 2 && k + Unrolled <= last; k += Unrolled) {
    QUIRE_UNROLL
    for (int i = 0; i < Unrolled; i += 2) add_two(k + i);
  }
  for (; k < last; k += 2) add_two(k);
  QUIRE_UNROLL
  for (int r = 0; r < NR; ++r) {
    const vf step = set1(ints.weight_step[row + r]);
    QUIRE_UNROLL
    for (int i = 0; i < ND; ++i) {
      if constexpr (!InOrder) in_order(sums[r][i]);
      float* to = acc + r * width + d + i * kWords;
      store(to, fma(step, to_float(sums[r][i][0]), load(to)));
      if (d + i * kWords + kLanes < width)
        store(to + kLanes, fma(step, to_float(sums[r][i][1]), load(to + kLanes)));
    }
  }
}

// acc += weights · values for all rows of one kv head. More than four share what is paired.
inline void weigh_values(const Tile& tile, const Range& range, int head, const int8_t* const* v,
                         const Scratch& scratch, Ahead<int8_t>* ahead) {
  const IntegerScratch& ints = scratch.integers;
  const int64_t at = int64_t{head} * tile.head_dim;
  const bool shared = tile.rows > 4;
  if (shared)
    pair_values(v, at, tile.head_dim, tile.depth(), range.from / 2 * 2, range.to, ints);
  each_rows(tile.rows, [&](int row, auto count) __attribute__((always_inline)) {
    constexpr int NR = count, ND = std::min(4, kLanes / 2 / NR);
    const int first = range.low(tile, row) / 2 * 2, last = range.high(tile, row + NR - 1);
    const int state = head * tile.rows + row;
    float* acc = scratch.span.acc + state * tile.width;
    auto weigh = [&](auto dims, int d) __attribute__((always_inline)) {
      constexpr int kDims = dims;
      if (shared) {
        weigh_integers<NR, kDims, 2, true>(
            ints, state, first, last, acc, tile.width, d,
            [&](int k, int i, raw(&words)[2]) __attribute__((always_inline)) {
              const int16_t* from = ints.values + int64_t{k} * tile.depth() + 2 * (d + i * kWords);
              words[0] = load_words(from);
              words[1] = load_words(from + kWords);
            });
        return;
      }
      weigh_integers<NR, kDims, kUnrolledKeys, false>(
          ints, state, first, last, acc, tile.width, d,
          [&](int k, int i, raw(&words)[2]) __attribute__((always_inline)) {
            if (i == 0 && row == 0) ahead->fetch(2 * kDims * kWords);
            const int8_t* a = v[k] + at + d + i * kWords;
            const int8_t* b = v[k + 1] + at + d + i * kWords;
            const int n = tile.head_dim - d;
            if (kDims > 1 || n >= kWords) return pair_words(load_bytes(a), load_bytes(b), words);
            pair_words(load_bytes(a, n), load_bytes(b, n), words);
          });
    };
    int d = 0;
    for (; d + ND * kWords <= tile.head_dim; d += ND * kWords)
      weigh(std::integral_constant<int, ND>(), d);
    for (; d < tile.head_dim; d += kWords) weigh(std::integral_constant<int, 1>(), d);
  });
}

// One key block of a tile, as attend_block and attend_wide_block do it in float32. Sums of weights
// and values are exact within a chunk of keys, whose places are the same for every query.
inline void attend_integer_block(const Tile& tile, const Range& range,
                                 const KeyBlock<int8_t>& block, const int8_t* const* after,
                                 int following, Scratch& scratch) {
  each_chunk(tile, range, block.k, block.v + range.from, range.first_chunk(kChunk<int8_t>),
             [&](const Range& chunk, int head, Ahead<int8_t>* ahead) {
               score_integers(tile, chunk, head, block.k, scratch, ahead);
             });
  block.load_scales(tile.kv_heads, scratch.scales);
  soften_rows(tile, range, scratch);
  each_chunk(tile, range, block.v, after, following,
             [&](const Range& chunk, int head, Ahead<int8_t>* ahead) {
               weigh_values(tile, chunk, head, block.v, scratch, ahead);
             });
}

}  // namespace quire::attention
