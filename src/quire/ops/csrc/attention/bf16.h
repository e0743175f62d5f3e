// Attention by bf16 dot products (AVX512_BF16): bf16 queries over a bf16 cache.
//
// Scores are products of queries and keys as stored; scale and log2(e) are applied afterwards.
// Weights are rounded to bf16 and multiplied with V, whose tokens are interleaved in pairs. The
// divisor is the sum of the rounded weights: a rounding error common to all weights cancels. As in
// attention/tile.h, the result of a query depends on its own keys alone: a score is one chain over
// dims per lane and one tree, an output one chain over pairs of tokens at fixed places. Many rows
// share a transposed K: keys are lanes, and the same sums need no shuffles. Weights of keys that a
// query does not see add zeros. A zero weight does not hide a V that is not finite; a careful pass
// then leaves it out.
#pragma once

#if defined(__AVX512BF16__)

#include "attention/batch.h"
#include "attention/tile.h"

namespace quire::attention {

constexpr int kPairDims = 2 * kLanes;

QUIRE_INLINE __m512i load_words(const bf16* p) { return _mm512_loadu_si512(p); }
QUIRE_INLINE vf add_products(vf sum, __m512i x, __m512i y) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(y));
}
// interleave() alternates the dims of two tokens. narrowed_in_order() rounds the sums that
// add_products() makes of them and restores the order of dims.
QUIRE_INLINE void interleave(__m512i a, __m512i b, __m512i (&out)[2]) {
  out[0] = _mm512_unpacklo_epi16(a, b);
  out[1] = _mm512_unpackhi_epi16(a, b);
}
QUIRE_INLINE __m512i narrowed_in_order(vf low, vf high) {
  const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
  return _mm512_permutexvar_epi64(order, narrowed(vf2{low, high}));
}

// scores[i][j] = q[i] · k[j] for NR adjacent rows and NK keys, NR · NK <= kLanes.
template <int NR, int NK>
QUIRE_INLINE void score_pairs(const bf16* q, const bf16* const* k, int64_t at, int head_dim,
                              float* scores, Ahead<bf16>* ahead) {
  vf dots[kLanes];
  QUIRE_UNROLL
  for (int i = 0; i < kLanes; ++i) dots[i] = zero();
  for (int d = 0; d < head_dim; d += kPairDims) {
    if (ahead != nullptr) {
      ahead->template fetch<NK * kPairDims>();
      for (int j = 0; j < NK; ++j) ahead->fetch_again(k[j] + at + d, d);
    }
    __m512i keys[NK];
    QUIRE_UNROLL
    for (int j = 0; j < NK; ++j) keys[j] = load_words(k[j] + at + d);
    QUIRE_UNROLL
    for (int i = 0; i < NR; ++i) {
      const __m512i query = load_words(q + i * head_dim + d);
      QUIRE_UNROLL
      for (int j = 0; j < NK; ++j)
        dots[i * NK + j] = add_products(dots[i * NK + j], query, keys[j]);
    }
  }
  float all[kLanes];
  store(all, sums(dots));
  QUIRE_UNROLL
  for (int i = 0; i < NR; ++i)
    std::memcpy(scores + i * kKeyBlock, all + i * NK, NK * sizeof(float));
}

// Computes the scores of all rows of one kv head with the keys of a range. The range lies in one
// chunk of MaxKeys.
template <int MaxKeys>
inline void score_pair_rows(const Tile& tile, const Range& range, const bf16* q,
                            const bf16* const* k, int64_t at, float* scores, Ahead<bf16>* ahead) {
  each_rows(tile.rows, [&](int row, auto count) {
    constexpr int NR = count, NK = std::min(MaxKeys, kLanes / NR);
    const int first = range.low(tile, row), last = range.high(tile, row + NR - 1);
    for (int key = first / NK * NK; key < last; key += NK)
      score_pairs<NR, NK>(q + row * tile.head_dim, k + key, at, tile.head_dim,
                          scores + row * kKeyBlock + key, row == 0 ? ahead : nullptr);
  });
}

