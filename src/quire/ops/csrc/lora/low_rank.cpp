// Low-rank additions to the outputs of a projection, a different one for each row.
#include <cstring>

#include "native/parallel.h"
#include "native/replay.h"
#include "native/simd.h"

namespace quire {
namespace {

constexpr int kTogether = 4;              // rows of A that share what is loaded of x
constexpr int64_t kOutputsPerTask = 512;  // a piece of a row: one decode row may be wide
constexpr int64_t kRowsPerTask = 4;

// f(vector index, vector) over a row of `count` elements; the last one may be filled up with zeros.
template <class E, class F>
QUIRE_INLINE void each_vector(const E* row, int64_t count, F&& f) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) f(i, load(row + i));
  if (i == count) return;
  E rest[kLanes] = {};
  std::memcpy(rest, row + i, (count - i) * sizeof(E));
  f(i, load(rest));
}

template <class E>
QUIRE_INLINE vf load_part(const E* row, int64_t i, int64_t count) {
  if (i + kLanes <= count) return load(row + i);
  E rest[kLanes] = {};
  std::memcpy(rest, row + i, (count - i) * sizeof(E));
  return load(rest);
}

// out[r] = A[r] · x for `count` <= kTogether rows of A.
template <class E>
void products(const E* a, const E* x, int64_t inputs, int64_t count, float* out) {
  vf sums[kTogether] = {zero(), zero(), zero(), zero()};
  const E* rows[kTogether];
  for (int r = 0; r < kTogether; ++r) rows[r] = a + (r < count ? r : count - 1) * inputs;
  each_vector(x, inputs, [&](int64_t i, vf values) {
    QUIRE_UNROLL
    for (int r = 0; r < kTogether; ++r) {
      sums[r] = fma(load_part(rows[r], i, inputs), values, sums[r]);
    }
  });
  for (int64_t r = 0; r < count; ++r) out[r] = sum(sums[r]);
}

// y += scale · Σ t[r] B[r] for outputs [first, last).
template <class E>
void expand(const E* b, int64_t outputs, const float* t, int64_t rank, float scale, E* y,
            int64_t first, int64_t last) {
  const vf factor = set1(scale);
  for (int64_t o = first; o < last; o += kLanes) {
    const int64_t end = last - o;
    vf total = zero();
    for (int64_t r = 0; r < rank; ++r) {
      total = fma(set1(t[r]), load_part(b + r * outputs + o, 0, end), total);
    }
    const vf value = fma(factor, total, load_part(y + o, 0, end));
    if (end >= kLanes) {
      store(y + o, value);
      continue;
    }
    E rest[kLanes];
    store(rest, value);
    std::memcpy(y + o, rest, end * sizeof(E));
  }
}

}  // namespace
}  // namespace quire

// x: rows [rows, inputs], strided. slots: [rows], 0 for none, else 1 + the adapter's index; 3: one
// beyond `adapters`. a: [adapters, parts · rank, inputs]. ranks, scales: [adapters, parts].
// t: [rows, parts · rank], of which what the ranks say is written.
QUIRE_API int quire_low_rank_shrink(const void* x, int64_t x_stride, const int64_t* slots,
                                    const void* a, const int64_t* ranks, float* t, int64_t rows,
                                    int64_t inputs, int64_t adapters, int64_t parts, int64_t rank,
                                    int32_t dtype, quire::Team* team) {
  using namespace quire;
  for (int64_t i = 0; i < rows; ++i) {
    if (slots[i] < 0 || slots[i] > adapters) return 3;
  }
  return dispatch(static_cast<DType>(dtype), [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    const int64_t groups = (rank + kTogether - 1) / kTogether, per_row = parts * groups;
    parallel_for(rows * per_row, per_row > 8 ? 4 : kRowsPerTask * per_row, team, [&](int64_t task) {
      const int64_t row = task / per_row, part = task % per_row / groups;
      if (slots[row] == 0) return;
      const int64_t adapter = slots[row] - 1, first = task % groups * kTogether;
      const int64_t left = ranks[adapter * parts + part] - first;
      if (left <= 0) return;
      const int64_t line = part * rank + first;
      products(static_cast<const E*>(a) + (adapter * parts * rank + line) * inputs,
               static_cast<const E*>(x) + row * x_stride, inputs,
               left < kTogether ? left : kTogether, t + row * parts * rank + line);
    });
  });
}
QUIRE_REPLAYABLE(quire_low_rank_shrink)

// y: rows [rows, outputs], changed. ends: [parts], where the outputs of each part end. b:
// [adapters, rank, outputs]. t: of the kernel above. The others as there.
QUIRE_API int quire_low_rank_expand(const float* t, const int64_t* slots, const void* b,
                                    const int64_t* ranks, const float* scales, const int64_t* ends,
                                    void* y, int64_t y_stride, int64_t rows, int64_t outputs,
                                    int64_t parts, int64_t rank, int32_t dtype,
                                    quire::Team* team) {
  using namespace quire;
  return dispatch(static_cast<DType>(dtype), [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    const int64_t pieces = (outputs + kOutputsPerTask - 1) / kOutputsPerTask;
    parallel_for(rows * pieces, kRowsPerTask, team, [&](int64_t task) {
      const int64_t row = task / pieces, begin = task % pieces * kOutputsPerTask;
      if (slots[row] == 0) return;
      const int64_t adapter = slots[row] - 1;
      const int64_t end = begin + kOutputsPerTask < outputs ? begin + kOutputsPerTask : outputs;
      for (int64_t part = 0, from = 0; part < parts; from = ends[part++]) {
        const int64_t its = ranks[adapter * parts + part];
        const int64_t first = from > begin ? from : begin;
        const int64_t last = ends[part] < end ? ends[part] : end;
        if (its == 0 || first >= last) continue;
        expand(static_cast<const E*>(b) + adapter * rank * outputs, outputs,
               t + (row * parts + part) * rank, its, scales[adapter * parts + part],
               static_cast<E*>(y) + row * y_stride, first, last);
      }
    });
  });
}
QUIRE_REPLAYABLE(quire_low_rank_expand)
