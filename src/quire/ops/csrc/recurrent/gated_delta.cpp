// Gated delta rule of each head, token after token, from and to a state of its row.
//
// Columns of a state do not know each other. So a block of 16 columns, which stays in the first
// cache, takes a piece of the row's tokens before the next block does.
#include "native/parallel.h"
#include "native/replay.h"
#include "native/rows.h"

namespace quire {
namespace {

constexpr int64_t kColumns = 16;
constexpr int kVectors = kColumns / kLanes;
constexpr int kSums = 4 / kVectors;  // partial sums of a column: they hide latency
constexpr int64_t kPiece = 16;       // tokens
constexpr int64_t kMaxKeyDim = 256;
constexpr float kEps = 1e-6f;

struct Sizes {
  int64_t num_keys, key_dim, num_heads, value_dim;
  bool in_turn;

  int64_t width() const { return 2 * num_keys * key_dim + num_heads * value_dim; }
  int64_t key_of(int64_t head) const {
    return in_turn ? head % num_keys : head / (num_heads / num_keys);
  }
  int64_t block() const { return key_dim * kColumns; }
  int64_t blocks() const { return value_dim / kColumns; }
};

// Stores without reading what was there, and past the caches. p: aligned to the vector.
#if defined(__AVX512F__)
QUIRE_INLINE void stream(float* p, vf x) { _mm512_stream_ps(p, x); }
#else
QUIRE_INLINE void stream(float* p, vf x) { _mm256_stream_ps(p, x); }
#endif

// Tokens of a piece for one head: q and k of unit length, q · k, decay and strength of the update.
struct Piece {
  alignas(64) float q[kPiece * kMaxKeyDim], k[kPiece * kMaxKeyDim];
  float qk[kPiece], alpha[kPiece], beta[kPiece];
};

// Writes a vector of `width` elements as floats, divided by its length and multiplied by `factor`.
template <class E>
void unit(const E* x, float* out, int64_t width, float factor) {
  const float squares = sum_over(width, [&](auto total, int64_t i, auto size) {
    const auto value = get(x + i, size);
    return fma(value, value, total);
  });
  const vf scale = set1(factor / std::sqrt(squares + kEps));
  each_vector(0, width, [&](int64_t i, auto size) { put(out + i, mul(get(x + i, size), scale), size); });
}

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// x, gates: of the piece's first token.
template <class E>
void prepare(const E* x, const E* gates, int64_t gates_stride, float log_rate, float bias,
             const Sizes& sizes, int64_t head, int64_t tokens, Piece& piece) {
  const int64_t dim = sizes.key_dim, key = sizes.key_of(head);
  const float factor = 1.0f / std::sqrt(static_cast<float>(dim)), rate = std::exp(log_rate);
  for (int64_t t = 0; t < tokens; ++t) {
    const E* const q = x + t * sizes.width() + key * dim;
    unit(q, piece.q + t * dim, dim, factor);
    unit(q + sizes.num_keys * dim, piece.k + t * dim, dim, 1.0f);
    piece.qk[t] = sum_over(dim, [&](auto total, int64_t i, auto size) {
      return fma(get(piece.q + t * dim + i, size), get(piece.k + t * dim + i, size), total);
    });
    float b, a;
    const E* const of_head = gates + t * gates_stride + head;
    b = first_lane(load_part(of_head, 1));
    a = first_lane(load_part(of_head + sizes.num_heads, 1));
    piece.beta[t] = 1.0f / (1.0f + std::exp(-b));
    piece.alpha[t] = std::exp(-rate * softplus(a + bias));
  }
}

// An update of a block that is not done yet: S ← alpha S + k deltaᵀ.
struct Update {
  const float* k;
  float alpha;
  vf delta[kVectors];
};

enum class Due { kNone, kKept, kStreamed };  // an update that is due, and where it is stored

template <Due kDue>
QUIRE_INLINE vf updated(const float* from, float* to, int64_t row, int vector, const Update& due) {
  const int64_t at = row * kColumns + vector * kLanes;
  vf s = load(from + at);
  if (kDue == Due::kNone) return s;
  s = fma(set1(due.k[row]), due.delta[vector], mul(set1(due.alpha), s));
  if (kDue == Due::kStreamed) {
    stream(to + at, s);
  } else {
    store(to + at, s);
  }
  return s;
}

// Does the update that is due, if one is, from `from` to `to`, and multiplies the new columns by k
// and q.
template <Due kDue>
QUIRE_INLINE void multiply(const float* from, float* to, int64_t dim, const Update& due,
                           const float* k, const float* q, vf (&by_k)[kVectors],
                           vf (&by_q)[kVectors]) {
  vf with_k[kSums][kVectors], with_q[kSums][kVectors];
  QUIRE_UNROLL
  for (int j = 0; j < kSums; ++j) {
    QUIRE_UNROLL
    for (int v = 0; v < kVectors; ++v) with_k[j][v] = with_q[j][v] = zero();
  }
  for (int64_t i = 0; i < dim; i += kSums) {
    QUIRE_UNROLL
    for (int j = 0; j < kSums; ++j) {
      QUIRE_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        const vf s = updated<kDue>(from, to, i + j, v, due);
        with_k[j][v] = fma(set1(k[i + j]), s, with_k[j][v]);
        with_q[j][v] = fma(set1(q[i + j]), s, with_q[j][v]);
      }
    }
  }
  QUIRE_UNROLL
  for (int v = 0; v < kVectors; ++v) {
    by_k[v] = add(with_k[0][v], with_k[1][v]);
    by_q[v] = add(with_q[0][v], with_q[1][v]);
    if (kSums == 4) {
      by_k[v] = add(by_k[v], add(with_k[kSums - 2][v], with_k[kSums - 1][v]));
      by_q[v] = add(by_q[v], add(with_q[kSums - 2][v], with_q[kSums - 1][v]));
    }
  }
}

// Takes a block through a piece: from the state `from` to the one `to`, which may be the same.
// values, out: of the piece's first token, `stride` and `out_stride` elements apart. streams: nobody
// needs the new state soon.
template <class E>
void advance(const float* from, float* to, const Piece& piece, int64_t tokens, int64_t dim,
             const E* values, int64_t stride, E* out, int64_t out_stride, bool streams) {
  Update due{};
  for (int64_t t = 0; t < tokens; ++t) {
    vf by_k[kVectors], by_q[kVectors];
    const float *const k = piece.k + t * dim, *const q = piece.q + t * dim;
    if (t == 0) {
      multiply<Due::kNone>(from, to, dim, due, k, q, by_k, by_q);
    } else {
      multiply<Due::kKept>(from, to, dim, due, k, q, by_k, by_q);
      from = to;
    }
    const vf alpha = set1(piece.alpha[t]), beta = set1(piece.beta[t]), qk = set1(piece.qk[t]);
    QUIRE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const vf value = load(values + t * stride + v * kLanes);
      due.delta[v] = mul(beta, sub(value, mul(alpha, by_k[v])));
      store(out + t * out_stride + v * kLanes, fma(qk, due.delta[v], mul(alpha, by_q[v])));
    }
    due.k = k;
    due.alpha = piece.alpha[t];
  }
  const auto finish = [&](auto update) {
    for (int64_t i = 0; i < dim; ++i) {
      QUIRE_UNROLL
      for (int v = 0; v < kVectors; ++v) update(i, v);
    }
  };
  if (streams) {
    finish([&](int64_t i, int v) { updated<Due::kStreamed>(from, to, i, v, due); });
  } else {
    finish([&](int64_t i, int v) { updated<Due::kKept>(from, to, i, v, due); });
  }
}

}  // namespace
}  // namespace quire