// Transposes keys first <= key < last of one head, in whole vectors of keys: [pairs of dims,
// kLanes, 2] per vector.
inline void turn_pairs(const bf16* const* k, int head_dim, int first, int last, bf16* out) {
  for (int key = first / kLanes * kLanes; key < last; key += kLanes) {
    for (int d = 0; d < head_dim; d += kPairDims) {
      __m512i rows[kLanes], turned[kLanes];
      QUIRE_UNROLL
      for (int i = 0; i < kLanes; ++i) rows[i] = load_words(k[key + i] + d);
      transpose(rows, turned);
      bf16* to = out + int64_t{key} * head_dim + d * kLanes;
      QUIRE_UNROLL
      for (int i = 0; i < kLanes; ++i) _mm512_storeu_si512(to + i * kPairDims, turned[i]);
    }
  }
}

// Adds up the lanes of score_pairs() that are Lane modulo 4, for kLanes transposed keys and one row
// at a time, in the order of sums(). Calls combine(row, sum) for first <= row < last.
template <int Vectors, int Lane, class F>
QUIRE_INLINE void score_quarter(const bf16* q, const bf16* keys, int first, int last, F&& combine) {
  constexpr int kLane[4] = {Lane, Lane + 8, Lane + 4, Lane + 12};
  __m512i key[4][Vectors];
  QUIRE_UNROLL
  for (int i = 0; i < 4; ++i)
    QUIRE_UNROLL
    for (int j = 0; j < Vectors; ++j)
      key[i][j] = load_words(keys + (kLane[i] + j * kLanes) * kPairDims);
  for (int row = first; row < last; ++row) {
    vf dots[4];
    QUIRE_UNROLL
    for (int i = 0; i < 4; ++i) {
      dots[i] = zero();
      QUIRE_UNROLL
      for (int j = 0; j < Vectors; ++j) {
        int32_t pair;
        std::memcpy(&pair, q + row * Vectors * kPairDims + 2 * kLane[i] + j * kPairDims,
                    sizeof pair);
        dots[i] = add_products(dots[i], key[i][j], _mm512_set1_epi32(pair));
      }
    }
    combine(row, add(add(dots[0], dots[1]), add(dots[2], dots[3])));
  }
}

// Computes the scores of all rows with transposed keys, bit for bit those of score_pairs(). rest:
// [rows, kLanes], scratch.
template <int Vectors>
inline void score_turned_pairs(const Tile& tile, const Range& range, const bf16* q,
                               const bf16* turned, float* scores, float* rest,
                               Ahead<bf16>* ahead) {
  each_vector(range, [&](int key) {
    int first = 0, last = tile.rows;  // rows that see one of the keys
    while (range.high(tile, first) <= key) ++first;
    while (range.low(tile, last - 1) >= key + kLanes) --last;
    const bf16* keys = turned + int64_t{key} * tile.head_dim;
    float* to = scores + key;
    score_quarter<Vectors, 0>(q, keys, first, last, [&](int row, vf sum) {
      ahead->template fetch<kPairDims>();
      store(to + row * kKeyBlock, sum);
    });
    score_quarter<Vectors, 2>(q, keys, first, last, [&](int row, vf sum) {
      store(to + row * kKeyBlock, add(load(to + row * kKeyBlock), sum));
    });
    score_quarter<Vectors, 1>(q, keys, first, last,
                              [&](int row, vf sum) { store(rest + row * kLanes, sum); });
    score_quarter<Vectors, 3>(q, keys, first, last, [&](int row, vf sum) {
      store(to + row * kKeyBlock,
            add(load(to + row * kKeyBlock), add(load(rest + row * kLanes), sum)));
    });
  });
}

// Turns one row's scores of a key block into bf16 weights 2^(score · scale - max), in place, and
// rescales the row's state. Masked: keys whose bit in `seen` is not set get weight 0 whatever their
// score; otherwise the row sees all keys.
template <bool Masked>
inline void soften_seen(float* s, int width, int row, uint64_t seen, vf scale, const State& state) {
  constexpr int kVectors = kKeyBlock / kLanes;
  const auto seen_or = [&](int i, vf yes, vf no) __attribute__((always_inline)) {
    return Masked ? select(static_cast<vmask>(seen >> i * kLanes), yes, no) : yes;
  };
  vf x[kVectors], top = set1(kNegativeInfinity);
  QUIRE_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    x[i] = mul(load(s + i * kLanes), scale);
    top = max(seen_or(i, x[i], set1(kNegativeInfinity)), top);
  }
  const float before = state.max[row], best = maximum(top);
  const float now = best > before ? best : before;
  const vf base = set1(now == kNegativeInfinity ? 0.0f : now);
  const auto weight = [&](int i) __attribute__((always_inline)) {
    return seen_or(i, weight_of(sub(x[i], base)), zero());
  };
  const __m512i ones = _mm512_set1_epi16(0x3f80);
  vf total = zero();
  QUIRE_UNROLL
  for (int i = 0; i < kVectors; i += 2) {
    __m512i weights = _mm512_setzero_si512();
    if (!Masked || static_cast<uint32_t>(seen >> i * kLanes) != 0) {
      weights = narrowed(vf2{weight(i), weight(i + 1)});
      total = add_products(total, weights, ones);
    }
    _mm512_storeu_si512(reinterpret_cast<bf16*>(s) + i * kLanes, weights);
  }
  state.max[row] = now;
  if (now > before && before > kNegativeInfinity) {
    const vf shrink = exp2_negative(set1(before - now));
    float* acc = state.acc + row * width;
    for (int d = 0; d < width; d += kLanes) store(acc + d, mul(load(acc + d), shrink));
    state.sum[row] = state.sum[row] * first_lane(shrink);
  }
  state.sum[row] = state.sum[row] + sum(total);
}

