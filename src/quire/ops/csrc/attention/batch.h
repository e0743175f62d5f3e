// Arguments of one attention call, the pieces of its work, and the memory layout of a piece.
#pragma once

#include <algorithm>
#include <cmath>

#include "attention/int8.h"

namespace quire::attention {

struct Batch {
  const void* q;
  void* out;
  int64_t q_stride, out_stride;  // elements per token
  DType q_dtype;
  const void* k_cache;
  const void* v_cache;
  const float* k_scale;  // int8 cache only, else null
  const float* v_scale;
  int64_t block_stride, token_stride;              // elements
  int64_t scale_block_stride, scale_token_stride;  // floats
  int64_t block_size;
  const int32_t* block_table;
  int64_t table_stride;
  const int32_t* query_start_loc;
  const int32_t* seq_lens;
  const int32_t* last_key;  // last key that each query sees, or null
  int num_rows, num_heads, num_kv_heads;
  int head_dim, value_dim;  // widths of K and V
  int width, value_width;   // both rounded up to whole vectors
  int group;
  bool two_scales;  // int8, V is the first part of K: a scale for the dims of V, one for the others
  float scale;
  int64_t window;
  KeyBias key_bias;         // bias that an int8 cache lacks; a count of 0 if none
  const float* value_bias;  // [K, D], or null
  const float* sinks;       // [H], or null
  Bend bend;                // slopes: [H], or null
  int most_rows = kMaxTileRows;  // rows of a tile with more than one token
  int num_states = 0;            // states of the largest piece of work

