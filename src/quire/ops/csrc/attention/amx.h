// Attention with tile registers (AMX): bf16 queries over a bf16 cache, or over an int8 plane with two
// scales (multi-head latent attention), which is widened to bf16 block by block.
//
// Query rows are lanes, 16 to a block. Scores are the product keys · queries, [tokens, lanes], and
// the softmax runs down each lane. Weights are rounded to bf16 and transposed to [lanes, tokens]
// for the product with V, whose tokens are interleaved in pairs. As in attention/tile.h, the result
// of a query depends on its own keys alone: an element of a product is one chain of sums over dims
// or tokens at fixed places, whichever rows share the registers, and weights of keys that a query
// does not see add zeros. The divisor is the sum of the rounded weights: a rounding error common to
// all weights cancels.
#pragma once

#if defined(__AMX_BF16__)

#include <limits>

#include "attention/amx_softmax.h"

namespace quire::attention {

// Addresses of the tokens of a key block in tiles of kTileTokens; tokens are `stride` elements
// apart. Where K and V are one plane, their addresses are equal.
template <class E>
struct KeyTiles {
  int64_t block;  // position of the first key
  int from, to;   // the tile sees keys from <= key < to
  const E* k[kKeyTiles];
  const E* v[kKeyTiles];
  int64_t stride;

  int first_tile() const { return from / kTileTokens; }
  int end_tile() const { return (to + kTileTokens - 1) / kTileTokens; }
  int first_pair() const { return from / kPairTokens; }
  int end_pair() const { return (to + kPairTokens - 1) / kPairTokens; }
};

// Returns a mask of 64 bits with those at first <= bit < end set.
inline uint64_t bits_between(int first, int end) {
  if (first >= end) return 0;
  const uint64_t below = end >= 64 ? ~uint64_t{0} : (uint64_t{1} << end) - 1;
  return below & ~((uint64_t{1} << first) - 1);
}

// Attention of one tile of queries, a span of keys at a time.
template <class E>
class LanePiece {
 public:
  // Returns whether tile registers can compute the batch. Depends on dtype, widths, group and the
  // scales of an int8 cache alone.
  static bool takes(const Batch& b) {
    const bool widens = b.two_scales && b.key_bias.count == 0 && b.value_bias == nullptr;
    return (kIsBf16 || widens) && b.q_dtype == DType::kBFloat16 && b.head_dim % kTileDims == 0 &&
           b.value_dim % kTileDims == 0 && b.group <= kMostBlocks * kBlockLanes;
  }
  // Returns the most query rows that share one packed K and V; acc and the queries fit the
  // second-level cache.
  static int most_rows(const Batch& b) { return b.head_dim > 256 ? 256 : 512; }
  static int64_t scratch_size(const Batch& b) {
    const int64_t states = b.num_states;
    return states * (b.head_dim / 2 + kKeyBlock + kKeyBlock / 2 + 4) +
           kKeyBlock / 2 * (b.head_dim + b.value_dim) + gathered_size(b);
  }

  // Loads the queries.
  LanePiece(const Batch& b, const Work& work, float* memory, const State& span)
      : b_(b),
        tile_(make_tile(b, work)),
        keys_(make_keys<E>(b, work)),
        lanes_(lane_layout(tile_.rows, tile_.kv_heads)),
        span_(span) {
    const int64_t states = b.num_states;
    q_ = reinterpret_cast<bf16*>(memory);
    scores_ = memory + states * b.head_dim / 2;
    weights_ = reinterpret_cast<bf16*>(scores_ + states * kKeyBlock);
    values_ = weights_ + states * kKeyBlock;
    copy_ = values_ + kKeyBlock * b.value_dim;
    first_ = reinterpret_cast<int32_t*>(copy_ + kKeyBlock * b.head_dim);
    last_ = first_ + states;
    position_ = last_ + states;
    slope_ = reinterpret_cast<float*>(position_ + states);
    gathered_ = reinterpret_cast<bf16*>(slope_ + states);
    load_queries(work);
    find_limits();
  }

  static int states(const Batch& b, const Work& work) {
    return lane_layout(work.num_tokens * b.group, work.num_kv_heads).blocks() * kBlockLanes;
  }