// Applies soften_seen() to a row that sees the keys low <= key < high.
inline void soften_pairs(float* scores, int width, int row, int low, int high, vf scale,
                         const State& state) {
  float* s = scores + row * kKeyBlock;
  if (low >= high) {
    std::memset(s, 0, kKeyBlock * sizeof(bf16));
    return;
  }
  const uint64_t seen = key_bits(low, high);
  if (~seen == 0) {
    soften_seen<false>(s, width, row, seen, scale, state);
  } else {
    soften_seen<true>(s, width, row, seen, scale, state);
  }
}

// acc[r] += Σ_k weights[r][k] · v[k] over first <= k < last for NR adjacent rows and the dims d to
// d + NU · kPairDims - 1; first is even. values_of(k, out) gives those dims of tokens k and k + 1,
// interleaved. Unrolled: tokens per iteration of the main loop.
template <int NR, int NU, int Unrolled, class F>
QUIRE_INLINE void weigh_pairs(float* acc, int width, const bf16* weights, int d, int first,
                              int last, F&& values_of) {
  vf sums[NR][2 * NU];
  QUIRE_UNROLL
  for (int r = 0; r < NR; ++r)
    QUIRE_UNROLL
    for (int i = 0; i < 2 * NU; ++i) sums[r][i] = load(acc + r * width + d + i * kLanes);
  auto add_two = [&](int k) __attribute__((always_inline)) {
    __m512i values[NU][2];
    values_of(k, values);
    QUIRE_UNROLL
    for (int r = 0; r < NR; ++r) {
      int32_t both;
      std::memcpy(&both, weights + 2 * r * kKeyBlock + k, sizeof both);
      const __m512i pair = _mm512_set1_epi32(both);
      QUIRE_UNROLL
      for (int i = 0; i < 2 * NU; ++i)
        sums[r][i] = add_products(sums[r][i], pair, values[i / 2][i % 2]);
    }
  };
  int k = first;
  for (; Unrolled > 2 && k + Unrolled <= last; k += Unrolled) {
    QUIRE_UNROLL
    for (int i = 0; i < Unrolled; i += 2) add_two(k + i);
  }
  for (; k < last; k += 2) add_two(k);
  QUIRE_UNROLL
  for (int r = 0; r < NR; ++r)
    QUIRE_UNROLL
    for (int i = 0; i < 2 * NU; ++i) store(acc + r * width + d + i * kLanes, sums[r][i]);
}

// Calls body(units, d) for all dims, `Most` units of kPairDims at a time and then one by one.
template <int Most, class F>
QUIRE_INLINE void each_units(int head_dim, F&& body) {
  int d = 0;
  for (; d + Most * kPairDims <= head_dim; d += Most * kPairDims)
    body(std::integral_constant<int, Most>(), d);
  for (; d < head_dim; d += kPairDims) body(std::integral_constant<int, 1>(), d);
}

