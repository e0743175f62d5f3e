// Attention of a flat batch over the paged cache. Cuts the work into tiles and spans for the team.
#include <algorithm>
#include <type_traits>

#include "attention/amx.h"
#include "attention/batch.h"
#include "attention/bf16.h"
#include "attention/tile.h"
#include "native/parallel.h"
#include "native/replay.h"
#include "native/scratch.h"

namespace quire::attention {
namespace {

// Owners of a thread's scratch memory, one for each use.
struct TileScratch;
struct PartStates;
struct WorkList;

// Returns `count` floats, or null when memory is exhausted.
template <class Owner>
float* floats(int64_t count) {
  return static_cast<float*>(thread_scratch<Owner>(count * int64_t{sizeof(float)}));
}

// Computes the factors of the bias that K lacks, for every query row.
void weigh_key_bias(const Batch& b, const Work& work, const Scratch& scratch) {
  if (b.key_bias.count == 0) return;
  dispatch(b.q_dtype, [&](auto* tag) {
    using Q = std::remove_pointer_t<decltype(tag)>;
    each_query_row(b, work, [&](int64_t token, int64_t head, int row) {
      const Q* from = b.query<Q>(token, head);
      for (int d = 0; d < b.head_dim; d += kLanes) {
        const int dims = b.head_dim - d;
        store(scratch.query + d, dims >= kLanes ? load(from + d) : load_part(from + d, dims));
      }
      b.key_bias.weigh(scratch.query, head / b.group, b.scale * kLog2E,
                       scratch.bias_factors + 2 * row * b.key_bias.count);
    });
  });
}

// Loads the queries, scaled, as floats or as integers.
void load_queries(const Batch& b, const Work& work, const Tile& tile, const Scratch& scratch) {
  if (tile.integers) {
    each_query_row(b, work, [&](int64_t token, int64_t head, int row) {
      round_query(fetch_query(b, token, head), b.head_dim, b.scale * kLog2E, row,
                  scratch.integers);
    });
    return;
  }
  const vf scale = set1(b.scale * kLog2E);
  dispatch(b.q_dtype, [&](auto* tag) {
    using Q = std::remove_pointer_t<decltype(tag)>;
    each_query_row(b, work, [&](int64_t token, int64_t head, int row) {
      const Q* from = b.query<Q>(token, head);
      float* to = scratch.q + row * b.width;
      int d = 0;
      for (; d + kLanes <= b.head_dim; d += kLanes) store(to + d, mul(load(from + d), scale));
      if (d < b.head_dim) store(to + d, mul(load_part(from + d, b.head_dim - d), scale));
    });
  });
}

void store_output(const Batch& b, const Work& work, const State& total) {
  dispatch(b.q_dtype, [&](auto* tag) {
    using Q = std::remove_pointer_t<decltype(tag)>;
    each_query_row(b, work, [&](int64_t token, int64_t head, int row) {
      Q* to = b.output<Q>(token, head);
      const float* acc = total.acc + row * b.value_width;
      const vf inverse = set1(b.inverse_sum(head, total, row));
      const float* bias = b.value_bias_of(head / b.group);
      for (int d = 0; d < b.value_dim; d += kLanes)
        store_result(load(acc + d), inverse, bias, d, b.value_dim - d, to);
    });
  });
}

int64_t first_span(const Tile& tile) { return tile.low(0) / kSpan; }
int64_t last_span(const Tile& tile) { return (tile.end() - 1) / kSpan; }

// Piece of the work as attend_tile and run_span use it, on vectors. attention/amx.h and
// attention/bf16.h define others.
template <class E>
class VectorPiece {
 public:
  static int most_rows(const Batch&) { return kLargeTileRows; }
  static int64_t scratch_size(const Batch& b) { return attention::scratch_size(b); }

  // Loads the queries. span: the state that attend() fills.
  VectorPiece(const Batch& b, const Work& work, float* memory, const State& span)
      : b_(b),
        work_(work),
        tile_(make_tile(b, work)),
        keys_(make_keys<E>(b, work)),
        scratch_(carve(b, memory, span)) {
    load_queries(b, work, tile_, scratch_);
    weigh_key_bias(b, work, scratch_);
  }