  // Names the work that this thread will probably do next. Its first keys are prefetched at the end
  // of this piece.
  void follow(const Work& work) {
    if (lanes_.wide() && !streams()) return;  // bound by arithmetic
    const Tile tile = make_tile(b_, work);
    const int64_t low = tile.low(0), end = tile.end();
    following_ = locate(make_keys<E>(b_, work), low / kKeyBlock * kKeyBlock, low, end);
    follows_ = true;
  }

  // store() always writes the outputs.
  bool finishes() const { return false; }
  // careful: V that is not finite reaches only the queries that see its token.
  void attend(int64_t span, bool continues, bool careful) {
    const int states = lanes_.blocks() * kBlockLanes;
    std::memset(span_.sum, 0, sizeof(float) * states);
    for (int i = 0; i < states; ++i) span_.max[i] = kNegativeInfinity;
    if (!lanes_.wide()) {
      std::memset(span_.acc, 0, sizeof(float) * states * b_.value_dim);
      std::memset(scores_, 0, sizeof(float) * states * kKeyBlock);
    }
    std::fill(seen_, seen_ + lanes_.blocks(), false);
    const int64_t low = std::max(tile_.low(0), span * kSpan);
    const int64_t end = tile_.end();
    const int64_t high = std::min(end, (span + 1) * kSpan);
    LaneTiles registers(lanes_.rows);
    if (lanes_.wide()) registers.for_scores();
    KeyTiles<E> tiles[2];
    int at = 0;
    if (low < high) tiles[at] = locate(keys_, low / kKeyBlock * kKeyBlock, low, end);
    for (int64_t block = low / kKeyBlock * kKeyBlock; block < high; block += kKeyBlock, at ^= 1) {
      const int64_t following = block + kKeyBlock;
      const KeyTiles<E>* next = nullptr;
      if (following < (continues ? end : high)) {
        tiles[at ^ 1] = locate(keys_, following, low, end);
        next = &tiles[at ^ 1];
      } else if (follows_ && !continues) {
        next = &following_;
      }
      const KeyTiles<bf16> ready = prepare(tiles[at]);
      if (lanes_.wide()) {
        attend_wide(ready, next, careful);
      } else {
        attend_heads(ready, tiles[at], next, careful, registers);
      }
    }
    for (int block = 0; block < lanes_.blocks(); ++block)
      if (lanes_.wide() && !seen_[block])
        std::memset(acc(block * kBlockLanes), 0, sizeof(float) * kBlockLanes * b_.value_dim);
  }

