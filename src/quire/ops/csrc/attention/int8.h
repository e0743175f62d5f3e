// Attention over an int8 cache by exact integer products.
//
// Widening int8 to float32 takes a core longer than reading it from memory. So queries and weights
// become 16-bit integers, with one float step per query row and, for weights, per key block: score
// = step · Σ q k, output += step · Σ w v. Both sums are exact. The rounding is far below the
// resolution of bfloat16 queries, and only those are computed here; more precise queries stay in
// float32. As in attention/tile.h, the result of a query depends on its own keys alone.
#pragma once

#include "attention/range.h"
#include "linear/int8_words.h"

namespace quire::attention {

constexpr int kMaxIntegerDim = 512;  // largest head_dim: Σ q k fits in 32 bits
constexpr int kQueryTop = 127 * 256, kWeightTop = 32767;
static_assert(int64_t{kChunk<int8_t>} * kWeightTop * 128 <= std::numeric_limits<int32_t>::max());

// Rounds one query row into its place among the integers. scale: factor on its scores. The step is
// 0 if all elements are negligibly small, NaN if one is not finite.
inline void round_query(const bf16* q, int head_dim, float scale, int row,
                        const IntegerScratch& out) {
  constexpr float kLeast = std::numeric_limits<float>::min();
  const int depth = integer_depth(head_dim);
  int16_t* to = out.q + int64_t{row} * depth;
  const float top = largest_magnitude(q, head_dim), step = top * std::fabs(scale) / kQueryTop;
  const bool finite = step < std::numeric_limits<float>::infinity();
  if (!finite || step < kLeast || top < kLeast * kQueryTop) {
    out.q_step[row] = finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
    for (int i = 0; i < depth; i += kWords) store_words(to + i, (raw)set1_int(0));
    return;
  }
  out.q_step[row] = std::copysign(step, scale);
  const vf inverse = set1(kQueryTop / top);
  auto put = [&](const bf16* from, int i) __attribute__((always_inline)) {
    store_words(to + i, words_in_turn(to_int(mul(lower_halves(from), inverse)),
                                      to_int(mul(upper_halves(from), inverse))));
  };
  int i = 0;
  for (; i + kWords <= head_dim; i += kWords) put(q + i, i);
  if (i < head_dim) {
    bf16 rest[kWords] = {};
    std::memcpy(rest, q + i, (head_dim - i) * sizeof(bf16));
    put(rest, i);
  }
}

// Keys scored at once for NR adjacent rows.
template <int NR>
constexpr int kScoredKeys = kKeysTogether * kLanes / NR;

// scores[r][j] = q[r] · k[j] for NR adjacent rows and kScoredKeys keys, as floats without steps.
// With two keys per AVX-512 vector each step reads a little of many keys, so that it seldom waits
// for a cache line: from memory with 4 rows a Zen 4 takes 0.72 to 0.84 of the time of one key per
// vector, and the same time from its caches (measured).
template <int NR>
QUIRE_INLINE void score_block(const int16_t* q, int depth, int head_dim, const int8_t* const* k,
                              int64_t at, float* scores, Ahead<int8_t>* ahead) {
  constexpr int NV = kLanes / NR;  // vectors of keys; one holds keys j and j + NV
  vi dots[kLanes];
  QUIRE_UNROLL
  for (int i = 0; i < kLanes; ++i) dots[i] = set1_int(0);
  auto multiply = [&](int d, auto&& load) __attribute__((always_inline)) {
    if (ahead != nullptr) {
      ahead->template fetch<kScoredKeys<NR> * kKeyDims>();
      for (int j = 0; j < kScoredKeys<NR>; ++j) ahead->fetch_again(k[j] + at + d, d);
    }
    raw queries[NR];
    QUIRE_UNROLL
    for (int r = 0; r < NR; ++r) queries[r] = repeat_words(q + r * depth + d);
    QUIRE_UNROLL
    for (int j = 0; j < NV; ++j) {
      __m128i parts[kKeysTogether];
      QUIRE_UNROLL
      for (int i = 0; i < kKeysTogether; ++i) parts[i] = load(k[i * NV + j] + at + d);
      const raw keys = words_of_keys(parts);
      QUIRE_UNROLL
      for (int r = 0; r < NR; ++r) dots[r * NV + j] = add_pairs(dots[r * NV + j], keys, queries[r]);
    }
  };
  auto whole = [](const int8_t* key) __attribute__((always_inline)) { return load_key(key); };
  int d = 0;
  for (; d + 4 * kKeyDims <= head_dim; d += 4 * kKeyDims) {
    QUIRE_UNROLL
    for (int step = 0; step < 4; ++step) multiply(d + step * kKeyDims, whole);
  }
  for (; d + kKeyDims <= head_dim; d += kKeyDims) multiply(d, whole);
  if (d < head_dim)
    multiply(d, [&](const int8_t* key) __attribute__((always_inline)) {
      return load_key(key, head_dim - d);
    });
  vi sums[kKeysTogether];
  lane_sums(dots, sums);
  QUIRE_UNROLL
  for (int i = 0; i < kKeysTogether; ++i) {
    float all[kLanes];
    store(all, to_float(sums[i]));
    QUIRE_UNROLL
    for (int r = 0; r < NR; ++r)
      std::memcpy(scores + r * kKeyBlock + i * NV, all + r * NV, NV * sizeof(float));
  }
}

// Computes the scores of all rows of one kv head.
inline void score_integers(const Tile& tile, const Range& range, int head, const int8_t* const* k,
                           const Scratch& scratch, Ahead<int8_t>* ahead) {
  each_rows(tile.rows, [&](int row, auto count) {
    constexpr int NR = count, NK = kScoredKeys<NR>;
    static_assert(kChunk<int8_t> % NK == 0);
    const int first = range.low(tile, row), last = range.high(tile, row + NR - 1);
    const int state = head * tile.rows + row;
    const int16_t* q = scratch.integers.q + int64_t{state} * tile.depth();
    for (int key = first / NK * NK; key < last; key += NK) {
      score_block<NR>(q, tile.depth(), tile.head_dim, k + key, int64_t{head} * tile.head_dim,
                      scratch.scores + state * kKeyBlock + key, row == 0 ? ahead : nullptr);
    }
  });
}

// Softmax of up to kLanes adjacent states of a tile over a key block, one state per lane. Turns
// scores into integer weights 2^(score - the block's maximum) in units of weight_step. Weights
// include V's scales of the keys that a state sees; weight_step is NaN if one of these is not
// finite. If the maximum rises, outputs and sums are rescaled; if not, the step of the weights is.
class Softening {
 public:
  Softening(const Tile& tile, const Range& range, int first, int count, const Scratch& scratch)
      : tile_(tile), range_(range), scratch_(scratch), first_(first), count_(count) {
    find_keys();
  }

