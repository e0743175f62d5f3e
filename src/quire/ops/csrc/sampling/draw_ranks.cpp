// Draws tokens from rows of logits of which each rank has a part, token ids in the order of the
// ranks. The token is the one that quire_draw draws from the whole row.
//
// At temperature 0 it is the best of the largest of all parts. The noise of a token depends on no
// other token. So without filters, and under min-p, it is the best winner of all parts, once all
// ranks know the largest logit. The tokens that top-k leaves are among the best of each part: ranks
// exchange these and draw from a row in which all others are -inf. Other rows are gathered.
#include <atomic>
#include <cstring>
#include <new>
#include <vector>

#include "exchange/group.h"
#include "native/parallel.h"
#include "native/replay.h"
#include "sampling/draw_row.h"

namespace quire {
namespace {

constexpr int64_t kMostBest = 128;   // tokens of a part that ranks exchange
constexpr int64_t kWholeAtOnce = 8;  // rows to gather at a time, or more if one exchange holds them

enum class Kind { kGreedy, kOpen, kBest, kWhole };

struct Best {
  float logit;
  int32_t token;
};
// Message of a rank about its part of a row; `count` Best may follow.
struct Head {
  float largest;
  int32_t token, broken, count;
};
// Message of a rank about the winner of its part.
struct Winner {
  double score;
  int64_t token;
};

struct Parts {
  const Group& group;
  const float* logits;  // rows of `most` with a stride; `own` are tokens, from `first` on
  int64_t stride, first, own, most, total;
  const int64_t* rows;
  const Columns& columns;
  int32_t* token_ids;
  Team* team;

  Row<false> row(int64_t i) const {
    Row<false> row = row_of(columns, i, logits + rows[i] * stride, own, total);
    row.first_token = first;
    return row;
  }
  Kind kind(int64_t i) const {
    if (!(columns.temperature[i] > 0.0)) return Kind::kGreedy;
    const int64_t top_k = row(i).top_k;
    if (top_k > 0) return top_k <= kMostBest ? Kind::kBest : Kind::kWhole;
    return columns.top_p[i] < 1.0 || most % 4 != 0 ? Kind::kWhole : Kind::kOpen;
  }
};

// Calls f(i) for 0 <= i < count. Returns 0, or 2 without memory: no exception may leave a thread of
// the team.
template <class F>
int each_draw(int64_t count, Team* team, F&& f) {
  std::atomic<int> failed{0};
  parallel_for(count, 1, team, [&](int64_t i) {
    try {
      f(i);
    } catch (const std::bad_alloc&) {
      failed = 2;
    }
  });
  return failed.load();
}

// Writes the first `most` tokens in rank of a part, whose largest is known, and returns their
// number. Tokens so far below it that they never win may be missing.
int32_t best_of(Row<false> row, Best* best, int64_t most) {
  thread_local std::vector<int64_t> tokens;
  row.top_k = most < row.size ? most : 0;
  row.top_p = 1.0;
  const Last last = row.top_k > 0 ? last_of(row, tokens) : Last{};
  int32_t count = 0;
  each_logits(row, [&](int64_t first, vf logits, int n) {
    if (maximum(logits) < last.logit) return;
    float depths[kLanes];
    store(depths, depth_of(row, logits));
    for (int i = 0; i < n; ++i) {
      const int64_t token = first + i;
      const bool wins = static_cast<int>(depths[i]) < kBuckets - 1;
      if (!wins || count == most || !last.allows(row.logits[token], token)) continue;
      best[count++] = {row.logits[token], static_cast<int32_t>(row.first_token + token)};
    }
  });
  return count;
}

void describe(const Parts& parts, int64_t i, Kind kind, char* to) {
  Row<false> row = parts.row(i);
  const Largest largest = largest_of(row);
  Head head{largest.logit, 0, largest.broken, 0};
  if (largest.fault == 0 && kind == Kind::kGreedy) {
    head.token = static_cast<int32_t>(parts.first + first_equal(row, largest));
  } else if (largest.fault == 0 && kind == Kind::kBest) {
    row.largest = largest.logit;
    Best best[kMostBest];
    head.count = best_of(row, best, row.top_k);
    std::memcpy(to + sizeof head, best, head.count * sizeof(Best));
  }
  std::memcpy(to, &head, sizeof head);
}

// Verdict of all ranks on a row: the first of the largest, or a fault.
struct Judged {
  Head head;
  bool faulty;
};
template <class At>
Judged judge(const Parts& parts, const At& at) {
  Judged found{};
  found.head.largest = kNegativeInfinity;
  for (int rank = 0; rank < parts.group.size(); ++rank) {
    Head head;
    std::memcpy(&head, at(rank), sizeof head);
    found.faulty = found.faulty || head.broken != 0;
    if (head.largest > found.head.largest) found.head = head;
  }
  found.faulty = found.faulty || !(found.head.largest > kNegativeInfinity);
  return found;
}

template <class At>
int32_t draw_from_best(const Parts& parts, int64_t i, const At& at) {
  thread_local std::vector<float> row;  // all -inf between calls
  row.resize(std::max<size_t>(row.size(), parts.total), kNegativeInfinity);
  const auto each = [&](auto&& f) {
    for (int rank = 0; rank < parts.group.size(); ++rank) {
      Head head;
      std::memcpy(&head, at(rank), sizeof head);
      for (int32_t k = 0; k < head.count; ++k) {
        Best best;
        std::memcpy(&best, at(rank) + sizeof head + k * sizeof best, sizeof best);
        f(best);
      }
    }
  };
  each([&](const Best& best) { row[best.token] = best.logit; });
  const int32_t token = draw_one<false>(row.data(), nullptr, parts.total, parts.columns, i);
  each([&](const Best& best) { row[best.token] = kNegativeInfinity; });
  return token;
}

// Draws all rows but those of kWhole. Returns 0 or a code of the group.
int draw_parts(const Parts& parts, const std::vector<Kind>& kinds) {
  const int64_t count = static_cast<int64_t>(kinds.size());
  const int size = parts.group.size();
  std::vector<int64_t> starts(count + 1, 0), winners;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t best = kinds[i] == Kind::kBest ? parts.row(i).top_k : 0;
    const int64_t bytes = sizeof(Head) + best * sizeof(Best);
    starts[i + 1] = starts[i] + (kinds[i] == Kind::kWhole ? 0 : bytes);
    if (kinds[i] == Kind::kOpen) winners.push_back(i);
  }
  const int64_t bytes = starts[count];
  if (bytes == 0) return 0;
  std::vector<char> own(bytes), all(size * bytes);
  const auto at = [&](int64_t i) {
    return [&all, bytes, start = starts[i]](int rank) { return &all[rank * bytes + start]; };
  };
  int code = each_draw(count, parts.team, [&](int64_t i) {
    if (kinds[i] != Kind::kWhole) describe(parts, i, kinds[i], &own[starts[i]]);
  });
  if (code == 0) code = gather(parts.group, own.data(), bytes, all.data());
  if (code != 0) return code;

