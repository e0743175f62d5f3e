// Attention of a flat batch over the paged cache: cuts the work into tiles and spans for the team.
#include <algorithm>
#include <type_traits>

#include "attention_batch.h"
#include "attention_tile.h"
#include "parallel.h"
#include "replay.h"
#include "scratch.h"

namespace quire::attention {
namespace {

// What a thread keeps memory for.
struct TileScratch;
struct PartStates;
struct WorkList;

// `count` floats, or null when memory is exhausted.
template <class Owner>
float* floats(int64_t count) {
  return static_cast<float*>(thread_scratch<Owner>(count * int64_t{sizeof(float)}));
}

// Calls f(offset of the query row's first element in q or out, its row in the tile's state).
template <class F>
void each_query_row(const Batch& b, const Work& work, int64_t stride, F&& f) {
  const int64_t first = b.query_start_loc[work.row] + work.token;
  int row = 0;
  for (int head = work.kv_head; head < work.kv_head + work.num_kv_heads; ++head)
    for (int t = 0; t < work.num_tokens; ++t)
      for (int g = 0; g < b.group; ++g)
        f((first + t) * stride + int64_t{head * b.group + g} * b.head_dim, row++);
}

void load_queries(const Batch& b, const Work& work, float* q) {
  const vf scale = set1(b.scale * kLog2E);
  dispatch(b.q_dtype, [&](auto* tag) {
    using Q = std::remove_pointer_t<decltype(tag)>;
    each_query_row(b, work, b.q_stride, [&](int64_t offset, int row) {
      const Q* from = static_cast<const Q*>(b.q) + offset;
      float* to = q + row * b.width;
      int d = 0;
      for (; d + kLanes <= b.head_dim; d += kLanes) store(to + d, mul(load(from + d), scale));
      if (d < b.head_dim) store(to + d, mul(load_part(from + d, b.head_dim - d), scale));
    });
  });
}

void store_output(const Batch& b, const Work& work, const State& total) {
  dispatch(b.q_dtype, [&](auto* tag) {
    using Q = std::remove_pointer_t<decltype(tag)>;
    each_query_row(b, work, b.out_stride, [&](int64_t offset, int row) {
      Q* to = static_cast<Q*>(b.out) + offset;
      const float* acc = total.acc + row * b.width;
      const vf sum = set1(total.sum[row]);
      int d = 0;
      for (; d + kLanes <= b.head_dim; d += kLanes) store(to + d, div(load(acc + d), sum));
      if (d < b.head_dim) store_part(to + d, div(load(acc + d), sum), b.head_dim - d);
    });
  });
}

int64_t first_span(const Tile& tile) { return tile.low(0) / kSpan; }
int64_t last_span(const Tile& tile) { return tile.position(tile.rows - 1) / kSpan; }

// All spans of a tile, one after the other.
template <class E>
bool run_tile(const Batch& b, const Work& work) {
  float* at = floats<TileScratch>(scratch_size(b));
  if (at == nullptr) return false;
  Scratch scratch = carve(b, at);
  State total = carve_state(b, at);
  const Tile tile = make_tile(b, work);
  const Keys<E> keys = make_keys<E>(b, work);
  load_queries(b, work, scratch.q);
  if (tile.integers) round_queries(tile, scratch);
  if (first_span(tile) == last_span(tile)) {
    attend_span(tile, keys, first_span(tile), false, scratch);
    store_output(b, work, scratch.span);
    return true;
  }
  std::memset(total.sum, 0, sizeof(float) * tile.num_states());
  std::memset(total.acc, 0, sizeof(float) * tile.num_states() * tile.width);
  for (int64_t span = first_span(tile); span <= last_span(tile); ++span) {
    attend_span(tile, keys, span, span < last_span(tile), scratch);
    merge(tile.num_states(), tile.width, scratch.span, total);
  }
  store_output(b, work, total);
  return true;
}

// One span of a tile, into `part`.
template <class E>
bool run_span(const Batch& b, const Work& work, int64_t span, State part) {
  float* at = floats<TileScratch>(scratch_size(b));
  if (at == nullptr) return false;
  Scratch scratch = carve(b, at);
  scratch.span = part;
  const Tile tile = make_tile(b, work);
  load_queries(b, work, scratch.q);
  if (tile.integers) round_queries(tile, scratch);
  attend_span(tile, make_keys<E>(b, work), span, false, scratch);
  return true;
}

// Few tiles and long sequences: spans are tasks of their own, merged in order afterwards.
template <class E>
bool run_split(const Batch& b, const Work* works, int64_t num_works, int64_t num_spans,
               Team* team) {
  float* parts = floats<PartStates>(num_works * num_spans * state_size(b));
  if (parts == nullptr) return false;
  auto part_of = [&](int64_t index, int64_t offset) {
    float* at = parts + (index * num_spans + offset) * state_size(b);
    return carve_state(b, at);
  };
  std::atomic<bool> ok{true};
  parallel_for(num_works * num_spans, 1, team, [&](int64_t task) {
    const int64_t index = task / num_spans, offset = task % num_spans;
    const Tile tile = make_tile(b, works[index]);
    const int64_t span = first_span(tile) + offset;
    if (span > last_span(tile)) return;
    if (!run_span<E>(b, works[index], span, part_of(index, offset))) ok = false;
  });
  parallel_for(num_works, 1, team, [&](int64_t index) {
    const Tile tile = make_tile(b, works[index]);
    State total = part_of(index, 0);
    for (int64_t span = first_span(tile) + 1; span <= last_span(tile); ++span)
      merge(tile.num_states(), tile.width, part_of(index, span - first_span(tile)), total);
    store_output(b, works[index], total);
  });
  return ok;
}

// Appends a row's tiles, each `heads` kv heads at most; counts only when works is null. Tiles whose
// K and V are widened into scratch have one kv head: they are bound by arithmetic.
int64_t cut_row(const Batch& b, int row, int heads, Work* works) {
  const int queries = b.query_start_loc[row + 1] - b.query_start_loc[row];
  int64_t count = 0;
  for (int token = 0; token < queries; token += b.tile_tokens()) {
    const int tokens = std::min(b.tile_tokens(), queries - token);
    const int fitting = std::max(1, b.tile_rows() / (tokens * b.group));
    const int step = tokens * b.group < kCopyRows ? std::min(heads, fitting) : 1;
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
    const int64_t reach = b.window > 0 ? std::min(last, b.window + b.tile_tokens()) : last;
    spans = std::max(spans, reach / kSpan + (b.window > 0 ? 2 : 1));
  }
  return spans;
}

// Tasks per thread that are enough to balance; below it work is cut finer, which costs bandwidth.
constexpr int kTasksPerThread = 2;

template <class E>
bool run_batch(const Batch& b, Team* team) {
  const int64_t enough = team_size(team) > 1 ? int64_t{kTasksPerThread} * team_size(team) : 1;
  int heads = b.num_kv_heads;
  int64_t count = cut_rows(b, heads, nullptr);
  if (count == 0) return true;  // no row has a query
  const int64_t spans = count < enough ? most_spans(b) : 1;
  while (heads > 1 && count * spans < enough) {
    heads = (heads + 1) / 2;
    count = cut_rows(b, heads, nullptr);
  }
  static_assert(sizeof(Work) % sizeof(float) == 0);
  float* memory = floats<WorkList>(count * (sizeof(Work) / sizeof(float)));
  if (memory == nullptr) return false;
  Work* works = reinterpret_cast<Work*>(memory);
  cut_rows(b, heads, works);
  if (spans > 1) return run_split<E>(b, works, count, spans, team);
  auto cost = [&](const Work& work) {
    const Tile tile = make_tile(b, work);
    return (tile.position(tile.rows - 1) + 1 - tile.low(0)) * work.num_tokens * work.num_kv_heads;
  };
  if (team_size(team) > 1)  // longest first; any order gives the same bits
    std::sort(works, works + count,
              [&](const Work& x, const Work& y) { return cost(x) > cost(y); });
  std::atomic<bool> ok{true};
  parallel_for(count, 1, team, [&](int64_t index) {
    if (!run_tile<E>(b, works[index])) ok = false;
  });
  return ok;
}

}  // namespace
}  // namespace quire::attention

