// A team of threads, created and destroyed by the caller of the kernels.
#include "native/team.h"

#include <new>
#include <system_error>

#include "native/simd.h"

// Returns null when the system gives no more threads.
QUIRE_API void* quire_team_create(int32_t size, int32_t spin_microseconds) {
  try {
    return new quire::Team(size, std::chrono::microseconds(spin_microseconds));
  } catch (const std::system_error&) {
    return nullptr;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

QUIRE_API void quire_team_destroy(void* team) {
  auto* ours = static_cast<quire::Team*>(team);
  if (ours != nullptr && ours->owned()) delete ours;
}
