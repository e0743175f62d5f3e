// Attention in tile registers (AMX): bf16 queries over a bf16 cache.
//
// Query rows are lanes, 16 to a block. Scores are keys times queries, [tokens, lanes]; the softmax
// goes down the lanes. Weights are rounded to bf16 and turned, [lanes, tokens], to meet V, of which
// two tokens lie side by side. As in attention_tile.h, what a query computes depends on its own keys
// alone: an element of a product is one chain of sums over dims or tokens at fixed places, whichever
// rows share the registers, and weights of keys that a query does not see add zeros. The sum that
// divides is that of the rounded weights: what rounding does to all weights alike cancels.
#pragma once

#if defined(__AMX_BF16__)

#include <limits>

#include "attention_batch.h"
#include "tiles.h"

namespace quire::attention {

constexpr int kBlockLanes = kTileRows;
constexpr int kTileTokens = kTileRows;  // of one register of keys
constexpr int kKeyTiles = kKeyBlock / kTileTokens;
constexpr int kPairTokens = 2 * kTileTokens;  // of one register of V
constexpr int kPairTiles = kKeyBlock / kPairTokens;
constexpr int kTileDims = kTileBytes / sizeof(bf16);  // of a register of keys or queries
constexpr int kTileElements = kTileRows * kTileDims;  // of bf16
static_assert(kLanes == kBlockLanes);

// How the query rows of some heads lie in lanes. A unit is what one product takes: rows of a head.
struct LaneLayout {
  int rows;      // lanes of a unit
  int parts;     // units of one head
  int in_block;  // units of one block
  int heads;

  int units() const { return heads * parts; }
  int blocks() const { return (units() + in_block - 1) / in_block; }
  int lane(int unit) const { return unit / in_block * kBlockLanes + unit % in_block * rows; }
  int state(int head, int row) const { return lane(head * parts + row / rows) + row % rows; }
  // One head, and whole registers.
  bool wide() const { return heads == 1 && rows == kBlockLanes; }
};

inline LaneLayout lane_layout(int rows, int heads) {
  if (2 * rows <= kBlockLanes) return {rows, 1, kBlockLanes / rows, heads};
  return {kBlockLanes, (rows + kBlockLanes - 1) / kBlockLanes, 1, heads};
}

// Shapes of the registers. Scores: 0 … 3 sums [tokens, lanes], 4 and 5 keys, 6 and 7 queries.
// Outputs: 0 … 3 sums [lanes, dims], 4 and 5 weights, 6 and 7 values.
class LaneTiles {
 public:
  explicit LaneTiles(int rows) : rows_(static_cast<uint8_t>(rows)) {}
  ~LaneTiles() { _tile_release(); }
  LaneTiles(const LaneTiles&) = delete;
  LaneTiles& operator=(const LaneTiles&) = delete;

  void for_scores() { configure(kTileRows, rows_ * 4, kTileRows, kTileBytes, rows_ * 4); }
  void for_outputs() { configure(rows_, kTileBytes, rows_, kTileBytes, kTileBytes); }

 private:
  void configure(int sum_rows, int sum_bytes, int left_rows, int left_bytes, int right_bytes) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } shapes;
    auto set = [&](int tile, int rows, int bytes) {
      shapes.rows[tile] = static_cast<uint8_t>(rows);
      shapes.row_bytes[tile] = static_cast<uint16_t>(bytes);
    };
    for (const int tile : {0, 1, 2, 3}) set(tile, sum_rows, sum_bytes);
    for (const int tile : {4, 5}) set(tile, left_rows, left_bytes);
    for (const int tile : {6, 7}) set(tile, kTileRows, right_bytes);
    order_memory();
    _tile_loadconfig(&shapes);
    order_memory();
  }

  uint8_t rows_;
};

// Asks for memory ahead of its use, row by row, as much as it is told to. It goes into the
// second-level cache: what is asked for is more than the first one has room for.
class Lines {
 public:
  Lines() = default;
  // count rows of `bytes`.
  void add(const bf16* first, int64_t stride, int count, int64_t bytes) {
    const int64_t step = stride * int64_t{sizeof(bf16)};
    const bool one = step == bytes;  // rows side by side
    pieces_[last_++] = {reinterpret_cast<const char*>(first), step, one ? 1 : count,
                        one ? count * bytes : bytes};
  }
  QUIRE_INLINE void fetch(int lines) {
    if (at_ == last_) return;
    const int64_t wanted = int64_t{lines} * kLine;
    if (done_ + wanted < pieces_[at_].bytes) {
      const char* from = pieces_[at_].row + done_;
      done_ += wanted;
      for (const char* end = from + wanted; from < end; from += kLine) ask(from);
    } else {
      fetch_over_rows(lines);
    }
  }

 private:
  static constexpr int64_t kLine = 64;
  struct Piece {
    const char* row;
    int64_t stride;
    int count;
    int64_t bytes;
  };

  QUIRE_INLINE static void ask(const char* line) { _mm_prefetch(line, _MM_HINT_T1); }

