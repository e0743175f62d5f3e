// Outputs that a thread buffers until adjacent columns of their rows are complete.
//
// Rows of outputs are far apart in memory, and the weights read meanwhile have evicted them from
// the caches. If a row gets one cache line per panel, each store waits for memory, and the weights
// behind it wait too. Several lines of a row at once, by non-temporal stores, take less time: on a
// Xeon 7 to 10 % of a layer from memory for 4 to 32 rows with tile registers, and for 512 rows 12 %
// of bfloat16 and 24 % of 8 bits; without those registers 14 % for 4 rows of bfloat16, and 3 to 7 %
// for 16 and 32 rows of both (measured, in layers of 2 MiB and more; 2 to 16 panels at once are
// nearly alike. More than 512 rows of 16 bits have room for one panel only).
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>

#include "pointwise/gate.h"

namespace quire {

// Returns whether outputs computed in vector registers should be staged. On a Zen 4 that made no
// difference larger than those between runs (8 bits: 4, 16 and 512 rows; bfloat16: 16).
inline bool pays_to_wait() { return kLanes == 16 && !is_amd(); }

template <class Y>
class StagedOutputs {
 public:
  static constexpr bool kWait = true;
  static constexpr int64_t kBytes = 64 << 10;
  static constexpr int64_t kMostRows = kBytes / (kWidth * static_cast<int64_t>(sizeof(Y)));

  // y: outputs of `rows` rows. weight_bytes: bytes of the layer that a thread reads.
  StagedOutputs(const Outputs& outputs, Y* y, int64_t rows, int64_t weight_bytes)
      : outputs_(outputs), y_(y), streams_(pays_to_stream(rows, weight_bytes)) {}
  ~StagedOutputs() {
    write();
#if defined(__AVX512F__)
    if (streams_) _mm_sfence();  // a release of the team does not order non-temporal stores
#endif
  }
  StagedOutputs(const StagedOutputs&) = delete;
  StagedOutputs& operator=(const StagedOutputs&) = delete;

  // Returns whether rows [first, last) by panel `index` continue where the staged columns end.
  bool takes(int64_t index, int64_t first, int64_t last) const {
    const int64_t column = outputs_.column(index) - first_column_;
    return first == first_row_ && last == last_row_ &&
           (outputs_.applies(index)
                ? column == columns_ - kWidth
                : column == columns_ && columns_ < room_ &&
                      outputs_.end(first_column_) == outputs_.end(first_column_ + column));
  }
  // Makes room for the columns of these rows, at most kMostRows. Call it before columns().
  void make_room(int64_t index, int64_t first, int64_t last) {
    if (takes(index, first, last)) return;
    write();
    first_row_ = first;
    last_row_ = last;
    first_column_ = outputs_.column(index);
    columns_ = 0;
    const int64_t fitting = kBytes / static_cast<int64_t>(sizeof(Y)) / (last - first);
    room_ = std::min(kMostColumns, fitting / kWidth * kWidth);
  }
  // Returns the place of the columns of panel `index` for `row`; the next row is stride() further.
  Y* columns(int64_t index, int64_t row) {
    const int64_t column = outputs_.column(index) - first_column_;
    columns_ = column + kWidth;
    return staged_ + (row - first_row_) * room_ + column;
  }
  int64_t stride() const { return room_; }

 private:
  static constexpr int64_t kLine = 64 / sizeof(Y);
  static constexpr int64_t kMostColumns = 4 * kWidth;
  // This many bytes of outputs would evict each other from the caches, and would be read back
  // before they are written. Measured with tile registers: with non-temporal stores 1 MiB takes a
  // tenth less time, 2 MiB a third less, 512 KiB the same.
  static constexpr int64_t kStreamedBytes = 1 << 20;
  // This many bytes of weights read by a core evict outputs from its second-level cache (2 MiB).
  static constexpr int64_t kStreamedWeights = 1 << 20;

  bool pays_to_stream(int64_t rows, int64_t weight_bytes) const {
    const int64_t row_bytes = outputs_.stride() * static_cast<int64_t>(sizeof(Y));
    const int64_t part_bytes = outputs_.part() * static_cast<int64_t>(sizeof(Y));
    const bool halves_fit = outputs_.gate != kApart || part_bytes % 64 == 0;
    const bool whole_lines =
        halves_fit && row_bytes % 64 == 0 && reinterpret_cast<uintptr_t>(y_) % 64 == 0;
    return whole_lines && (rows * row_bytes >= kStreamedBytes || weight_bytes >= kStreamedWeights);
  }

  void write() const {
    const int64_t count = std::min(columns_, outputs_.end(first_column_) - first_column_);
    const int64_t stride = outputs_.stride();
    const Y* from = staged_;
    Y* to = y_ + first_row_ * stride + first_column_;
    for (int64_t row = first_row_; row < last_row_; ++row, from += room_, to += stride) {
      write_row(from, to, count);
    }
  }
  QUIRE_INLINE void write_row(const Y* from, Y* to, int64_t count) const {
    int64_t column = 0;
#if defined(__AVX512F__)
    for (; column + kLine <= count; column += kLine) {
      const __m512i line = _mm512_load_si512(from + column);
      if (streams_) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + column), line);
      } else {
        _mm512_storeu_si512(to + column, line);
      }
    }
#endif
    std::memcpy(to + column, from + column, (count - column) * sizeof(Y));
  }

  const Outputs outputs_;
  Y* const y_;
  const bool streams_;
  // Staged: rows first_row_ to last_row_, columns_ columns from first_column_ on; rows are room_
  // apart.
  int64_t first_row_ = 0, last_row_ = 0, first_column_ = 0, columns_ = 0, room_ = 0;
  alignas(64) Y staged_[kBytes / sizeof(Y)];
};

// Outputs that are written to y at once, with the same interface.
template <class Y>
class DirectOutputs {
 public:
  static constexpr bool kWait = false;
  static constexpr int64_t kMostRows = std::numeric_limits<int64_t>::max();

  DirectOutputs(const Outputs& outputs, Y* y, int64_t, int64_t) : outputs_(outputs), y_(y) {}

  void make_room(int64_t, int64_t, int64_t) const {}
  Y* columns(int64_t index, int64_t row) const {
    return y_ + row * outputs_.stride() + outputs_.column(index);
  }
  int64_t stride() const { return outputs_.stride(); }

 private:
  const Outputs& outputs_;
  Y* const y_;
};

}  // namespace quire