  void run() { all_seen_ ? run<false>() : run<true>(); }

 private:
  // Masked: some keys are not seen by every state.
  template <bool Masked>
  void run() {
    vf scores[kLanes], scales[kLanes];
    for (int i = count_; i < kLanes; ++i) scores[i] = scales[i] = zero();
    for (int i = 0; i < count_; ++i) {
      scores[i] = scale_scores<Masked>(i);
      scales[i] = shares_scales(i) ? scales[i - 1] : largest_scale<Masked>(i);
    }
    const vf best = maxima(scores), none = set1(kNegativeInfinity);
    store(base_, select(less(none, best), best, zero()));
    const vf step = weight_steps(fold_lanes(scales, larger));
    vf totals[kLanes];
    for (int i = count_; i < kLanes; ++i) totals[i] = zero();
    for (int i = 0; i < count_; ++i) totals[i] = weigh<Masked>(i);
    take_in(best, sums(totals), step);
  }

  // Compares magnitudes by their bits: NaN is above all.
  static QUIRE_INLINE vf larger(vf a, vf b) { return float_of(max_int(bits_of(a), bits_of(b))); }
  template <bool Masked>
  static QUIRE_INLINE vf seen(uint64_t keys, int k, vf yes, vf no) {
    if constexpr (!Masked) return yes;
    return select(lanes_of(keys >> k), yes, no);
  }

  // Finds the keys that each state sees, whether all see all, and the vectors of keys whose weights
  // each_rows() will read.
  void find_keys() {
    const int rows = tile_.rows, last = first_ + count_ - 1;
    const bool one_head = first_ / rows == last / rows;
    from_ = range_.low(tile_, one_head ? first_ % rows / 4 * 4 : 0) / kLanes * kLanes;
    to_ = range_.high(tile_, one_head ? std::min(last % rows | 3, rows - 1) : rows - 1);
    for (int i = 0, row = first_ % rows, head = first_ / rows; i < count_; ++i) {
      const bool as_before = i > 0 && row % tile_.group != 0;
      keys_[i] = as_before ? keys_[i - 1]
                           : key_bits(range_.low(tile_, row), range_.high(tile_, row));
      head_[i] = head;
      all_seen_ = all_seen_ && keys_[i] == ~uint64_t{0};
      if (++row == rows) row = 0, ++head;
    }
  }

