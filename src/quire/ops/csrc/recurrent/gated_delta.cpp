// Gated delta rule of each head, token after token, from and to a state of its row.
#include "native/replay.h"
#include "recurrent/heads.h"

namespace quire {
namespace {

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

// x, gates: rows of the piece's first token.
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
    const E* const of_head = gates + t * gates_stride + head;
    const float b = number(of_head), a = number(of_head + sizes.num_heads);
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
// values, out: rows of the piece's first token, `stride` and `out_stride` elements apart. streams:
// nobody needs the new state soon.
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
// read, write, num_computed: one number per slot. Row i, of slot slots[i], has tokens starts[i] …
// starts[i + 1] - 1. Returns 3 for sizes that it does not know.
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
  const RowStates rows{states, stride, read, write, slots, num_rows, starts, num_computed};
  const HeadBlocks blocks{num_heads, sizes.blocks(), sizes.block()};
  return dispatch(static_cast<DType>(dtype), [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    const int64_t out_width = num_heads * value_dim;
    const auto token = [&](int64_t t) { return static_cast<const E*>(x) + t * sizes.width(); };
    each_block<Piece>(
        rows, blocks, team,
        [&](int64_t t, int64_t head, int64_t tokens, Piece& piece) {
          prepare(token(t), static_cast<const E*>(gates) + t * gates_stride, gates_stride,
                  log_rates[head], bias[head], sizes, head, tokens, piece);
        },
        [&](const float* from, float* to, const Piece& piece, int64_t t, int64_t tokens,
            int64_t head, int64_t block, bool streams) {
          const int64_t column = head * value_dim + block * kColumns;
          advance(from, to, piece, tokens, key_dim,
                  token(t) + 2 * num_keys * key_dim + column, sizes.width(),
                  static_cast<E*>(out) + t * out_width + column, out_width, streams);
        });
  });
}
QUIRE_REPLAYABLE(quire_gated_delta)