// x: q, k, v of each token, [T, 2 · num_keys · key_dim + num_heads · value_dim]. gates: b and a of
// each head, rows `gates_stride` elements apart. log_rates, bias: [num_heads]. out: [T, num_heads ·
// value_dim]. in_turn: a key serves every num_keys-th head, not adjacent ones. states: places `stride` floats apart, each [num_heads, value_dim / 16, key_dim, 16].
// read, write, num_computed: by slot. Row i, of slot slots[i], has tokens starts[i] … starts[i + 1]
// - 1. Returns 3 for sizes that it does not know.
QUIRE_API int quire_gated_delta(const void* x, const void* gates, int64_t gates_stride,
                                const float* log_rates, const float* bias, void* out,
                                int64_t num_keys, int64_t key_dim, int64_t num_heads,
                                int64_t value_dim, int32_t in_turn, float* states, int64_t stride,
                                const int64_t* read, const int64_t* write, const int64_t* slots,
                                int64_t num_rows, const int32_t* starts,
                                const int64_t* num_computed, int32_t dtype, quire::Team* team) {
  using namespace quire;
  const Sizes sizes{num_keys, key_dim, num_heads, value_dim, in_turn != 0};
  if (key_dim > kMaxKeyDim || key_dim % 4 != 0 || value_dim % kColumns != 0) return 3;
  if (num_heads % num_keys != 0) return 3;
  // Few heads are cut into groups of blocks, so that each thread has one.
  const int64_t wanted = 2 * team_size(team) / std::max<int64_t>(num_rows * num_heads, 1);
  const int64_t groups = std::clamp<int64_t>(wanted, 1, sizes.blocks());
  return dispatch(static_cast<DType>(dtype), [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    parallel_ranges(num_rows * num_heads * groups, 1, team, [&](int64_t task) {
      const int64_t row = task / (num_heads * groups), head = task / groups % num_heads;
      const int64_t first = task % groups * sizes.blocks() / groups;
      const int64_t last = (task % groups + 1) * sizes.blocks() / groups;
      const int64_t slot = slots[row], out_width = num_heads * value_dim;
      const int64_t of_head = head * sizes.blocks() * sizes.block();
      const float* from = states + read[slot] * stride + of_head;
      float* const to = states + write[slot] * stride + of_head;
      if (num_computed[slot] == 0) {
        std::memset(to + first * sizes.block(), 0, (last - first) * sizes.block() * sizeof(float));
        from = to;
      }
      // A row with one token comes back in the next step, after all weights of the model.
      const bool is_aligned = reinterpret_cast<uintptr_t>(to) % (kLanes * sizeof(float)) == 0;
      const bool streams = is_aligned && starts[row + 1] - starts[row] == 1;
      Piece piece;
      for (int64_t t = starts[row]; t < starts[row + 1]; t += kPiece, from = to) {
        const int64_t tokens = std::min<int64_t>(kPiece, starts[row + 1] - t);
        const E* const tokens_x = static_cast<const E*>(x) + t * sizes.width();
        prepare(tokens_x, static_cast<const E*>(gates) + t * gates_stride, gates_stride,
                log_rates[head], bias[head], sizes, head, tokens, piece);
        const E* const values = tokens_x + 2 * num_keys * key_dim + head * value_dim;
        E* const tokens_out = static_cast<E*>(out) + t * out_width + head * value_dim;
        for (int64_t block = first; block < last; ++block) {
          advance(from + block * sizes.block(), to + block * sizes.block(), piece, tokens, key_dim,
                  values + block * kColumns, sizes.width(), tokens_out + block * kColumns,
                  out_width, streams);
        }
      }
      if (streams) _mm_sfence();
    });
  });
}
QUIRE_REPLAYABLE(quire_gated_delta)