  float* scores(int i) const { return scratch_.scores + (first_ + i) * kKeyBlock; }
  const HeadScales& scales(int i) const { return scratch_.scales[head_[i]]; }
  bool shares_scales(int i) const {
    return i > 0 && keys_[i] == keys_[i - 1] && head_[i] == head_[i - 1];
  }

  template <bool Masked>
  QUIRE_INLINE vf scale_scores(int i) const {
    float* const s = scores(i);
    const float* const k_scale = scales(i).k;
    const vf step = set1(scratch_.integers.q_step[first_ + i]), none = set1(kNegativeInfinity);
    const float* const more = scratch_.lacking(first_ + i);
    const RowBend bend = tile_.bend_of(head_[i], (first_ + i) % tile_.rows, range_.block);
    const bool bends = bend.any();
    vf top = none;
    for (int k = from_; k < to_; k += kLanes) {
      vf x = mul(mul(load(s + k), step), load(k_scale + k));
      if (more != nullptr) x = add(x, load(more + k));
      if (bends) x = bend(x, k);
      store(s + k, x);
      top = max(seen<Masked>(keys_[i], k, x, none), top);
    }
    return top;
  }

  template <bool Masked>
  QUIRE_INLINE vf largest_scale(int i) const {
    vf most = zero();
    for (int k = from_; k < to_; k += kLanes)
      most = larger(seen<Masked>(keys_[i], k, absolute(load(scales(i).v + k)), zero()), most);
    return most;
  }

  vf weight_steps(vf largest) {
    const vf step = div(largest, set1(kWeightTop));
    const vmask finite = less(largest, set1(std::numeric_limits<float>::infinity()));
    const vmask tiny = less(step, set1(std::numeric_limits<float>::min()));
    store(inverse_, select(finite, select(tiny, zero(), div(set1(1.0f), step)), zero()));
    return select(finite, select(tiny, zero(), step),
                  set1(std::numeric_limits<float>::quiet_NaN()));
  }

  // Writes the integer weights of a state. Returns the sum of its weights, lane by lane.
  template <bool Masked>
  QUIRE_INLINE vf weigh(int i) const {
    const float* const s = scores(i);
    const float* const v_scale = scales(i).v;
    int16_t* const weights = scratch_.integers.weights + (first_ + i) * kKeyBlock;
    const vf base = set1(base_[i]), inverse = set1(inverse_[i]);
    vf total = zero();
    for (int k = from_; k < to_; k += kLanes) {
      const vf weight = seen<Masked>(keys_[i], k, exp2_negative(sub(load(s + k), base)), zero());
      const vf factor = mul(seen<Masked>(keys_[i], k, load(v_scale + k), zero()), inverse);
      total = add(total, weight);
      round_words(weights + k, mul(weight, factor));
    }
    return total;
  }

  void take_in(vf best, vf total, vf step) const {
    const State& state = scratch_.span;
    const vf one = set1(1.0f), before = get(state.max);
    const vmask rises = less(before, best);
    const vf gap = exp2_negative(sub(min(before, best), max(before, best)));
    const vf share = select(less(set1(kNegativeInfinity), before), gap, one);
    const vf shrink = select(rises, share, one), grow = select(rises, one, share);
    put(state.max, max(best, before));
    put(state.sum, add(mul(get(state.sum), shrink), mul(grow, total)));
    put(scratch_.integers.weight_step, mul(grow, step));
    float factors[kLanes];
    store(factors, shrink);
    for (int i = 0; i < count_; ++i) {
      if (factors[i] == 1.0f) continue;
      float* acc = state.acc + (first_ + i) * tile_.value_width;
      for (int d = 0; d < tile_.value_width; d += kLanes)
        store(acc + d, mul(load(acc + d), set1(factors[i])));
    }
  }

  QUIRE_INLINE vf get(const float* p) const {
    return count_ == kLanes ? load(p + first_) : load_part(p + first_, count_);
  }
  QUIRE_INLINE void put(float* p, vf x) const {
    count_ == kLanes ? store(p + first_, x) : store_part(p + first_, x, count_);
  }