// q: [T, H, D] with a token stride; out: [T, H, D] contiguous; caches: [B, S, K, D] with block and
// token strides, heads contiguous; strides in elements. k_scale, v_scale: of an int8 cache, float
// [B, S, K] with strides in floats, else null. window: 0 for none. Returns 0, or 1 for an unknown
// dtype, 2 when scratch memory is exhausted.
QUIRE_API int quire_paged_attention(
    const void* q, const void* k_cache, const void* v_cache, const float* k_scale,
    const float* v_scale, void* out, const int32_t* block_table, const int32_t* query_start_loc,
    const int32_t* seq_lens, int64_t q_stride, int64_t block_stride, int64_t token_stride,
    int64_t scale_block_stride, int64_t scale_token_stride, int64_t table_stride,
    int32_t block_size, int32_t num_rows, int32_t num_heads, int32_t num_kv_heads,
    int32_t head_dim, float scale, int32_t window, int32_t q_dtype, int32_t cache_dtype,
    quire::Team* team) {
  using namespace quire;
  using namespace quire::attention;
  const int width = (head_dim + kLanes - 1) / kLanes * kLanes;
  const Batch batch{q,
                    out,
                    q_stride,
                    int64_t{num_heads} * head_dim,
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
                    num_rows,
                    num_heads,
                    num_kv_heads,
                    head_dim,
                    width,
                    num_heads / num_kv_heads,
                    scale,
                    window};
  bool ok = true;
  const int unknown = dispatch_cache(cache_dtype, [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    ok = run_batch<E>(batch, team);
  });
  return unknown ? 1 : ok ? 0 : 2;
}
QUIRE_REPLAYABLE(quire_paged_attention)
