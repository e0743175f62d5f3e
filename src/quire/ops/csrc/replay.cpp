// Makes the kernel calls of a captured step again.
#include "replay.h"

#include "simd.h"
#include "team.h"

namespace quire {

struct Call {
  int (*kernel)(const uint64_t*);  // what QUIRE_REPLAYABLE exports
  const uint64_t* arguments;       // the team included
  Team* team;                      // may be null
  const uint8_t* next_start;       // what the next call that streams memory reads
  int64_t next_bytes;
};

}  // namespace quire

// In order, up to the first that fails: returns its code and sets `failed` to its index.
QUIRE_API int quire_replay(const quire::Call* calls, int64_t count, int64_t* failed) {
  for (int64_t i = 0; i < count; ++i) {
    const quire::Call& call = calls[i];
    if (call.team != nullptr) call.team->expect(call.next_start, call.next_bytes);
    const int code = call.kernel(call.arguments);
    if (code != 0) {
      *failed = i;
      return code;
    }
  }
  return 0;
}