  const Tile& tile_;
  const Range& range_;
  const Scratch& scratch_;
  int first_, count_;
  int from_, to_;  // bounds of the vectors of keys
  bool all_seen_ = true;  // every state sees every key
  uint64_t keys_[kLanes];
  int head_[kLanes];
  float base_[kLanes], inverse_[kLanes];
};

// Turns the scores of all rows into weights.
inline void soften_rows(const Tile& tile, const Range& range, const Scratch& scratch) {
  score_biases(tile, range, scratch);
  const int states = tile.num_states();
  for (int first = 0; first < states; first += kLanes)
    Softening(tile, range, first, std::min(kLanes, states - first), scratch).run();
}

// Interleaves tokens first <= t < last of one head in pairs into ints.values, dims in order; first
// is even.
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
// and ND · kWords dims. words_of(k, i, out) gives the dims d + i · kWords onwards of tokens k and k
// + 1. Unrolled: tokens per iteration of the main loop. InOrder: the lanes of these words are in
// order.
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

// acc += weights · values for all rows of one kv head. Without AVX-512, many rows share one paired
// V; with it, attention/int8_wide.h takes them. Few rows pair V again, up to four rows at a time,
// and prefetch meanwhile.
inline void weigh_values(const Tile& tile, const Range& range, int head, const int8_t* const* v,
                         const Scratch& scratch, Ahead<int8_t>* ahead) {
  const IntegerScratch& ints = scratch.integers;
  const int64_t at = int64_t{head} * tile.head_dim;
  constexpr bool kShares = kKeysTogether == 1;
  const bool shared = kShares && tile.rows >= kCopyRows;
  if (shared)
    pair_values(v, at, tile.head_dim, tile.depth(), range.from / 2 * 2, range.to, ints);
  each_rows(tile.rows, [&](int row, auto count) __attribute__((always_inline)) {
    constexpr int NR = count, ND = std::min(4, kLanes / 2 / NR);
    const int first = range.low(tile, row) / 2 * 2, last = range.high(tile, row + NR - 1);
    const int state = head * tile.rows + row;
    float* acc = scratch.span.acc + state * tile.value_width;
    auto weigh = [&](auto dims, int d) __attribute__((always_inline)) {
      constexpr int kDims = dims;
      if (shared) {
        weigh_integers<NR, kDims, 2, true>(
            ints, state, first, last, acc, tile.value_width, d,
            [&](int k, int i, raw(&words)[2]) __attribute__((always_inline)) {
              const int16_t* from = ints.values + int64_t{k} * tile.depth() + 2 * (d + i * kWords);
              words[0] = load_words(from);
              words[1] = load_words(from + kWords);
            });
        return;
      }
      weigh_integers<NR, kDims, kUnrolledKeys, false>(
          ints, state, first, last, acc, tile.value_width, d,
          [&](int k, int i, raw(&words)[2]) __attribute__((always_inline)) {
            const int8_t* a = v[k] + at + d + i * kWords;
            const int8_t* b = v[k + 1] + at + d + i * kWords;
            if (i == 0 && row == 0) ahead->template fetch<2 * kDims * kWords>();
            if (row == 0) {
              ahead->fetch_again(a, d + i * kWords);
              ahead->fetch_again(b, d + i * kWords);
            }
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

// Prefetches the scales of V while K is scored: all of them are needed before V.
class ScalesAhead {
 public:
  ScalesAhead(const Tile& tile, const Range& range, const KeyBlock<int8_t>& block)
      : heads_(tile.kv_heads), next_(block.v_scale + range.from), end_(block.v_scale + range.to) {
    constexpr int kSize = kChunk<int8_t>;
    const int chunks = (range.to - 1) / kSize - range.from / kSize + 1, turns = chunks * heads_;
    tokens_in_a_turn_ = (range.to - range.from + turns - 1) / turns;
  }
  // Prefetches the share of one head's turn at a chunk (each_chunk).
  void fetch() {
    for (int i = 0; i < tokens_in_a_turn_ && next_ < end_; ++i, ++next_)
      for (int head = 0; head < heads_; head += kCacheLineBytes / sizeof(float))
        _mm_prefetch(reinterpret_cast<const char*>(*next_ + head), _MM_HINT_T1);
  }

 private:
  int heads_;
  const float* const* next_;
  const float* const* end_;
  int tokens_in_a_turn_;
};

// Attends one key block of a tile, like attend_block and attend_wide_block in float32. Sums of
// weights · values are exact within a chunk of keys, and chunks start at the same places for every
// query.
inline void attend_integer_block(const Tile& tile, const Range& range,
                                 const KeyBlock<int8_t>& block, const int8_t* const* after,
                                 int following, Scratch& scratch) {
  ScalesAhead scales(tile, range, block);
  each_chunk(tile, range, block.k, block.v + range.from, range.first_chunk(kChunk<int8_t>),
             [&](const Range& chunk, int head, Ahead<int8_t>* ahead) {
               scales.fetch();
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