  // Writes acc / sum, rounded to bf16. Returns whether every output is finite.
  static bool store(const Batch& b, const Work& work, const State& total) {
    const Tile tile = make_tile(b, work);
    const LaneLayout lanes = lane_layout(tile.rows, tile.kv_heads);
    const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
    vf broken = zero();
    each_query_row(b, work, [&](int64_t token, int64_t head, int row) {
      const int state = lanes.state(row / tile.rows, row % tile.rows);
      const float* acc = total.acc + int64_t{state} * b.value_dim;
      bf16* to = b.output<bf16>(token, head);
      const vf inverse = set1(b.inverse_sum(head, total, state));
      for (int d = 0; d < b.value_dim; d += kTileDims) {
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
  static constexpr int kStreamedBlocks = 4;
  static constexpr int kMostPackedDims = 256, kPackedDims = 64;
  static constexpr bool kIsBf16 = std::is_same_v<E, bf16>;

  // Returns whether tiles can be loaded from the pages.
  static bool reads_pages(const Batch& b) { return kIsBf16 && b.block_size % kTileTokens == 0; }
  // Returns the floats that copies of K and V of a key block take, which are needed where tiles
  // cannot be loaded from the pages.
  static int64_t gathered_size(const Batch& b) {
    const int64_t width = std::max(b.head_dim, b.value_dim);
    return reads_pages(b) ? 0 : kKeyBlock * b.num_kv_heads * width;
  }

  // Returns the dims of V that are packed at a time.
  int packed_dims() const { return b_.value_dim > kMostPackedDims ? kPackedDims : b_.value_dim; }

  // Returns whether the few rows that share a wide plane wait for memory rather than arithmetic.
  bool streams() const { return b_.head_dim != b_.value_dim && lanes_.blocks() <= kStreamedBlocks; }

  float* acc(int state) const { return span_.acc + int64_t{state} * b_.value_dim; }
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

  // Sets the first and last key, the position and the slope of every lane. Lanes without a row see
  // no key.
  void find_limits() {
    const int states = lanes_.blocks() * kBlockLanes;
    std::fill(first_, first_ + states, 0);
    std::fill(last_, last_ + states, -1);
    std::fill(position_, position_ + states, 0);
    std::fill(slope_, slope_ + states, 0.0f);
    for (int head = 0; head < lanes_.heads; ++head)
      for (int row = 0; row < tile_.rows; ++row) {
        const int state = lanes_.state(head, row);
        first_[state] = static_cast<int32_t>(tile_.low(row));
        last_[state] = static_cast<int32_t>(tile_.last_key(row));
        position_[state] = static_cast<int32_t>(tile_.position(row));
        slope_[state] = tile_.bend.slope(int64_t{head} * b_.group + row % b_.group);
      }
  }

  KeyTiles<E> locate(const Keys<E>& keys, int64_t block, int64_t low, int64_t end) const {
    KeyTiles<E> found;
    found.block = block;
    found.from = static_cast<int>(std::max(low, block) - block);
    found.to = static_cast<int>(std::min(end, block + kKeyBlock) - block);
    found.stride = keys.token_stride;
    if (b_.block_size % kTileTokens != 0) return found;  // prepare() copies token by token
    for (int i = found.first_tile(); i < found.end_tile(); ++i) {
      const int64_t token = block + i * kTileTokens;
      const int64_t at = keys.table[token / keys.block_size] * keys.block_stride +
                         token % keys.block_size * keys.token_stride;
      found.k[i] = keys.k + at;
      found.v[i] = keys.v + at;
    }
    return found;
  }

  // Returns tiles that products can load: the pages' own, or copies in bf16.
  KeyTiles<bf16> prepare(const KeyTiles<E>& tiles) {
    KeyTiles<bf16> ready;
    if constexpr (kIsBf16) {
      if (reads_pages(b_)) return tiles;
    }
    ready.block = tiles.block, ready.from = tiles.from, ready.to = tiles.to;
    const int64_t width = int64_t{tile_.kv_heads} * std::max(b_.head_dim, b_.value_dim);
    bf16* const k = gathered_;
    bf16* const v = b_.one_plane() ? k : gathered_ + kKeyBlock * width;
    for (int t = tiles.from; t < tiles.to; ++t)
      copy_token(tiles.block + t, k + t * width, v + t * width);
    for (int i = 0; i < kKeyTiles; ++i) {
      ready.k[i] = k + i * kTileTokens * width;
      ready.v[i] = v + i * kTileTokens * width;
    }
    ready.stride = width;
    return ready;
  }

  // Copies all heads of K and V of the token at a position.
  void copy_token(int64_t token, bf16* k, bf16* v) const {
    const int64_t block = keys_.table[token / keys_.block_size];
    const int64_t offset = token % keys_.block_size;
    const int64_t at = block * keys_.block_stride + offset * keys_.token_stride;
    if constexpr (kIsBf16) {
      std::memcpy(k, keys_.k + at, sizeof(bf16) * tile_.kv_heads * b_.head_dim);
      if (v != k) std::memcpy(v, keys_.v + at, sizeof(bf16) * tile_.kv_heads * b_.value_dim);
    } else {
      const int64_t scale = block * keys_.scale_block_stride + offset * keys_.scale_token_stride;
      widen_plane(keys_.k + at, keys_.k_scale + scale, b_.value_dim, b_.head_dim, k);
    }
  }

  // Queue tile i of K or V of `tiles` for prefetching, with all heads.
  void expect_keys(const KeyTiles<E>& tiles, int i, Lines& ahead) const {
    expect(tiles, tiles.k, i, b_.head_dim, ahead);
  }
  void expect_values(const KeyTiles<E>& tiles, int i, Lines& ahead) const {
    if (!b_.one_plane()) expect(tiles, tiles.v, i, b_.value_dim, ahead);
  }
  void expect(const KeyTiles<E>& tiles, const E* const* side, int i, int dims,
              Lines& ahead) const {
    if (b_.block_size % kTileTokens != 0) return;
    const int first = std::max(tiles.from, i * kTileTokens);
    const int end = std::min(tiles.to, (i + 1) * kTileTokens);
    if (first >= end) return;
    ahead.add(side[i] + (first - i * kTileTokens) * tiles.stride, tiles.stride, end - first,
              int64_t{tile_.kv_heads} * dims * int64_t{sizeof(E)});
  }

  // Returns one bit for each token whose V is not finite in this head.
  uint64_t broken_tokens(const KeyTiles<bf16>& tiles, int head) const {
    uint64_t found = 0;
    for (int t = tiles.from; t < tiles.to; ++t) {
      const bf16* v = tiles.v[t / kTileTokens] + t % kTileTokens * tiles.stride +
                      int64_t{head} * b_.value_dim;
      vf broken = zero();
      for (int d = 0; d < b_.value_dim; d += kLanes) broken = fma(load(v + d), zero(), broken);
      if (sum(broken) != 0.0f) found |= uint64_t{1} << t;
    }
    return found;
  }

  // Sets acc to NaN in the lanes of one unit that see one of `tokens`.
  void break_lanes(const KeyTiles<bf16>& tiles, int unit, uint64_t tokens) {
    if (tokens == 0) return;
    for (int state = lanes_.lane(unit); state < lanes_.lane(unit) + lanes_.rows; ++state) {
      const int64_t first = std::max<int64_t>(first_[state] - tiles.block, 0);
      const int64_t end = std::min<int64_t>(last_[state] + 1 - tiles.block, kKeyBlock);
      if (first < end && (bits_between(first, end) & tokens) != 0)
        std::fill(acc(state), acc(state) + b_.value_dim, std::numeric_limits<float>::quiet_NaN());
    }
  }

  // Packs `dims` of V of a pair of tiles, from element `at` of each token on.
  void pair_values(const KeyTiles<bf16>& tiles, int pair, int64_t at, int dims, uint64_t broken,
                   bf16* out, Lines* ahead, int lines) {
    const uint64_t usable = bits_between(tiles.from, tiles.to) & ~broken;
    const int low = 2 * pair, high = low + 1;
    const bool any = high < tiles.end_tile(), some = low >= tiles.first_tile();
    pair_tokens(some ? tiles.v[low] + at : nullptr, any ? tiles.v[high] + at : nullptr,
                tiles.stride, static_cast<uint32_t>(usable >> (pair * kPairTokens)), dims, out,
                ahead, lines);
  }

  // Copies K of one head to adjacent rows: tokens some KiB apart map to few sets of the first-level
  // cache.
  void copy_keys(const KeyTiles<bf16>& tiles) {
    for (int t = tiles.from; t < tiles.to; ++t) {
      const bf16* k = tiles.k[t / kTileTokens] + t % kTileTokens * tiles.stride;
      for (int d = 0; d < b_.head_dim; d += kTileDims)
        _mm512_store_si512(copy_ + t * b_.head_dim + d, _mm512_loadu_si512(k + d));
    }
  }

  // Scales the scores of one block of lanes, then applies cap and slope, for the tokens that
  // soften() reads.
  void bend(const KeyTiles<bf16>& tiles, int state) {
    float* s = scores_ + state * kKeyBlock;
    const vf scale = set1(b_.scale * kLog2E), slope = load(slope_ + state);
    const float cap = tile_.bend.cap * kLog2E;
    const __m512i block = _mm512_set1_epi32(static_cast<int32_t>(tiles.block));
    const vf behind =
        _mm512_cvtepi32_ps(_mm512_sub_epi32(block, _mm512_loadu_si512(position_ + state)));
    for (int t = tiles.first_pair() * kPairTokens; t < tiles.end_pair() * kPairTokens; ++t) {
      const vf x = mul(load(s + t * kLanes), scale);
      const vf distance = add(set1(static_cast<float>(t)), behind);
      quire::store(s + t * kLanes, RowBend::bent(x, cap, slope, distance));
    }
  }

  // Applies the softmax to one block of lanes and rescales its acc.
  void soften(const KeyTiles<bf16>& tiles, int block, Lines* ahead, int lines) {
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
    const bool bends = tile_.bend.any();
    if (bends) bend(tiles, state);
    const vf scale = set1(bends ? 1.0f : b_.scale * kLog2E);
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
      for (int d = 0; d < b_.value_dim; d += kLanes)
        quire::store(row + d, mul(load(row + d), factor));
    }
  }

  // Lines to prefetch at a time while a key block is packed, scored, softened and weighed, so that
  // the next one arrives evenly.
  struct Pace {
    int pack, score, soften, weigh;
  };
  Pace pace() const {
    if (!streams()) return {0, 0, 0, 0};
    const int64_t bytes = int64_t{kKeyBlock} * b_.head_dim * int64_t{sizeof(E)};
    const auto share = [&](int64_t part, int64_t turns) {
      return static_cast<int>(bytes / 64 * part / 16 / turns + 1);
    };
    const int64_t blocks = lanes_.blocks();
    const int64_t packs = kKeyBlock / 2 * ((b_.value_dim + packed_dims() - 1) / packed_dims());
    return {share(4, packs), share(4, b_.head_dim / kTileDims * kKeyTiles * blocks),
            share(2, 8 * blocks), share(6, b_.value_dim / kLanes * blocks)};
  }

  // Returns the part of a key block that a block of lanes sees.
  KeyTiles<bf16> own_tiles(const KeyTiles<bf16>& tiles, int block) const {
    const int row = block * kBlockLanes, last = std::min(row + kBlockLanes, tile_.rows) - 1;
    KeyTiles<bf16> own = tiles;
    own.from = static_cast<int>(std::max<int64_t>(tiles.from, tile_.low(row) - tiles.block));
    const int64_t end = tile_.last_key(last) + 1 - tiles.block;
    own.to = static_cast<int>(std::min<int64_t>(tiles.to, end));
    return own;
  }

  // Attends one key block for many rows of one head, which is bound by arithmetic, or for the rows
  // of few tokens that share a wide plane. V is packed kPackedDims at a time, which the first-level
  // cache keeps until all rows have used them.
  void attend_wide(const KeyTiles<bf16>& tiles, const KeyTiles<E>* next, bool careful) {
    Lines ahead;
    const Pace lines = pace();
    for (int i = 0; next != nullptr && streams() && i < kKeyTiles; ++i) {
      expect_keys(*next, i, ahead);
      expect_values(*next, i, ahead);
    }
    const uint64_t broken = careful ? broken_tokens(tiles, 0) : 0;
    const int dims = packed_dims();
    const bool adjacent = tiles.stride == b_.head_dim, whole = dims == b_.value_dim;
    if (whole) pack(tiles, broken, 0, dims, &ahead, lines.pack);
    if (!adjacent) copy_keys(tiles);
    const int blocks = lanes_.blocks();
    for (int block = 0; block < blocks; ++block) {
      const KeyTiles<bf16> own = own_tiles(tiles, block);
      if (own.from >= own.to) continue;
      if (next != nullptr && !streams()) fetch_part(*next, block, blocks);
      score_block(own, block, adjacent, &ahead, lines.score);
      soften(own, block, &ahead, lines.soften);
      if (whole) weigh_block(own, block, 0, dims, &ahead, lines.weigh);
    }
    for (int d = 0; !whole && d < b_.value_dim; d += dims) {
      const int left = std::min(dims, b_.value_dim - d);
      if (streams()) fetch_outputs(d, left);
      pack(tiles, broken, d, left, &ahead, lines.pack);
      for (int block = 0; block < blocks; ++block) {
        const KeyTiles<bf16> own = own_tiles(tiles, block);
        if (own.from < own.to) weigh_block(own, block, d, left, &ahead, lines.weigh);
      }
    }
    for (int block = 0; block < blocks; ++block) {
      const KeyTiles<bf16> own = own_tiles(tiles, block);
      if (own.from < own.to) seen_[block] = true;
      break_lanes(tiles, block, broken);
    }
    ahead.fetch(1 << 20);
  }

  // Prefetches dims of all outputs into the first-level cache, which K has filled.
  void fetch_outputs(int d, int dims) const {
    for (int state = 0; state < lanes_.blocks() * kBlockLanes; ++state)
      for (int i = 0; i < dims; i += kLanes)
        _mm_prefetch(reinterpret_cast<const char*>(acc(state) + d + i), _MM_HINT_T0);
  }

  // Packs dims of V for all pairs of tokens.
  void pack(const KeyTiles<bf16>& tiles, uint64_t broken, int d, int dims, Lines* ahead,
            int lines) {
    for (int pair = tiles.first_pair(); pair < tiles.end_pair(); ++pair)
      pair_values(tiles, pair, d, dims, broken, values_ + pair * int64_t{kPairTokens} * dims,
                  ahead, lines);
  }

  // Scores the keys of one block of lanes.
  void score_block(const KeyTiles<bf16>& own, int block, bool adjacent, Lines* ahead, int lines) {
    ScoreTile scored[kKeyTiles];
    int count = 0;
    for (int i = own.first_tile(); i < own.end_tile(); ++i)
      scored[count++] = {adjacent ? own.k[i] : copy_ + i * kTileTokens * b_.head_dim,
                         queries(block),
                         scores_ + block * kBlockLanes * kKeyBlock + i * kTileTokens * kLanes};
    score_some<true>(scored, count, b_.head_dim, kBlockLanes, b_.head_dim / kTileDims, ahead,
                     lines);
  }

  // Adds packed dims of V to the outputs of one block of lanes.
  void weigh_block(const KeyTiles<bf16>& own, int block, int d, int dims, Lines* ahead,
                   int lines) {
    const int row = block * kBlockLanes, first = own.first_pair();
    const bf16* weights = weights_ + row * kKeyBlock + first * kTileElements;
    const bf16* values = values_ + first * int64_t{kPairTokens} * dims;
    const bool fresh = !seen_[block];
    float* const to = acc(row) + d;
    if (own.end_pair() - first == 2) {
      weigh_tiles<2>(weights, values, dims, to, b_.value_dim, fresh, ahead, lines);
    } else {
      weigh_tiles<1>(weights, values, dims, to, b_.value_dim, fresh, ahead, lines);
    }
  }

  // Prefetches one of `parts` shares of the next key block.
  void fetch_part(const KeyTiles<E>& next, int part, int parts) {
    Lines ahead;
    for (int i = next.first_tile() + part; i < next.end_tile(); i += parts) {
      expect_keys(next, i, ahead);
      expect_values(next, i, ahead);
      ahead.fetch(1 << 20);
      ahead = Lines();
    }
  }

  // Attends one key block for few rows of several heads, which is bound by memory. Takes the tiles
  // of tokens in order, and the heads of each in turn. Tokens about two tiles ahead are prefetched
  // evenly over time: a core sustains few requests to memory and should never have none
  // outstanding. Packing V reads the second-level cache itself, so fewer lines are requested
  // meanwhile.
  void attend_heads(const KeyTiles<bf16>& tiles, const KeyTiles<E>& pages,
                    const KeyTiles<E>* next, bool careful, LaneTiles& registers) {
    constexpr int kDistance = 2, kScoreLines = 14;  // kScoreLines: a product reads 16 lines
    const int heads = lanes_.heads, steps = b_.head_dim / kTileDims;
    const int soft_lines = lanes_.units() * steps / lanes_.blocks();
    const int pack_lines = b_.value_dim / 64, weigh_lines = 12;
    Lines ahead;
    const int distance = kIsBf16 ? kDistance : kKeyTiles;  // widened tiles have been read
    for (int i = distance; i < kKeyTiles; ++i) expect_keys(pages, i, ahead);
    for (int i = 0; i < kKeyTiles; ++i) expect_values(pages, i, ahead);
    for (int i = 0; i < distance && next != nullptr; ++i) expect_keys(*next, i, ahead);
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
        pair_values(tiles, pair, int64_t{head} * b_.value_dim, b_.value_dim, broken, values_,
                    &ahead, pack_lines);
        for (int part = 0; part < lanes_.parts; ++part) {
          const int unit = head * lanes_.parts + part, lane = lanes_.lane(unit);
          const bf16* weights = weights_ + lane / kBlockLanes * kBlockLanes * kKeyBlock +
                                pair * kTileElements + lane % kBlockLanes * kTileDims;
          weigh_tiles<1>(weights, values_, b_.value_dim, acc(lane), b_.value_dim, false, &ahead,
                         weigh_lines);
          break_lanes(tiles, unit, broken);
        }
      }
    }
  }

  const Batch& b_;
  const Tile tile_;
  const Keys<E> keys_;
  const LaneLayout lanes_;
  const State span_;
  bf16* q_;        // [units, dims / 32, 16 pairs of dims, lanes of the unit, 2]
  float* scores_;  // [blocks, kKeyBlock, kBlockLanes]
  bf16* weights_;  // [blocks, kPairTiles, kBlockLanes, kPairTokens]
  bf16* values_;   // [kPairTiles, dims / 16, kTileTokens, kLanes, 2]; few rows: one at a time
  bf16* copy_;     // [kKeyBlock, head_dim]
  int32_t* first_;  // [states]: first and last key that a lane sees
  int32_t* last_;
  int32_t* position_;
  float* slope_;
  bf16* gathered_;
  KeyTiles<E> following_;
  bool follows_ = false;
  bool seen_[kMostBlocks];  // per block of lanes: acc has been written
};

}  // namespace quire::attention

#endif