// acc += weights · values for all rows of one kv head, reading V in place.
inline void weigh_lying(const Tile& tile, const Range& range, const bf16* weights,
                        const bf16* const* v, int64_t at, float* acc, Ahead<bf16>* ahead) {
  each_rows(tile.rows, [&](int row, auto count) __attribute__((always_inline)) {
    constexpr int NR = count, kUnrolled = NR <= 2 ? kUnrolledKeys : 2;
    const int first = range.low(tile, row) / 2 * 2, last = range.high(tile, row + NR - 1);
    each_units<std::min(4, 8 / NR)>(
        tile.value_dim, [&](auto units, int d) __attribute__((always_inline)) {
          constexpr int NU = units;
          weigh_pairs<NR, NU, kUnrolled>(
              acc + row * tile.value_width, tile.value_width, weights + 2 * row * kKeyBlock, d, first, last,
              [&](int k, __m512i(&out)[NU][2]) __attribute__((always_inline)) {
                const bf16* a = v[k] + at + d;
                const bf16* b = v[k + 1] + at + d;
                asm("" : "+r"(a), "+r"(b));  // one address per token, as in weigh_block()
                QUIRE_UNROLL
                for (int u = 0; u < NU; ++u) {
                  if (row == 0) {
                    ahead->template fetch<2 * kPairDims>();
                    ahead->fetch_again(a + u * kPairDims, d + u * kPairDims);
                    ahead->fetch_again(b + u * kPairDims, d + u * kPairDims);
                  }
                  interleave(load_words(a + u * kPairDims), load_words(b + u * kPairDims), out[u]);
                }
              });
        });
  });
}

// Interleaves tokens first <= t < last in pairs: [tokens / 2, dims / 32, 2, 32]. A token of a pair
// that lies outside becomes 0.
inline void interleave_rows(const bf16* const* v, int64_t at, int value_dim, int first, int last,
                            bf16* out) {
  for (int k = first / 2 * 2; k < last; k += 2) {
    bf16* to = out + int64_t{k} * value_dim;
    for (int d = 0; d < value_dim; d += kPairDims, to += 2 * kPairDims) {
      const __m512i none = _mm512_setzero_si512();
      __m512i both[2];
      interleave(k < first ? none : load_words(v[k] + at + d),
                 k + 1 < last ? load_words(v[k + 1] + at + d) : none, both);
      _mm512_storeu_si512(to, both[0]);
      _mm512_storeu_si512(to + kPairDims, both[1]);
    }
  }
}

// acc += weights · values for NR rows, with V from interleave_rows() over the tokens of a range.
template <int NR>
QUIRE_INLINE void weigh_interleaved(const Tile& tile, const Range& range, int row,
                                    const bf16* weights, const bf16* values, float* acc,
                                    Ahead<bf16>* ahead) {
  const int first = range.low(tile, row) / 2 * 2, last = range.high(tile, row + NR - 1);
  each_units<std::min(4, 8 / NR)>(
      tile.value_dim, [&](auto units, int d) __attribute__((always_inline)) {
        constexpr int NU = units;
        weigh_pairs<NR, NU, 2>(acc + row * tile.value_width, tile.value_width,
                               weights + 2 * row * kKeyBlock, d, first, last,
                               [&](int k, __m512i(&out)[NU][2]) __attribute__((always_inline)) {
                                 if (ahead != nullptr) ahead->template fetch<2 * NU * kPairDims>();
                                 const bf16* from = values + int64_t{k} * tile.value_dim + 2 * d;
                                 QUIRE_UNROLL
                                 for (int i = 0; i < 2 * NU; ++i)
                                   out[i / 2][i % 2] = load_words(from + i * kPairDims);
                               });
      });
}

// Attention of one tile of queries, a span of keys at a time.
class PairPiece {
 public:
  // Returns whether this class can compute the batch. Depends on dtypes and widths alone.
  static bool takes(const Batch& b) {
    return b.q_dtype == DType::kBFloat16 && b.head_dim % kPairDims == 0 &&
           b.value_dim % kPairDims == 0;
  }
  static int most_rows(const Batch&) { return kLargeTileRows; }
  static int64_t scratch_size(const Batch& b) {
    return int64_t{b.tile_rows()} * (b.head_dim / 2 + kKeyBlock + kLanes) +
           int64_t{kKeyBlock / 2} * (b.head_dim + b.value_dim);
  }

  // Loads the queries.
  PairPiece(const Batch& b, const Work& work, float* memory, const State& span)
      : b_(b),
        tile_(make_tile(b, work)),
        keys_(make_keys<bf16>(b, work)),
        span_(span),
        scores_(memory),
        rest_(memory + int64_t{b.tile_rows()} * kKeyBlock),
        q_(reinterpret_cast<bf16*>(rest_ + int64_t{b.tile_rows()} * kLanes)),
        copy_(q_ + int64_t{b.tile_rows()} * b.head_dim),
        values_(copy_ + int64_t{kKeyBlock} * b.head_dim) {
    each_query_row(b, work, [&](int64_t token, int64_t head, int row) {
      const bf16* from = fetch_query(b, token, head);
      bf16* to = q_ + int64_t{row} * b.head_dim;
      for (int d = 0; d < b.head_dim; d += kPairDims)
        _mm512_storeu_si512(to + d, load_words(from + d));
    });
  }

