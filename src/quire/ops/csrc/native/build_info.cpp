// What this library was built from; the loader refuses one whose sources have changed since.
#include "native/simd.h"

QUIRE_API const char* quire_build_hash() { return QUIRE_BUILD_HASH; }