  const int64_t open = static_cast<int64_t>(winners.size());
  std::vector<Winner> won(open), all_won(size * open);
  std::vector<int64_t> places(count, 0);
  for (int64_t w = 0; w < open; ++w) places[winners[w]] = w;
  code = each_draw(count, parts.team, [&](int64_t i) {
    if (kinds[i] == Kind::kWhole) return;
    const Judged judged = judge(parts, at(i));
    parts.token_ids[i] = judged.faulty ? kBroken : judged.head.token;
    if (kinds[i] == Kind::kOpen) {
      Row<false> row = parts.row(i);
      row.largest = judged.head.largest;
      const Scored best =
          judged.faulty ? Scored{} : winner(row, parts.columns.stream(i), Last{});
      won[places[i]] = {best.score, parts.first + best.token};
    } else if (kinds[i] == Kind::kBest && !judged.faulty) {
      parts.token_ids[i] = draw_from_best(parts, i, at(i));
    }
  });
  if (code == 0 && open > 0) {
    code = gather(parts.group, won.data(), open * sizeof(Winner), all_won.data());
  }
  if (code != 0) return code;
  for (int64_t w = 0; w < open; ++w) {
    Winner best = all_won[w];
    for (int rank = 1; rank < size; ++rank) {
      const Winner& other = all_won[rank * open + w];
      if (other.score > best.score) best = other;
    }
    int32_t& token = parts.token_ids[winners[w]];
    if (token != kBroken) token = static_cast<int32_t>(best.token);
  }
  return 0;
}

// Draws the rows of kWhole, which are gathered together. Returns 0 or a code of the group.
int draw_whole(const Parts& parts, const std::vector<Kind>& kinds) {
  std::vector<int64_t> whole;
  for (size_t i = 0; i < kinds.size(); ++i) {
    if (kinds[i] == Kind::kWhole) whole.push_back(i);
  }
  const int64_t count = static_cast<int64_t>(whole.size());
  const int64_t bytes = parts.most * sizeof(float), width = parts.group.size() * parts.most;
  const int64_t at_once = std::max(kWholeAtOnce, parts.group.slot_bytes() / bytes);
  std::vector<float> gathered(std::min(count, at_once) * width);
  for (int64_t first = 0; first < count; first += at_once) {
    const int64_t n = std::min(at_once, count - first);
    int code = gather_rows(parts.group, n, bytes, gathered.data(), [&](int64_t k) {
      const float* const own = parts.logits + parts.rows[whole[first + k]] * parts.stride;
      return reinterpret_cast<const char*>(own);
    });
    if (code == 0) {
      code = each_draw(n, parts.team, [&](int64_t k) {
        const int64_t i = whole[first + k];
        const float* const row = gathered.data() + k * width;
        parts.token_ids[i] = draw_one<false>(row, nullptr, parts.total, parts.columns, i);
      });
    }
    if (code != 0) return code;
  }
  return 0;
}

}  // namespace
}  // namespace quire

// Draws tokens from rows that ranks share. memory: the group's. logits: rows of `most` elements
// with a stride, this rank's part of the `total` tokens of a row: `own` of them, from `first` on.
// Ranks have `most` tokens each, the last one fewer. Other arguments and codes: see quire_draw,
// and the codes of exchange/collectives.cpp.
QUIRE_API int quire_draw_ranks(void* memory, int32_t rank, const float* logits, int64_t stride,
                               int64_t first, int64_t own, int64_t most, int64_t total,
                               const int64_t* rows, int64_t num_draws, const double* temperature,
                               const int64_t* top_k, const double* top_p, const double* min_p,
                               const uint64_t* seeds, const int64_t* sample_indices,
                               const int64_t* positions, int32_t* token_ids, quire::Team* team) {
  using namespace quire;
  const Group group(memory, rank);
  const Columns columns{temperature, top_p, min_p, top_k, seeds, sample_indices, positions};
  const Parts parts{group, logits,  stride,    first, own, most, total,
                    rows,  columns, token_ids, team};
  try {
    std::vector<Kind> kinds(num_draws);
    for (int64_t i = 0; i < num_draws; ++i) kinds[i] = parts.kind(i);
    const int code = draw_parts(parts, kinds);
    return code != 0 ? code : draw_whole(parts, kinds);
  } catch (const std::bad_alloc&) {
    return 2;
  }
}
QUIRE_REPLAYABLE(quire_draw_ranks)