  static int states(const Batch& b, const Work& work) { return make_tile(b, work).num_states(); }

  // Prefetches the first keys of `work` while this piece uses its last ones.
  void follow(const Work& work) {
    const Tile tile = make_tile(b_, work);
    const int64_t low = tile.low(0), end = tile.end();
    following_.locate(make_keys<bf16>(b_, work), low / kKeyBlock * kKeyBlock, low, end);
    follows_ = true;
  }

  // store() always writes the outputs.
  bool finishes() const { return false; }
  // careful: V of a token reaches only the queries that see it.
  void attend(int64_t span, bool continues, bool careful) {
    attend_span(tile_, keys_, span, fetched_, continues, follows_ ? &following_ : nullptr, span_,
                [&](const Range& range, const KeyBlock<bf16>& keys, const bf16* const* after,
                    int keys_after) {
                  if (careful) {
                    attend_carefully(range, keys);
                  } else if (!tile_.copies()) {
                    attend_few(range, keys, after, keys_after);
                  } else {
                    attend_many(range, keys, after, keys_after);
                  }
                });
    fetched_ = true;
  }

  // Writes acc / sum, rounded to bf16. Returns whether every output is finite.
  static bool store(const Batch& b, const Work& work, const State& total) {
    __m512i tops = _mm512_setzero_si512();
    each_query_row(b, work, [&](int64_t token, int64_t head, int row) {
      const float* acc = total.acc + int64_t{row} * b.value_width;
      bf16* to = b.output<bf16>(token, head);
      const vf inverse = set1(b.inverse_sum(head, total, row));
      __m512i top = _mm512_setzero_si512();
      for (int d = 0; d < b.value_dim; d += kPairDims) {
        const vf low = mul(load(acc + d), inverse), high = mul(load(acc + d + kLanes), inverse);
        const __m512i words = narrowed_in_order(low, high);
        _mm512_storeu_si512(to + d, words);
        // Magnitudes compare like their bits.
        top = _mm512_max_epu16(_mm512_and_si512(words, _mm512_set1_epi16(0x7fff)), top);
      }
      tops = _mm512_max_epu16(top, tops);
    });
    return _mm512_cmpge_epu16_mask(tops, _mm512_set1_epi16(0x7f80)) == 0;
  }

 private:
  float* scores(int head) const { return scores_ + head * tile_.rows * kKeyBlock; }
  const bf16* weights(int head) const { return reinterpret_cast<const bf16*>(scores(head)); }
  const bf16* q(int head) const { return q_ + int64_t{head} * tile_.rows * tile_.head_dim; }
  float* acc(int head) const { return span_.acc + int64_t{head} * tile_.rows * tile_.value_width; }

  void soften(const Range& range) {
    const bool bends = tile_.bend.any();
    const vf scale = set1(b_.scale * kLog2E), after = bends ? set1(1.0f) : scale;
    for (int head = 0; head < tile_.kv_heads; ++head)
      for (int row = 0; row < tile_.rows; ++row) {
        const int state = head * tile_.rows + row;
        const int low = range.low(tile_, row), high = range.high(tile_, row);
        if (bends) bend(tile_.bend_of(head, row, range.block), state, low, high, scale);
        soften_pairs(scores_, tile_.value_width, state, low, high, after, span_);
      }
  }

  // Scales the scores, then applies cap and slope, in every vector of keys with a visible one.
  void bend(const RowBend& bend, int state, int low, int high, vf scale) const {
    float* s = scores_ + int64_t{state} * kKeyBlock;
    for (int k = low / kLanes * kLanes; k < high; k += kLanes)
      quire::store(s + k, bend(mul(load(s + k), scale), k));
  }