  static int states(const Batch& b, const Work& work) { return make_tile(b, work).num_states(); }
  // Prefetches the first keys of `work` while this piece uses its last ones, unless the piece is
  // bound by arithmetic.
  void follow(const Work& work) {
    if (!tile_.integers && tile_.copies()) return;
    const Tile tile = make_tile(b_, work);
    const int64_t low = tile.low(0), end = tile.end();
    following_.locate(make_keys<E>(b_, work), low / kKeyBlock * kKeyBlock, low, end);
    follows_ = true;
  }
  // Returns whether attend() writes the outputs itself, given a single span, so that store() is not
  // needed.
  bool finishes() {
    if (!takes_wide_integers(tile_) || b_.sinks != nullptr) return false;
    const int64_t token = b_.query_start_loc[work_.row] + work_.token;
    scratch_.out = {b_.output<bf16>(token, int64_t{work_.kv_head} * b_.group), b_.out_stride,
                    b_.value_bias_of(work_.kv_head)};
    return true;
  }
  void attend(int64_t span, bool continues, bool) {
    attend_span(tile_, keys_, span, fetched_, continues, follows_ ? &following_ : nullptr,
                scratch_.span,
                [&](const Range& range, const KeyBlock<E>& keys, const E* const* after,
                    int keys_after) {
                  attend_keys(tile_, range, keys, after, keys_after, scratch_);
                });
    fetched_ = true;
  }
  // Returns whether the outputs are final; false asks for careful spans.
  static bool store(const Batch& b, const Work& work, const State& total) {
    store_output(b, work, total);
    return true;
  }

