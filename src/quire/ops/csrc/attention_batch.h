// One call of attention: its arguments, a piece of its work, and where a piece's memory lies.
#pragma once

#include <algorithm>

#include "attention_int8.h"

namespace quire::attention {

struct Batch {
  const void* q;
  void* out;
  int64_t q_stride, out_stride;  // elements per token
  DType q_dtype;
  const void* k_cache;
  const void* v_cache;
  const float* k_scale;  // of an int8 cache, else null
  const float* v_scale;
  int64_t block_stride, token_stride;              // elements
  int64_t scale_block_stride, scale_token_stride;  // floats
  int64_t block_size;
  const int32_t* block_table;
  int64_t table_stride;
  const int32_t* query_start_loc;
  const int32_t* seq_lens;
  int num_rows, num_heads, num_kv_heads, head_dim, width, group;
  float scale;
  int64_t window;

  int tile_tokens() const { return std::max(1, kMaxTileRows / group); }
  int tile_rows() const { return tile_tokens() * group; }
  // 16 bits are enough for the queries.
  bool integers() const {
    return kIntegerProducts && k_scale != nullptr && q_dtype == DType::kBFloat16 &&
           head_dim <= kMaxIntegerDim;
  }
};

// Some queries of one row, for some adjacent kv heads.
struct Work {
  int row, token, num_tokens;  // token: of the row's queries, the first of this tile
  int kv_head, num_kv_heads;
};

inline int64_t state_size(const Batch& b) { return int64_t{b.tile_rows()} * (b.width + 2); }

inline State carve_state(const Batch& b, float*& at) {
  State state{at, at + int64_t{b.tile_rows()} * b.width, nullptr};
  state.sum = state.max + b.tile_rows();
  at += state_size(b);
  return state;
}

inline int64_t byte_depth(const Batch& b) { return (b.head_dim + kBytes - 1) / kBytes * kBytes; }

inline int64_t integer_size(const Batch& b) {
  if (!b.integers()) return 0;
  const int64_t row_bytes = 2 * byte_depth(b) + 2 * kKeyBlock;
  return int64_t{b.tile_rows()} * (row_bytes / 4 + byte_depth(b) + 3) +
         kKeyBlock / 4 * byte_depth(b);
}

inline IntegerScratch carve_integers(const Batch& b, float*& at) {
  const int64_t rows = b.tile_rows();
  IntegerScratch s;
  s.q = reinterpret_cast<int8_t*>(at);
  s.weights = reinterpret_cast<uint8_t*>(s.q + rows * 2 * byte_depth(b));
  s.values = reinterpret_cast<int8_t*>(s.weights + rows * 2 * kKeyBlock);
  s.sums = reinterpret_cast<int32_t*>(s.values + kKeyBlock * byte_depth(b));
  s.q_step = reinterpret_cast<float*>(s.sums + rows * byte_depth(b));
  s.weight_step = s.q_step + rows;
  s.q_offset = reinterpret_cast<int32_t*>(s.weight_step + rows);
  at += integer_size(b);
  return s;
}

inline int64_t scratch_size(const Batch& b) {
  return int64_t{b.tile_rows()} * (b.width + kKeyBlock) + int64_t{kKeyBlock} * b.width +
         2 * state_size(b) + integer_size(b);
}

inline Scratch carve(const Batch& b, float*& at) {
  Scratch s;
  s.q = at;
  s.scores = s.q + int64_t{b.tile_rows()} * b.width;
  s.wide = s.scores + int64_t{b.tile_rows()} * kKeyBlock;
  at = s.wide + int64_t{kKeyBlock} * b.width;
  s.span = carve_state(b, at);
  s.integers = carve_integers(b, at);
  return s;
}

inline Tile make_tile(const Batch& b, const Work& work) {
  const int queries = b.query_start_loc[work.row + 1] - b.query_start_loc[work.row];
  return Tile{b.seq_lens[work.row] - queries + work.token,
              work.num_kv_heads,
              work.num_tokens * b.group,
              b.group,
              b.head_dim,
              b.width,
              b.window,
              b.integers()};
}

template <class E>
Keys<E> make_keys(const Batch& b, const Work& work) {
  const int64_t at = int64_t{work.kv_head} * b.head_dim;
  return Keys<E>{static_cast<const E*>(b.k_cache) + at,
                 static_cast<const E*>(b.v_cache) + at,
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