  // Works like attend_block().
  void attend_few(const Range& range, const KeyBlock<bf16>& keys, const bf16* const* after,
                  int following) {
    each_chunk(tile_, range, keys.k, keys.v + range.from, range.first_chunk(kChunk<bf16>),
               [&](const Range& chunk, int head, Ahead<bf16>* ahead) {
                 score_pair_rows<kChunk<bf16>>(tile_, chunk, q(head), keys.k,
                                               int64_t{head} * tile_.head_dim, scores(head),
                                               ahead);
               });
    soften(range);
    each_chunk(tile_, range, keys.v, after, following,
               [&](const Range& chunk, int head, Ahead<bf16>* ahead) {
                 weigh_lying(tile_, chunk, weights(head), keys.v, int64_t{head} * tile_.value_dim,
                             acc(head), ahead);
               });
  }

  // Works like attend_wide_block(): prepares K and V once for all rows.
  void attend_many(const Range& range, const KeyBlock<bf16>& keys, const bf16* const* after,
                   int following) {
    Ahead<bf16> values(keys.v + range.from, range.to - range.from, tile_.value_dim);
    score_many(range, keys, &values);
    values.fetch_all();
    soften(range);
    interleave_rows(keys.v, 0, tile_.value_dim, range.from, range.to, values_);
    Ahead<bf16> ahead(after, following, tile_.head_dim);
    each_rows(tile_.rows, [&](int row, auto count) __attribute__((always_inline)) {
      weigh_interleaved<count>(tile_, range, row, weights(0), values_, acc(0),
                               row == 0 ? &ahead : nullptr);
    });
    ahead.fetch_all();
  }

  void score_many(const Range& range, const KeyBlock<bf16>& keys, Ahead<bf16>* ahead) {
    switch (tile_.head_dim / kPairDims) {
      case 1: return turn_and_score<1>(range, keys, ahead);
      case 2: return turn_and_score<2>(range, keys, ahead);
      case 3: return turn_and_score<3>(range, keys, ahead);
      case 4: return turn_and_score<4>(range, keys, ahead);
      default: return score_copied(range, keys, ahead);  // too wide for the registers
    }
  }

  template <int Vectors>
  void turn_and_score(const Range& range, const KeyBlock<bf16>& keys, Ahead<bf16>* ahead) {
    turn_pairs(keys.k, tile_.head_dim, range.from, range.to, copy_);
    score_turned_pairs<Vectors>(tile_, range, q(0), copy_, scores(0), rest_, ahead);
  }

  // Copies the keys to adjacent rows: tokens some KiB apart map to few sets of the first-level
  // cache.
  void score_copied(const Range& range, const KeyBlock<bf16>& keys, Ahead<bf16>* ahead) {
    const bf16* rows[kKeyBlock];
    for (int k = 0; k < kKeyBlock; ++k) {
      const bool some = k >= range.from && k < range.to;  // others repeat the first
      bf16* to = copy_ + int64_t{some ? k : range.from} * tile_.head_dim;
      rows[k] = to;
      for (int d = 0; some && d < tile_.head_dim; d += kPairDims)
        _mm512_storeu_si512(to + d, load_words(keys.k[k] + d));
    }
    score_pair_rows<kKeyBlock>(tile_, range, q(0), rows, 0, scores(0), ahead);
  }

  // Interleaves V anew for each row, with the tokens it sees alone.
  void attend_carefully(const Range& range, const KeyBlock<bf16>& keys) {
    for (int head = 0; head < tile_.kv_heads; ++head)
      score_pair_rows<kKeyBlock>(tile_, range, q(head), keys.k, int64_t{head} * tile_.head_dim,
                                 scores(head), nullptr);
    soften(range);
    for (int head = 0; head < tile_.kv_heads; ++head)
      for (int row = 0; row < tile_.rows; ++row) {
        interleave_rows(keys.v, int64_t{head} * tile_.value_dim, tile_.value_dim,
                        range.low(tile_, row), range.high(tile_, row), values_);
        weigh_interleaved<1>(tile_, range, row, weights(head), values_, acc(head), nullptr);
      }
  }

  const Batch& b_;
  const Tile tile_;
  const Keys<bf16> keys_;
  const State span_;
  float* scores_;  // [kv_heads, rows, kKeyBlock]; weights take the first half of each row
  float* rest_;    // [rows, kLanes], see score_turned_pairs()
  bf16* q_;        // [kv_heads, rows, head_dim]
  bf16* copy_;     // [kKeyBlock, head_dim]: K, copied or transposed
  bf16* values_;   // [kKeyBlock / 2, value_dim / 32, 2, 32]: V
  LocatedBlock<bf16> following_;
  bool follows_ = false, fetched_ = false;
};

}  // namespace quire::attention

#endif