 private:
  const Batch& b_;
  const Work& work_;
  const Tile tile_;
  const Keys<E> keys_;
  Scratch scratch_;
  LocatedBlock<E> following_;
  bool follows_ = false, fetched_ = false;
};

// Computes all spans of a tile in order. next: work that the thread will probably do afterwards, or
// null.
template <class Piece>
bool attend_tile(const Batch& b, const Work& work, const Work* next, bool careful) {
  float* at = floats<TileScratch>(Piece::scratch_size(b) + 2 * state_size(b.num_states, b.value_width));
  if (at == nullptr) return false;
  const State span = carve_state(b.num_states, b.value_width, at);
  State total = carve_state(b.num_states, b.value_width, at);
  Piece piece(b, work, at, span);
  if (next != nullptr) piece.follow(*next);
  const Tile tile = make_tile(b, work);
  const int states = Piece::states(b, work);
  const bool one = first_span(tile) == last_span(tile), finishes = one && piece.finishes();
  if (!one) {
    std::memset(total.sum, 0, sizeof(float) * states);
    std::memset(total.acc, 0, sizeof(float) * states * b.value_width);
  }
  for (int64_t i = first_span(tile); i <= last_span(tile); ++i) {
    piece.attend(i, i < last_span(tile), careful);
    if (!one) merge(states, b.value_width, span, total);
  }
  return finishes || Piece::store(b, work, one ? span : total) || careful ||
         attend_tile<Piece>(b, work, nullptr, true);
}

// Computes one span of a tile into `part`.
template <class Piece>
bool run_span(const Batch& b, const Work& work, int64_t span, const State& part) {
  float* at = floats<TileScratch>(Piece::scratch_size(b));
  if (at == nullptr) return false;
  Piece(b, work, at, part).attend(span, false, false);
  return true;
}

// Handles few tiles with long sequences: spans are separate tasks, merged in order afterwards.
template <class Piece>
bool run_split(const Batch& b, const Work* works, int64_t num_works, int64_t num_spans,
               Team* team) {
  const int64_t size = state_size(b.num_states, b.value_width);
  float* parts = floats<PartStates>(num_works * num_spans * size);
  if (parts == nullptr) return false;
  auto part_of = [&](int64_t index, int64_t offset) {
    float* at = parts + (index * num_spans + offset) * size;
    return carve_state(b.num_states, b.value_width, at);
  };
  std::atomic<bool> ok{true};
  parallel_for(num_works * num_spans, 1, team, [&](int64_t task) {
    const int64_t index = task / num_spans, offset = task % num_spans;
    const Tile tile = make_tile(b, works[index]);
    const int64_t span = first_span(tile) + offset;
    if (span > last_span(tile)) return;
    if (!run_span<Piece>(b, works[index], span, part_of(index, offset))) ok = false;
  });
  if (!ok) return false;
  parallel_for(num_works, 1, team, [&](int64_t index) {
    const Tile tile = make_tile(b, works[index]);
    State total = part_of(index, 0);
    for (int64_t span = first_span(tile) + 1; span <= last_span(tile); ++span)
      merge(Piece::states(b, works[index]), b.value_width, part_of(index, span - first_span(tile)),
            total);
    const bool finite = Piece::store(b, works[index], total);
    if (!finite && !attend_tile<Piece>(b, works[index], nullptr, true)) ok = false;
  });
  return ok;
}

// Appends the tiles of a row, each with at most `heads` kv heads; only counts them when works is
// null. Tiles that widen K and V into scratch have one kv head: they are bound by arithmetic.
int64_t cut_row(const Batch& b, int row, int heads, Work* works) {
  const int queries = b.query_start_loc[row + 1] - b.query_start_loc[row];
  int64_t count = 0;
  for (int token = 0; token < queries; token += b.tile_tokens()) {
    const int tokens = std::min(b.tile_tokens(), queries - token);
    const int fitting = std::max(1, kMaxTileRows / (tokens * b.group));
    const bool one = tokens * b.group >= copy_rows(b.head_dim, b.value_dim);
    const int step = one ? 1 : std::min(heads, fitting);
    for (int head = 0; head < b.num_kv_heads; head += step, ++count)
      if (works != nullptr)
        works[count] = Work{row, token, tokens, head, std::min(step, b.num_kv_heads - head)};
  }
  return count;
}

int64_t cut_rows(const Batch& b, int heads, Work* works) {
  int64_t count = 0;
  for (int row = 0; row < b.num_rows; ++row)
    count += cut_row(b, row, heads, works == nullptr ? nullptr : works + count);
  return count;
}

int64_t most_spans(const Batch& b) {
  int64_t spans = 1;
  for (int row = 0; row < b.num_rows; ++row) {
    const int64_t last = b.seq_lens[row] - 1;
    const bool follows = b.window > 0 && b.last_key == nullptr;  // the last key moves with a query
    const int64_t reach = follows ? std::min(last, b.window + b.tile_tokens()) : last;
    spans = std::max(spans, reach / kSpan + (b.window > 0 ? 2 : 1));
  }
  return spans;
}

// Tasks per thread that balance the load. With fewer, work is cut finer, which costs bandwidth.
constexpr int kTasksPerThread = 2;
// Same for tiles of more than kMaxTileRows rows.
constexpr int kLargePerThread = 8;

template <class Piece>
bool run_batch(const Batch& given, Team* team) {
  const int64_t enough = team_size(team) > 1 ? int64_t{kTasksPerThread} * team_size(team) : 1;
  Batch b = given;
  int heads = b.num_kv_heads;
  int64_t count = 0;
  for (b.most_rows = Piece::most_rows(b);; b.most_rows /= 2) {
    count = cut_rows(b, heads, nullptr);
    if (b.most_rows <= kMaxTileRows || count >= int64_t{kLargePerThread} * team_size(team)) break;
  }
  if (count == 0) return true;  // no row has a query
  const int64_t spans = count < enough ? most_spans(b) : 1;
  // Tiles of one row cost the same: an equal number per thread balances, and large tiles read long
  // stretches.
  const bool alike = b.num_rows == 1 && spans == 1;
  while (heads > 1 && count * spans < enough && !(alike && count % team_size(team) == 0)) {
    heads = (heads + 1) / 2;
    count = cut_rows(b, heads, nullptr);
  }
  static_assert(sizeof(Work) % sizeof(float) == 0);
  float* memory = floats<WorkList>(count * (sizeof(Work) / sizeof(float)));
  if (memory == nullptr) return false;
  Work* works = reinterpret_cast<Work*>(memory);
  cut_rows(b, heads, works);
  for (int64_t i = 0; i < count; ++i)
    b.num_states = std::max(b.num_states, Piece::states(b, works[i]));
  if (spans > 1) return run_split<Piece>(b, works, count, spans, team);
  // Longest rows first. Tiles of one head are adjacent, since they read the same K and V, and the
  // last tile comes first, since it sees most keys. Any order gives the same bits.
  auto cost = [&](const Work& work) {
    const int64_t queries = b.query_start_loc[work.row + 1] - b.query_start_loc[work.row];
    const bool follows = b.window > 0 && b.last_key == nullptr;
    const int64_t seen = follows ? b.window + queries : b.seq_lens[work.row];
    return queries * std::min<int64_t>(seen, b.seq_lens[work.row]);
  };
  std::sort(works, works + count, [&](const Work& x, const Work& y) {
    if (x.row != y.row) {
      const int64_t one = cost(x), other = cost(y);
      return one != other ? one > other : x.row < y.row;
    }
    return x.kv_head != y.kv_head ? x.kv_head < y.kv_head : x.token > y.token;
  });
  std::atomic<bool> ok{true};
  // Each thread takes adjacent tiles: they share pages, and the next one is known.
  parallel_ranges(count, 1, team, [&](int64_t index) {
    const Work* next = index + 1 < count ? &works[index + 1] : nullptr;
    if (!attend_tile<Piece>(b, works[index], next, false)) ok = false;
  });
  return ok;
}

template <class E>
bool run(const Batch& b, Team* team) {
#if defined(__AMX_BF16__)
  if constexpr (std::is_same_v<E, bf16> || std::is_same_v<E, int8_t>) {
    if (LanePiece<E>::takes(b)) return run_batch<LanePiece<E>>(b, team);
  }
#elif defined(__AVX512BF16__)
  if constexpr (std::is_same_v<E, bf16>) {
    if (PairPiece::takes(b)) return run_batch<PairPiece>(b, team);
  }
#endif
  return run_batch<VectorPiece<E>>(b, team);
}

}  // namespace
}  // namespace quire::attention