  // Return the query and the output of a head of a token.
  template <class Q>
  const Q* query(int64_t token, int64_t head) const {
    return static_cast<const Q*>(q) + token * q_stride + head * head_dim;
  }
  template <class Q>
  Q* output(int64_t token, int64_t head) const {
    return static_cast<Q*>(out) + token * out_stride + head * value_dim;
  }
  const float* value_bias_of(int64_t kv_head) const {
    return value_bias == nullptr ? nullptr : value_bias + kv_head * value_dim;
  }
  // Returns the factor that turns acc into the output, for a row of a query head. A sink is one
  // more score of the softmax, of a key without a value: it adds to the sum alone, at the end, so
  // that nothing before depends on it. state: index of the row in `total`.
  float inverse_sum(int64_t head, const State& total, int64_t state) const {
    const float sum = total.sum[state];
    if (sinks == nullptr) return 1.0f / sum;
    return 1.0f / (sum + std::exp2(sinks[head] * kLog2E - total.max[state]));
  }
  int tile_tokens() const { return std::max(1, most_rows / group); }
  int tile_rows() const { return tile_tokens() * group; }
  // Returns whether V is the first part of K.
  bool one_plane() const { return two_scales || k_cache == v_cache; }
  // Returns whether 16-bit integers are precise enough for the queries.
  bool integers() const {
    return k_scale != nullptr && q_dtype == DType::kBFloat16 && head_dim == value_dim &&
           head_dim <= kMaxIntegerDim;
  }
};

// Tile of queries: some tokens of one row, for some adjacent kv heads.
struct Work {
  int row, token, num_tokens;  // token: first of this tile, among the row's queries
  int kv_head, num_kv_heads;
};

// Calls f(token, head, row) for every query row: `head` is its query head, and `row` its index in
// the state of the tile.
template <class F>
void each_query_row(const Batch& b, const Work& work, F&& f) {
  const int64_t first = b.query_start_loc[work.row] + work.token;
  int row = 0;
  for (int head = work.kv_head; head < work.kv_head + work.num_kv_heads; ++head)
    for (int t = 0; t < work.num_tokens; ++t)
      for (int g = 0; g < b.group; ++g)
        f(first + t, int64_t{head * b.group + g}, row++);
}

// Returns the bf16 query row of a head of a token and prefetches that of a later token: the
// hardware prefetcher starts anew in every row.
QUIRE_INLINE const bf16* fetch_query(const Batch& b, int64_t token, int64_t head) {
  constexpr int kLine = 64 / sizeof(bf16), kTokensAhead = 4;
  const bf16* row = b.query<bf16>(token, head);
  const auto later = reinterpret_cast<uintptr_t>(row) + kTokensAhead * b.q_stride * sizeof(bf16);
  for (int d = 0; d < b.head_dim; d += kLine)
    __builtin_prefetch(reinterpret_cast<const bf16*>(later) + d);
  return row;
}

inline int64_t state_size(int64_t num_states, int width) { return num_states * (width + 2); }

inline State carve_state(int64_t num_states, int width, float*& at) {
  State state{at, at + num_states * width, nullptr};
  state.sum = state.max + num_states;
  at += state_size(num_states, width);
  return state;
}

// Returns a size in floats, like all sizes here.
inline int64_t scales_size(const Batch& b) {
  return b.k_scale == nullptr ? 0 : b.num_kv_heads * int64_t{sizeof(HeadScales) / sizeof(float)};
}

inline int64_t integer_size(const Batch& b) {
  if (!b.integers()) return 0;
  const int64_t depth = integer_depth(b.head_dim);
  return b.tile_rows() * (depth / 2 + kKeyBlock / 2 + 2) +
         kKeyBlock / 2 * turned_depth(b.head_dim);
}

inline IntegerScratch carve_integers(const Batch& b, float*& at) {
  const int64_t rows = b.tile_rows(), depth = integer_depth(b.head_dim);
  IntegerScratch s;
  s.q = reinterpret_cast<int16_t*>(at);
  s.weights = s.q + rows * depth;
  s.keys = s.values = s.weights + rows * kKeyBlock;
  s.q_step = reinterpret_cast<float*>(s.keys + kKeyBlock * turned_depth(b.head_dim));
  s.weight_step = s.q_step + rows;
  at += integer_size(b);
  return s;
}

// Returns the size of one query row in float32, and of the factors and scores of all rows.
inline int64_t bias_size(const Batch& b) {
  return b.key_bias.count == 0 ? 0 : b.width + b.tile_rows() * (2 * b.key_bias.count + kKeyBlock);
}

// Returns the size of one row of float32 queries, K or V; integers need none.
inline int64_t wide_row_size(const Batch& b) {
  return b.integers() ? 0 : std::max(b.width, b.value_width);
}

inline int64_t scratch_size(const Batch& b) {
  return int64_t{b.tile_rows()} * (wide_row_size(b) + kKeyBlock) + kKeyBlock * wide_row_size(b) +
         scales_size(b) + integer_size(b) + bias_size(b);
}

inline Scratch carve(const Batch& b, float* at, const State& span) {
  Scratch s;
  s.q = at;
  s.scores = s.q + b.tile_rows() * wide_row_size(b);
  s.wide = s.scores + int64_t{b.tile_rows()} * kKeyBlock;
  at = s.wide + kKeyBlock * wide_row_size(b);
  s.span = span;
  s.scales = reinterpret_cast<HeadScales*>(at);
  at += scales_size(b);
  s.integers = carve_integers(b, at);
  s.key_bias = b.key_bias;
  s.query = at;
  s.bias_scores = s.query + b.width;
  s.bias_factors = s.bias_scores + b.tile_rows() * kKeyBlock;
  return s;
}

inline Tile make_tile(const Batch& b, const Work& work) {
  const int queries = b.query_start_loc[work.row + 1] - b.query_start_loc[work.row];
  const int64_t first = b.query_start_loc[work.row] + work.token;
  return Tile{b.seq_lens[work.row] - queries + work.token,
              b.last_key == nullptr ? nullptr : b.last_key + first,
              work.num_kv_heads,
              work.num_tokens * b.group,
              b.group,
              b.head_dim,
              b.value_dim,
              b.width,
              b.value_width,
              b.window,
              b.integers(),
              b.one_plane(),
              b.two_scales,
              b.bend.from_head(int64_t{work.kv_head} * b.group)};
}

template <class E>
Keys<E> make_keys(const Batch& b, const Work& work) {
  return Keys<E>{static_cast<const E*>(b.k_cache) + int64_t{work.kv_head} * b.head_dim,
                 static_cast<const E*>(b.v_cache) + int64_t{work.kv_head} * b.value_dim,
                 b.k_scale == nullptr ? nullptr : b.k_scale + work.kv_head,
                 b.v_scale == nullptr ? nullptr : b.v_scale + work.kv_head,
                 b.block_table + work.row * b.table_stride,
                 b.block_stride,
                 b.token_stride,
                 b.scale_block_stride,
                 b.scale_token_stride,
                 b.block_size};
}

}  // namespace quire::attention
