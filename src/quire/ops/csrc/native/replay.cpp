// Replays the kernel calls of a captured step.
#include "native/replay.h"

#include "native/simd.h"

namespace quire {

struct Call {
  int (*kernel)(const uint64_t*);  // exported by QUIRE_REPLAYABLE
  const uint64_t* arguments;       // including the team
};

}  // namespace quire

// Makes the calls in order. Stops at the first that fails, returns its code and sets `failed` to
// its index.
QUIRE_API int quire_replay(const quire::Call* calls, int64_t count, int64_t* failed) {
  for (int64_t i = 0; i < count; ++i) {
    const int code = calls[i].kernel(calls[i].arguments);
    if (code != 0) {
      *failed = i;
      return code;
    }
  }
  return 0;
}