  [[gnu::noinline]] void fetch_over_rows(int lines) {
    for (; lines > 0 && at_ < last_; --lines) {
      Piece& piece = pieces_[at_];
      ask(piece.row + done_);
      done_ += kLine;
      if (done_ < piece.bytes) continue;
      done_ = 0;
      piece.row += piece.stride;
      if (--piece.count == 0) ++at_;
    }
  }

  Piece pieces_[2 * kKeyTiles];
  int at_ = 0, last_ = 0;
  int64_t done_ = 0;
};

// Keys of one product of scores, and where it puts [tokens, lanes of the unit].
struct ScoreTile {
  const bf16* k;
  const bf16* q;
  float* scores;
};

// kCount tiles, each over all dims. kShared: all have the queries of the first.
template <int kCount, bool kShared>
QUIRE_INLINE void score_tiles(const ScoreTile* tiles, int64_t stride, int rows, int steps,
                              Lines* ahead, int lines) {
  const int64_t k_bytes = stride * sizeof(bf16), q_bytes = rows * 4;
  order_memory();
  _tile_zero(0);
  if constexpr (kCount > 1) _tile_zero(1);
  if constexpr (kCount > 2) _tile_zero(2);
  if constexpr (kCount > 3) _tile_zero(3);
  for (int step = 0; step < steps; ++step) {
    auto keys = [&](int i) { return tiles[i].k + step * kTileDims; };
    auto queries = [&](int i) { return tiles[i].q + int64_t{step} * kTileDims * rows; };
    ahead->fetch(lines);
    _tile_loadd(6, queries(0), q_bytes);
    _tile_loadd(4, keys(0), k_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kCount > 1) {
      ahead->fetch(lines);
      _tile_loadd(5, keys(1), k_bytes);
      if constexpr (kShared) {
        _tile_dpbf16ps(1, 5, 6);
      } else {
        _tile_loadd(7, queries(1), q_bytes);
        _tile_dpbf16ps(1, 5, 7);
      }
    }
    if constexpr (kCount > 2) {
      ahead->fetch(lines);
      _tile_loadd(4, keys(2), k_bytes);
      if constexpr (!kShared) _tile_loadd(6, queries(2), q_bytes);
      _tile_dpbf16ps(2, 4, 6);
    }
    if constexpr (kCount > 3) {
      ahead->fetch(lines);
      _tile_loadd(5, keys(3), k_bytes);
      if constexpr (kShared) {
        _tile_dpbf16ps(3, 5, 6);
      } else {
        _tile_loadd(7, queries(3), q_bytes);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
  }
  constexpr int64_t kRowBytes = kBlockLanes * sizeof(float);
  _tile_stored(0, tiles[0].scores, kRowBytes);
  if constexpr (kCount > 1) _tile_stored(1, tiles[1].scores, kRowBytes);
  if constexpr (kCount > 2) _tile_stored(2, tiles[2].scores, kRowBytes);
  if constexpr (kCount > 3) _tile_stored(3, tiles[3].scores, kRowBytes);
  order_memory();
}

template <bool kShared>
inline void score_some(const ScoreTile* tiles, int count, int64_t stride, int rows, int steps,
                       Lines* ahead, int lines) {
  switch (count) {
    case 1: return score_tiles<1, kShared>(tiles, stride, rows, steps, ahead, lines);
    case 2: return score_tiles<2, kShared>(tiles, stride, rows, steps, ahead, lines);
    case 3: return score_tiles<3, kShared>(tiles, stride, rows, steps, ahead, lines);
    case 4: return score_tiles<4, kShared>(tiles, stride, rows, steps, ahead, lines);
  }
}

// acc [lanes of a unit, width] += weights · values over kSteps times kPairTokens tokens, for
// 32 · kPairs dims. fresh: acc is taken for zeros. lines: to fetch for each kLanes dims.
template <int kSteps, int kPairs>
QUIRE_INLINE void weigh_dims(const bf16* values, int64_t step_elements, float* acc, int64_t width,
                             bool fresh, Lines* ahead, int lines) {
  const int64_t row_bytes = width * sizeof(float);
  if (fresh) {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kPairs > 1) {
      _tile_zero(2);
      _tile_zero(3);
    }
  } else {
    _tile_loadd(0, acc, row_bytes);
    _tile_loadd(1, acc + kLanes, row_bytes);
    if constexpr (kPairs > 1) {
      _tile_loadd(2, acc + 2 * kLanes, row_bytes);
      _tile_loadd(3, acc + 3 * kLanes, row_bytes);
    }
  }
  _tile_loadd(6, values, kTileBytes);
  _tile_dpbf16ps(0, 4, 6);
  ahead->fetch(lines);
  _tile_loadd(7, values + kTileElements, kTileBytes);
  _tile_dpbf16ps(1, 4, 7);
  ahead->fetch(lines);
  if constexpr (kPairs > 1) {
    _tile_loadd(6, values + 2 * kTileElements, kTileBytes);
    _tile_dpbf16ps(2, 4, 6);
    ahead->fetch(lines);
    _tile_loadd(7, values + 3 * kTileElements, kTileBytes);
    _tile_dpbf16ps(3, 4, 7);
    ahead->fetch(lines);
  }
  if constexpr (kSteps > 1) {
    values += step_elements;
    _tile_loadd(6, values, kTileBytes);
    _tile_dpbf16ps(0, 5, 6);
    _tile_loadd(7, values + kTileElements, kTileBytes);
    _tile_dpbf16ps(1, 5, 7);
    if constexpr (kPairs > 1) {
      _tile_loadd(6, values + 2 * kTileElements, kTileBytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_loadd(7, values + 3 * kTileElements, kTileBytes);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, acc, row_bytes);
  _tile_stored(1, acc + kLanes, row_bytes);
  if constexpr (kPairs > 1) {
    _tile_stored(2, acc + 2 * kLanes, row_bytes);
    _tile_stored(3, acc + 3 * kLanes, row_bytes);
  }
}

template <int kSteps>
inline void weigh_tiles(const bf16* weights, const bf16* values, int head_dim, float* acc,
                        bool fresh, Lines* ahead, int lines) {
  order_memory();
  _tile_loadd(4, weights, kTileBytes);
  if constexpr (kSteps > 1) _tile_loadd(5, weights + kTileElements, kTileBytes);
  const int64_t step_elements = int64_t{kPairTokens} * head_dim;
  int d = 0;
  for (; d + 4 * kLanes <= head_dim; d += 4 * kLanes)
    weigh_dims<kSteps, 2>(values + d * kPairTokens, step_elements, acc + d, head_dim, fresh, ahead,
                          lines);
  if (d < head_dim)
    weigh_dims<kSteps, 1>(values + d * kPairTokens, step_elements, acc + d, head_dim, fresh, ahead,
                          lines);
  order_memory();
}

// out[j][i] = in[i][j] of 16 by 16 words; row_of(i): where row i of the input is. Of each row of the
// output `lanes` are written.
template <class RowOf>
QUIRE_INLINE void turn_words(RowOf&& row_of, void* out, int64_t out_bytes, __mmask16 lanes) {
  auto quarter = [&](int row, int column) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(row_of(row)) + column);
  };
  QUIRE_UNROLL
  for (int column = 0; column < 4; ++column) {
    __m512i x[4];
    QUIRE_UNROLL
    for (int k = 0; k < 4; ++k) {
      x[k] = _mm512_castsi128_si512(quarter(k, column));
      x[k] = _mm512_inserti32x4(x[k], quarter(k + 4, column), 1);
      x[k] = _mm512_inserti32x4(x[k], quarter(k + 8, column), 2);
      x[k] = _mm512_inserti32x4(x[k], quarter(k + 12, column), 3);
    }
    const __m512i a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpackhi_epi32(x[0], x[1]);
    const __m512i c = _mm512_unpacklo_epi32(x[2], x[3]), d = _mm512_unpackhi_epi32(x[2], x[3]);
    auto put = [&](int k, __m512i row) {
      char* to = static_cast<char*>(out) + (4 * column + k) * out_bytes;
      _mm512_mask_storeu_epi32(to, lanes, row);
    };
    put(0, _mm512_unpacklo_epi64(a, c));
    put(1, _mm512_unpackhi_epi64(a, c));
    put(2, _mm512_unpacklo_epi64(b, d));
    put(3, _mm512_unpackhi_epi64(b, d));
  }
}

// V of kPairTokens tokens of one head, in tiles of kLanes columns: row i has tokens i and
// i + kTileTokens. Columns 4 j … 4 j + 3 of an even tile are dims 8 j … of its 32, of the next tile
// dims 8 j + 4 …: LanePiece::store undoes it. usable: bit by token; others are not read, and are 0.
inline void pair_tokens(const bf16* low, const bf16* high, int64_t stride, uint32_t usable,
                        int head_dim, bf16* out, Lines* ahead, int lines) {
  auto put = [&](int i, int d, __m512i a, __m512i b) {
    bf16* to = out + int64_t{d} * kPairTokens + i * kTileDims;
    _mm512_store_si512(to, _mm512_unpacklo_epi16(a, b));
    _mm512_store_si512(to + kTileElements, _mm512_unpackhi_epi16(a, b));
  };
  if (usable == ~uint32_t{0}) {
    for (int i = 0; i < kTileTokens; ++i, low += stride, high += stride) {
      ahead->fetch(lines);
      for (int d = 0; d < head_dim; d += kTileDims)
        put(i, d, _mm512_loadu_si512(low + d), _mm512_loadu_si512(high + d));
    }
    return;
  }
  for (int i = 0; i < kTileTokens; ++i) {
    ahead->fetch(lines);
    const bool first = usable >> i & 1, second = usable >> (i + kTileTokens) & 1;
    for (int d = 0; d < head_dim; d += kTileDims)
      put(i, d, first ? _mm512_loadu_si512(low + i * stride + d) : _mm512_setzero_si512(),
          second ? _mm512_loadu_si512(high + i * stride + d) : _mm512_setzero_si512());
  }
}

// 2^x for x <= 0, within 6e-6 of itself: far less than rounding to bf16 does to it. Below 2^-126 it
// is 0 once it is rounded. NaN stays NaN.
QUIRE_INLINE vf weight_of(vf x) {
  x = max(set1(-127.0f), x);
  constexpr int kBelow = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
  const vf f = _mm512_reduce_ps(x, kBelow);  // x less the integer below it, which scalef takes
  vf p = set1(1.3426686e-2f);
  p = fma(p, f, set1(5.2242473e-2f));
  p = fma(p, f, set1(2.4128021e-1f));
  p = fma(p, f, set1(6.9304484e-1f));
  p = fma(p, f, set1(1.0f));
  return _mm512_scalef_ps(p, x);
}

// Keys of a block that the lanes see, in positions relative to it: first <= key < first + count.
struct LaneKeys {
  __m512i first, count;

  QUIRE_INLINE vmask sees(int key) const {
    return _mm512_cmplt_epu32_mask(_mm512_sub_epi32(_mm512_set1_epi32(key), first), count);
  }
};

// Scores [kKeyBlock, lanes] become weights 2^(score - max), [lanes, pairs of tokens], for the tiles
// of pairs from <= tile < to; no lane sees others. kMasked: some lanes do not see all. factors: what
// the lanes' acc is to shrink by. lines: to fetch for 8 tokens. Returns the lanes for which that is
// not 1.
template <bool kMasked>
inline vmask soften_lanes(const float* scores, vf scale, const LaneKeys& keys, int from, int to,
                          float* maxima, float* sums, bf16* weights, float* factors, Lines* ahead,
                          int lines) {
  const vf lowest = set1(kNegativeInfinity);
  vf tops[4] = {lowest, lowest, lowest, lowest};
  for (int t = from * kPairTokens; t < to * kPairTokens; t += 4) {
    QUIRE_UNROLL
    for (int i = 0; i < 4; ++i) {
      vf x = mul(load(scores + (t + i) * kLanes), scale);
      if constexpr (kMasked) x = select(keys.sees(t + i), x, lowest);
      tops[i] = max(x, tops[i]);
    }
  }
  const vf before = load(maxima);
  const vf now = max(max(max(tops[0], tops[1]), max(tops[2], tops[3])), before);
  const vf base = select(less(lowest, now), now, zero());
  vf totals[4] = {zero(), zero(), zero(), zero()};
  const __m512i places =
      _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,  //
                       23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const auto ones = reinterpret_cast<__m512bh>(_mm512_set1_epi16(0x3f80));
  alignas(64) uint32_t pairs[kTileTokens][kLanes];
  for (int tile = from; tile < to; ++tile) {
    const int t = tile * kPairTokens;
    auto weight = [&](int key) __attribute__((always_inline)) {
      const vf x = weight_of(_mm512_fmsub_ps(load(scores + key * kLanes), scale, base));
      return kMasked ? select(keys.sees(key), x, zero()) : x;
    };
    for (int first = 0; first < kTileTokens; first += 4) {
      ahead->fetch(lines);
      QUIRE_UNROLL
      for (int k = 0; k < 4; ++k) {
        const int i = first + k;
        const vf low = weight(t + i), high = weight(t + i + kTileTokens);
        const auto both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
        const __m512i pair = _mm512_permutexvar_epi16(places, both);
        totals[k] = _mm512_dpbf16_ps(totals[k], reinterpret_cast<__m512bh>(pair), ones);
        _mm512_store_si512(pairs[i], pair);
      }
    }
    turn_words([&](int i) { return pairs[i]; }, weights + tile * kTileElements, kTileBytes,
               0xffff);
  }
  const vmask shrinks = less(before, now) & less(lowest, before);
  const vf factor = select(shrinks, exp2_negative(sub(before, now)), set1(1.0f));
  const vf total = add(add(totals[0], totals[1]), add(totals[2], totals[3]));
  store(maxima, now);
  store(sums, add(mul(load(sums), factor), total));
  store(factors, factor);
  return shrinks;
}

// Where the tokens of a key block are: kTileTokens at a time, `stride` apart.
struct KeyTiles {
  int64_t block;  // position of the first key
  int from, to;   // keys that the tile sees
  const bf16* k[kKeyTiles];
  const bf16* v[kKeyTiles];
  int64_t stride;

  int first_tile() const { return from / kTileTokens; }
  int end_tile() const { return (to + kTileTokens - 1) / kTileTokens; }
  int first_pair() const { return from / kPairTokens; }
  int end_pair() const { return (to + kPairTokens - 1) / kPairTokens; }
};

// Bits first <= bit < end of 64.
inline uint64_t bits_between(int first, int end) {
  if (first >= end) return 0;
  const uint64_t below = end >= 64 ? ~uint64_t{0} : (uint64_t{1} << end) - 1;
  return below & ~((uint64_t{1} << first) - 1);
}

// A tile of queries over spans of its keys.
class LanePiece {
 public:
  // Whether the registers take such a batch: a function of its types and of head_dim alone.
  static bool takes(const Batch& b) {
    return b.q_dtype == DType::kBFloat16 && b.head_dim % kTileDims == 0 &&
           b.group <= kMostBlocks * kBlockLanes;
  }
  // Rows that share what is made of K and V. acc and the queries lie in the second-level cache.
  static constexpr int kMostRows = 512;
  static int64_t scratch_size(const Batch& b) {
    const int64_t states = b.num_states;
    return states * (b.head_dim / 2 + kKeyBlock + kKeyBlock / 2 + 2) + kKeyBlock * b.head_dim +
           gathered_size(b);
  }

  // Loads the queries.
  LanePiece(const Batch& b, const Work& work, float* memory, const State& span)
      : b_(b),
        tile_(make_tile(b, work)),
        keys_(make_keys<bf16>(b, work)),
        lanes_(lane_layout(tile_.rows, tile_.kv_heads)),
        span_(span) {
    const int64_t states = b.num_states;
    q_ = reinterpret_cast<bf16*>(memory);
    scores_ = memory + states * b.head_dim / 2;
    weights_ = reinterpret_cast<bf16*>(scores_ + states * kKeyBlock);
    values_ = weights_ + states * kKeyBlock;
    copy_ = values_ + kKeyBlock * b.head_dim;
    first_ = reinterpret_cast<int32_t*>(copy_ + kKeyBlock * b.head_dim);
    last_ = first_ + states;
    gathered_ = reinterpret_cast<bf16*>(last_ + states);
    load_queries(work);
    find_limits();
  }

  static int states(const Batch& b, const Work& work) {
    return lane_layout(work.num_tokens * b.group, work.num_kv_heads).blocks() * kBlockLanes;
  }

  // The work that this thread is likely to do next: its first keys are fetched at the end of this.
  void follow(const Work& work) {
    if (lanes_.wide()) return;  // bound by arithmetic
    const Tile tile = make_tile(b_, work);
    const int64_t low = tile.low(0), end = tile.position(tile.rows - 1) + 1;
    following_ = locate(make_keys<bf16>(b_, work), low / kKeyBlock * kKeyBlock, low, end);
    follows_ = true;
  }

  // careful: V of tokens that are not finite meets only the queries that see them.
  void attend(int64_t span, bool continues, bool careful) {
    const int states = lanes_.blocks() * kBlockLanes;
    std::memset(span_.sum, 0, sizeof(float) * states);
    for (int i = 0; i < states; ++i) span_.max[i] = kNegativeInfinity;
    if (!lanes_.wide()) {
      std::memset(span_.acc, 0, sizeof(float) * states * b_.head_dim);
      std::memset(scores_, 0, sizeof(float) * states * kKeyBlock);
    }
    std::fill(seen_, seen_ + lanes_.blocks(), false);
    const int64_t low = std::max(tile_.low(0), span * kSpan);
    const int64_t end = tile_.position(tile_.rows - 1) + 1;
    const int64_t high = std::min(end, (span + 1) * kSpan);
    LaneTiles registers(lanes_.rows);
    if (lanes_.wide()) registers.for_scores();
    KeyTiles tiles[2];
    int at = 0;
    if (low < high) tiles[at] = locate(keys_, low / kKeyBlock * kKeyBlock, low, end);
    for (int64_t block = low / kKeyBlock * kKeyBlock; block < high; block += kKeyBlock, at ^= 1) {
      const int64_t following = block + kKeyBlock;
      const KeyTiles* next = nullptr;
      if (following < (continues ? end : high)) {
        tiles[at ^ 1] = locate(keys_, following, low, end);
        next = &tiles[at ^ 1];
      } else if (follows_ && !continues) {
        next = &following_;
      }
      gather(tiles[at]);
      if (lanes_.wide()) {
        attend_wide(tiles[at], next, careful);
      } else {
        attend_heads(tiles[at], next, careful, registers);
      }
    }
    for (int block = 0; block < lanes_.blocks(); ++block)
      if (lanes_.wide() && !seen_[block])
        std::memset(acc(block * kBlockLanes), 0, sizeof(float) * kBlockLanes * b_.head_dim);
  }

  // total / its sum, rounded. Returns whether all of it is finite.
  static bool store(const Batch& b, const Work& work, const State& total) {
    const Tile tile = make_tile(b, work);
    const LaneLayout lanes = lane_layout(tile.rows, tile.kv_heads);
    const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
    vf broken = zero();
    each_query_row(b, work, b.out_stride, [&](int64_t offset, int row) {
      const int state = lanes.state(row / tile.rows, row % tile.rows);
      const float* acc = total.acc + int64_t{state} * b.head_dim;
      bf16* to = static_cast<bf16*>(b.out) + offset;
      const vf inverse = set1(1.0f / total.sum[state]);
      for (int d = 0; d < b.head_dim; d += kTileDims) {
        const vf x = mul(load(acc + d), inverse), y = mul(load(acc + d + kLanes), inverse);
        broken = fma(x, zero(), fma(y, zero(), broken));
        const auto both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(y, x));
        _mm512_storeu_si512(to + d, _mm512_permutexvar_epi64(order, both));
      }
    });
    return sum(broken) == 0.0f;
  }

 private:
  static constexpr int kMostBlocks = 64;

  // K and V of a key block whose pages hold no whole tiles of tokens.
  static int64_t gathered_size(const Batch& b) {
    return b.block_size % kTileTokens == 0 ? 0 : int64_t{kKeyBlock} * b.num_kv_heads * b.head_dim;
  }

  float* acc(int state) const { return span_.acc + int64_t{state} * b_.head_dim; }
  const bf16* queries(int unit) const { return q_ + int64_t{unit} * lanes_.rows * b_.head_dim; }

  void load_queries(const Work& work) {
    alignas(64) static const bf16 zeros[kTileDims] = {};
    const int64_t token = (b_.query_start_loc[work.row] + work.token) * b_.q_stride;
    const auto lanes = static_cast<__mmask16>((1u << lanes_.rows) - 1);
    for (int unit = 0; unit < lanes_.units(); ++unit) {
      const int head = unit / lanes_.parts, first = unit % lanes_.parts * lanes_.rows;
      const bf16* rows[kBlockLanes];
      for (int lane = 0; lane < kBlockLanes; ++lane) {
        const int row = first + lane;
        const int64_t at = token + row / b_.group * b_.q_stride +
                           int64_t{(work.kv_head + head) * b_.group + row % b_.group} * b_.head_dim;
        const bool is_row = lane < lanes_.rows && row < tile_.rows;
        rows[lane] = is_row ? static_cast<const bf16*>(b_.q) + at : nullptr;
      }
      bf16* to = const_cast<bf16*>(queries(unit));
      for (int d = 0; d < b_.head_dim; d += kTileDims)
        turn_words([&](int i) { return rows[i] == nullptr ? zeros : rows[i] + d; },
                   to + d * lanes_.rows, lanes_.rows * 4, lanes);
    }
  }

  // Of the lanes without a row too, which see nothing.
  void find_limits() {
    const int states = lanes_.blocks() * kBlockLanes;
    std::fill(first_, first_ + states, 0);
    std::fill(last_, last_ + states, -1);
    for (int head = 0; head < lanes_.heads; ++head)
      for (int row = 0; row < tile_.rows; ++row) {
        const int state = lanes_.state(head, row);
        first_[state] = static_cast<int32_t>(tile_.low(row));
        last_[state] = static_cast<int32_t>(tile_.position(row));
      }
  }

  KeyTiles locate(const Keys<bf16>& keys, int64_t block, int64_t low, int64_t end) const {
    KeyTiles found;
    found.block = block;
    found.from = static_cast<int>(std::max(low, block) - block);
    found.to = static_cast<int>(std::min(end, block + kKeyBlock) - block);
    found.stride = keys.token_stride;
    if (b_.block_size % kTileTokens != 0) return found;  // gather() finds them
    for (int i = found.first_tile(); i < found.end_tile(); ++i) {
      const int64_t token = block + i * kTileTokens;
      const int64_t at = keys.table[token / keys.block_size] * keys.block_stride +
                         token % keys.block_size * keys.token_stride;
      found.k[i] = keys.k + at;
      found.v[i] = keys.v + at;
    }
    return found;
  }

  void gather(KeyTiles& tiles) {
    if (b_.block_size % kTileTokens == 0) return;
    const int64_t width = int64_t{tile_.kv_heads} * b_.head_dim;
    bf16* const k = gathered_;
    bf16* const v = gathered_ + kKeyBlock * width;
    for (int t = tiles.from; t < tiles.to; ++t) {
      const int64_t token = tiles.block + t;
      const int64_t at = keys_.table[token / keys_.block_size] * keys_.block_stride +
                         token % keys_.block_size * keys_.token_stride;
      std::memcpy(k + t * width, keys_.k + at, width * sizeof(bf16));
      std::memcpy(v + t * width, keys_.v + at, width * sizeof(bf16));
    }
    for (int i = 0; i < kKeyTiles; ++i) {
      tiles.k[i] = k + i * kTileTokens * width;
      tiles.v[i] = v + i * kTileTokens * width;
    }
    tiles.stride = width;
  }

  // Tokens of tile i of `tiles`, K or V, for all heads, will be needed.
  void expect(const KeyTiles& tiles, const bf16* const* side, int i, Lines& ahead) const {
    if (b_.block_size % kTileTokens != 0) return;
    const int first = std::max(tiles.from, i * kTileTokens);
    const int end = std::min(tiles.to, (i + 1) * kTileTokens);
    if (first >= end) return;
    ahead.add(side[i] + (first - i * kTileTokens) * tiles.stride, tiles.stride, end - first,
              int64_t{tile_.kv_heads} * b_.head_dim * int64_t{sizeof(bf16)});
  }

  // The tokens of a head whose V is not finite.
  uint64_t broken_tokens(const KeyTiles& tiles, int head) const {
    uint64_t found = 0;
    for (int t = tiles.from; t < tiles.to; ++t) {
      const bf16* v = tiles.v[t / kTileTokens] + t % kTileTokens * tiles.stride +
                      int64_t{head} * b_.head_dim;
      vf broken = zero();
      for (int d = 0; d < b_.head_dim; d += kLanes) broken = fma(load(v + d), zero(), broken);
      if (sum(broken) != 0.0f) found |= uint64_t{1} << t;
    }
    return found;
  }

  // Lanes of one unit that see one of the tokens get no number.
  void break_lanes(const KeyTiles& tiles, int unit, uint64_t tokens) {
    if (tokens == 0) return;
    for (int state = lanes_.lane(unit); state < lanes_.lane(unit) + lanes_.rows; ++state) {
      const int64_t first = std::max<int64_t>(first_[state] - tiles.block, 0);
      const int64_t end = std::min<int64_t>(last_[state] + 1 - tiles.block, kKeyBlock);
      if (first < end && (bits_between(first, end) & tokens) != 0)
        std::fill(acc(state), acc(state) + b_.head_dim, std::numeric_limits<float>::quiet_NaN());
    }
  }

  void pair_values(const KeyTiles& tiles, int pair, int head, uint64_t broken, bf16* out,
                   Lines* ahead, int lines) {
    const uint64_t usable = bits_between(tiles.from, tiles.to) & ~broken;
    const int64_t at = int64_t{head} * b_.head_dim;
    const int low = 2 * pair, high = low + 1;
    const bool any = high < tiles.end_tile(), some = low >= tiles.first_tile();
    pair_tokens(some ? tiles.v[low] + at : nullptr, any ? tiles.v[high] + at : nullptr,
                tiles.stride, static_cast<uint32_t>(usable >> (pair * kPairTokens)), b_.head_dim,
                out, ahead, lines);
  }

  // K of one head side by side: tokens some KiB apart share few sets of the first-level cache.
  void copy_keys(const KeyTiles& tiles) {
    for (int t = tiles.from; t < tiles.to; ++t) {
      const bf16* k = tiles.k[t / kTileTokens] + t % kTileTokens * tiles.stride;
      for (int d = 0; d < b_.head_dim; d += kTileDims)
        _mm512_store_si512(copy_ + t * b_.head_dim + d, _mm512_loadu_si512(k + d));
    }
  }

  // Softmax of one block of lanes, and what becomes of its acc.
  void soften(const KeyTiles& tiles, int block, Lines* ahead, int lines) {
    const int state = block * kBlockLanes;
    const __m512i first = _mm512_loadu_si512(first_ + state);
    const __m512i last = _mm512_loadu_si512(last_ + state);
    const __m512i start = _mm512_set1_epi32(static_cast<int32_t>(tiles.block));
    const __m512i from = _mm512_max_epi32(_mm512_sub_epi32(first, start),
                                          _mm512_set1_epi32(tiles.from));
    const __m512i end = _mm512_min_epi32(
        _mm512_add_epi32(_mm512_sub_epi32(last, start), _mm512_set1_epi32(1)),
        _mm512_set1_epi32(tiles.to));
    const LaneKeys keys{from, _mm512_max_epi32(_mm512_sub_epi32(end, from),
                                               _mm512_setzero_si512())};
    const bool all = _mm512_cmpeq_epi32_mask(keys.count, _mm512_set1_epi32(kKeyBlock)) == 0xffff;
    const vf scale = set1(b_.scale * kLog2E);
    float factors[kLanes];
    auto run = [&](auto masked) {
      return soften_lanes<masked>(scores_ + state * kKeyBlock, scale, keys, tiles.first_pair(),
                                  tiles.end_pair(), span_.max + state, span_.sum + state,
                                  weights_ + state * kKeyBlock, factors, ahead, lines);
    };
    vmask shrinks = all ? run(std::false_type()) : run(std::true_type());
    for (; shrinks != 0; shrinks = shrinks & (shrinks - 1)) {
      const int lane = __builtin_ctz(shrinks);
      float* row = acc(state + lane);
      const vf factor = set1(factors[lane]);
      for (int d = 0; d < b_.head_dim; d += kLanes)
        quire::store(row + d, mul(load(row + d), factor));
    }
  }

  // One key block of many rows of one head, which is bound by arithmetic.
  void attend_wide(const KeyTiles& tiles, const KeyTiles* next, bool careful) {
    Lines ahead;
    const uint64_t broken = careful ? broken_tokens(tiles, 0) : 0;
    const int64_t pair_elements = int64_t{kPairTokens} * b_.head_dim;
    for (int pair = tiles.first_pair(); pair < tiles.end_pair(); ++pair)
      pair_values(tiles, pair, 0, broken, values_ + pair * pair_elements, &ahead, 0);
    copy_keys(tiles);
    const int blocks = lanes_.blocks();
    for (int block = 0; block < blocks; ++block) {
      const int row = block * kBlockLanes, last = std::min(row + kBlockLanes, tile_.rows) - 1;
      KeyTiles own = tiles;
      own.from = static_cast<int>(std::max<int64_t>(tiles.from, tile_.low(row) - tiles.block));
      const int64_t end = tile_.position(last) + 1 - tiles.block;
      own.to = static_cast<int>(std::min<int64_t>(tiles.to, end));
      if (own.from >= own.to) continue;
      if (next != nullptr) fetch_part(*next, block, blocks);
      ScoreTile scored[kKeyTiles];
      int count = 0;
      for (int i = own.first_tile(); i < own.end_tile(); ++i)
        scored[count++] = {copy_ + i * kTileTokens * b_.head_dim, queries(block),
                           scores_ + row * kKeyBlock + i * kTileTokens * kLanes};
      score_some<true>(scored, count, b_.head_dim, kBlockLanes, b_.head_dim / kTileDims, &ahead,
                       0);
      soften(own, block, &ahead, 0);
      const int first = own.first_pair();
      const bf16* weights = weights_ + row * kKeyBlock + first * kTileElements;
      const bf16* values = values_ + first * pair_elements;
      if (own.end_pair() - first == 2) {
        weigh_tiles<2>(weights, values, b_.head_dim, acc(row), !seen_[block], &ahead, 0);
      } else {
        weigh_tiles<1>(weights, values, b_.head_dim, acc(row), !seen_[block], &ahead, 0);
      }
      seen_[block] = true;
      break_lanes(tiles, block, broken);
    }
  }

  // Asks for the share of the next key block that falls to one of `parts`.
  void fetch_part(const KeyTiles& next, int part, int parts) {
    Lines ahead;
    for (int i = next.first_tile() + part; i < next.end_tile(); i += parts) {
      expect(next, next.k, i, ahead);
      expect(next, next.v, i, ahead);
      ahead.fetch(1 << 20);
      ahead = Lines();
    }
  }

  // One key block of few rows of several heads, which is bound by memory: tokens in their order, and
  // the heads of each in turn. What is about two tiles of tokens ahead is fetched meanwhile, evenly
  // over time: a core has few requests to memory under way, and must not be without any. While V is
  // packed, which reads the second-level cache itself, it asks for less.
  void attend_heads(const KeyTiles& tiles, const KeyTiles* next, bool careful,
                    LaneTiles& registers) {
    constexpr int kDistance = 2, kScoreLines = 14;  // of the 16 that a product reads
    const int heads = lanes_.heads, steps = b_.head_dim / kTileDims;
    const int soft_lines = lanes_.units() * steps / lanes_.blocks();
    const int pack_lines = b_.head_dim / 64, weigh_lines = 12;
    Lines ahead;
    for (int i = kDistance; i < kKeyTiles; ++i) expect(tiles, tiles.k, i, ahead);
    for (int i = 0; i < kKeyTiles; ++i) expect(tiles, tiles.v, i, ahead);
    for (int i = 0; i < kDistance && next != nullptr; ++i) expect(*next, next->k, i, ahead);
    registers.for_scores();
    for (int i = tiles.first_tile(); i < tiles.end_tile(); ++i) {
      ScoreTile scored[4];
      int count = 0;
      for (int unit = 0; unit < lanes_.units(); ++unit) {
        const int head = unit / lanes_.parts;
        const int lane = lanes_.lane(unit), block = lane / kBlockLanes;
        scored[count++] = {tiles.k[i] + int64_t{head} * b_.head_dim, queries(unit),
                           scores_ + (block * kKeyBlock + i * kTileTokens) * kLanes +
                               lane % kBlockLanes};
        if (count < 4 && unit + 1 < lanes_.units()) continue;
        score_some<false>(scored, count, tiles.stride, lanes_.rows, steps, &ahead, kScoreLines);
        count = 0;
      }
    }
    for (int block = 0; block < lanes_.blocks(); ++block) soften(tiles, block, &ahead, soft_lines);
    registers.for_outputs();
    uint64_t broken = 0;
    for (int pair = tiles.first_pair(); pair < tiles.end_pair(); ++pair) {
      for (int head = 0; head < heads; ++head) {
        if (careful) broken = broken_tokens(tiles, head);
        pair_values(tiles, pair, head, broken, values_, &ahead, pack_lines);
        for (int part = 0; part < lanes_.parts; ++part) {
          const int unit = head * lanes_.parts + part, lane = lanes_.lane(unit);
          const bf16* weights = weights_ + lane / kBlockLanes * kBlockLanes * kKeyBlock +
                                pair * kTileElements + lane % kBlockLanes * kTileDims;
          weigh_tiles<1>(weights, values_, b_.head_dim, acc(lane), false, &ahead, weigh_lines);
          break_lanes(tiles, unit, broken);
        }
      }
    }
  }

  const Batch& b_;
  const Tile tile_;
  const Keys<bf16> keys_;
  const LaneLayout lanes_;
  const State span_;
  bf16* q_;        // [units, dims / 32, 16 pairs of dims, lanes of the unit, 2]
  float* scores_;  // [blocks, kKeyBlock, kBlockLanes]
  bf16* weights_;  // [blocks, kPairTiles, kBlockLanes, kPairTokens]
  bf16* values_;   // [kPairTiles, dims / 16, kTileTokens, kLanes, 2]; of few rows one at a time
  bf16* copy_;     // [kKeyBlock, head_dim]
  int32_t* first_;  // [states], keys that a lane sees
  int32_t* last_;
  bf16* gathered_;
  KeyTiles following_;
  bool follows_ = false;
  bool seen_[kMostBlocks];  // by block of lanes: acc holds something
};

}  // namespace quire::attention

#endif
