// Selective state of each head, token after token, from and to a state of its row.
#include "native/replay.h"
#include "recurrent/heads.h"

namespace quire {
namespace {

constexpr int64_t kMaxStateSize = 256;

// Tokens of a piece for one head: B and C of its group, step and decay.
struct Piece {
  alignas(64) float b[kPiece * kMaxStateSize], c[kPiece * kMaxStateSize];
  float dt[kPiece], decay[kPiece];
};

// Takes a block of columns through one token: S ← decay S + B (dt x)ᵀ from the state `from` to the
// one `to`, and gives Sᵀ C + skip x.
template <bool kStreams, class E>
QUIRE_INLINE void step(const float* from, float* to, const float* b, const float* c, float dt,
                       float decay, float skip, int64_t size, const E* x, E* out) {
  vf added[kVectors], sums[kSums][kVectors];
  QUIRE_UNROLL
  for (int v = 0; v < kVectors; ++v) {
    added[v] = mul(set1(dt), load(x + v * kLanes));
    QUIRE_UNROLL
    for (int j = 0; j < kSums; ++j) sums[j][v] = zero();
  }
  const vf kept = set1(decay);
  for (int64_t n = 0; n < size; n += kSums) {
    QUIRE_UNROLL
    for (int j = 0; j < kSums; ++j) {
      QUIRE_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = (n + j) * kColumns + v * kLanes;
        const vf s = fma(set1(b[n + j]), added[v], mul(kept, load(from + at)));
        if (kStreams) {
          stream(to + at, s);
        } else {
          store(to + at, s);
        }
        sums[j][v] = fma(set1(c[n + j]), s, sums[j][v]);
      }
    }
  }
  QUIRE_UNROLL
  for (int v = 0; v < kVectors; ++v) {
    vf total = add(sums[0][v], sums[1][v]);
    if (kSums == 4) total = add(total, add(sums[kSums - 2][v], sums[kSums - 1][v]));
    store(out + v * kLanes, fma(set1(skip), load(x + v * kLanes), total));
  }
}

}  // namespace
}  // namespace quire

// x: x of each head, B and C of each group, [T, num_heads · head_dim + 2 · num_groups ·
// state_size]. dt: a number of each head, rows `dt_stride` elements apart. log_rates, bias, skip:
// [num_heads]. out: [T, num_heads · head_dim]. states: places `stride` floats apart, each
// [num_heads, head_dim / 16, state_size, 16]. Others as of quire_gated_delta. Returns 3 for sizes
// that it does not know.
QUIRE_API int quire_ssd(const void* x, const void* dt, int64_t dt_stride, const float* log_rates,
                        const float* bias, const float* skip, float least, float most, void* out,
                        int64_t num_heads, int64_t head_dim, int64_t num_groups,
                        int64_t state_size, float* states, int64_t stride, const int64_t* read,
                        const int64_t* write, const int64_t* slots, int64_t num_rows,
                        const int32_t* starts, const int64_t* num_computed, int32_t dtype,
                        quire::Team* team) {
  using namespace quire;
  if (state_size > kMaxStateSize || state_size % 4 != 0 || head_dim % kColumns != 0) return 3;
  if (num_heads % num_groups != 0) return 3;
  const RowStates rows{states, stride, read, write, slots, num_rows, starts, num_computed};
  const HeadBlocks blocks{num_heads, head_dim / kColumns, state_size * kColumns};
  return dispatch(static_cast<DType>(dtype), [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    const int64_t out_width = num_heads * head_dim, of_groups = num_groups * state_size;
    const int64_t width = out_width + 2 * of_groups, heads_of_group = num_heads / num_groups;
    const E *const xs = static_cast<const E*>(x), *const steps = static_cast<const E*>(dt);
    each_block<Piece>(
        rows, blocks, team,
        [&](int64_t t, int64_t head, int64_t tokens, Piece& piece) {
          const float rate = std::exp(log_rates[head]);
          const int64_t of_group = out_width + head / heads_of_group * state_size;
          for (int64_t i = 0; i < tokens; ++i) {
            const E* const b = xs + (t + i) * width + of_group;
            each_vector(0, state_size, [&](int64_t n, auto part) {
              put(piece.b + i * state_size + n, get(b + n, part), part);
              put(piece.c + i * state_size + n, get(b + of_groups + n, part), part);
            });
            const float raw = number(steps + (t + i) * dt_stride + head);
            piece.dt[i] = std::min(std::max(softplus(raw + bias[head]), least), most);
            piece.decay[i] = std::exp(-rate * piece.dt[i]);
          }
        },
        [&](const float* from, float* to, const Piece& piece, int64_t t, int64_t tokens,
            int64_t head, int64_t block, bool streams) {
          const int64_t column = head * head_dim + block * kColumns;
          const auto chosen = streams ? step<true, E> : step<false, E>;
          for (int64_t i = 0; i < tokens; ++i, from = to) {
            chosen(from, to, piece.b + i * state_size, piece.c + i * state_size, piece.dt[i],
                   piece.decay[i], skip[head], state_size, xs + (t + i) * width + column,
                   static_cast<E*>(out) + (t + i) * out_width + column);
          }
        });
  });
}
QUIRE_REPLAYABLE(quire_ssd)