// Computes attention of a flat batch. Returns 0, 1 for an unknown dtype, or 2 when scratch memory
// is exhausted. Strides are in elements, those of scales in floats.
//
// q: [T, H, Dk] with a token stride. out: [T, H, Dv], contiguous. Caches: [B, S, K, Dk] and [B, S,
// K, Dv] with one set of block and token strides, heads contiguous; equal addresses: V is the first
// part of K. k_scale, v_scale: [B, S, K] of an int8 cache, else null. k_scales: K, or 2 where K = 1
// and k_scale is [B, S, 2], of the first Dv elements of K and of the others. window: 0 for none.
// num_bias_pairs: pairs of dims of K whose bias an int8 cache lacks (KeyBias). value_bias: [K, Dv],
// the bias of V that it lacks, or null. last_key: [T], the last key of each query; null for the key
// at its own position. sinks: [H], scores of a key without a value, or null. soft_cap: 0 for none.
// alibi_slopes: [H], or null.
QUIRE_API int quire_paged_attention(
    const void* q, const void* k_cache, const void* v_cache, const float* k_scale,
    const float* v_scale, void* out, const int32_t* block_table, const int32_t* query_start_loc,
    const int32_t* seq_lens, int64_t q_stride, int64_t block_stride, int64_t token_stride,
    int64_t scale_block_stride, int64_t scale_token_stride, int64_t table_stride,
    int32_t block_size, int32_t num_rows, int32_t num_heads, int32_t num_kv_heads,
    int32_t head_dim, int32_t value_dim, int32_t k_scales, float scale, int32_t window, int32_t q_dtype, int32_t cache_dtype,
    const int32_t* bias_pairs, const float* key_bias, const float* bias_cos, const float* bias_sin,
    int64_t num_bias_pairs, int64_t bias_half, int64_t bias_stride, const float* value_bias,
    const int32_t* last_key, const float* sinks, float soft_cap, const float* alibi_slopes,
    quire::Team* team) {
  using namespace quire;
  using namespace quire::attention;
  const auto whole_vectors = [](int dims) { return (dims + kLanes - 1) / kLanes * kLanes; };
  const Batch batch{q,
                    out,
                    q_stride,
                    int64_t{num_heads} * value_dim,
                    static_cast<DType>(q_dtype),
                    k_cache,
                    v_cache,
                    k_scale,
                    v_scale,
                    block_stride,
                    token_stride,
                    scale_block_stride,
                    scale_token_stride,
                    block_size,
                    block_table,
                    table_stride,
                    query_start_loc,
                    seq_lens,
                    last_key,
                    num_rows,
                    num_heads,
                    num_kv_heads,
                    head_dim,
                    value_dim,
                    whole_vectors(head_dim),
                    whole_vectors(value_dim),
                    num_heads / num_kv_heads,
                    k_scales != num_kv_heads,
                    scale,
                    window,
                    KeyBias{bias_pairs, key_bias, bias_cos, bias_sin, num_bias_pairs, bias_half,
                            bias_stride},
                    value_bias,
                    sinks,
                    Bend{soft_cap, alibi_slopes}};
  bool ok = true;
  const int unknown = dispatch_cache(cache_dtype, [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    ok = run<E>(batch, team);
  });
  return unknown ? 1 : ok ? 0 : 2;
}
QUIRE_REPLAYABLE(quire_paged_attention)
