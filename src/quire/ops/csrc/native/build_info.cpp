// Hash of the sources that this library was built from. The loader refuses a library whose sources
// have changed since.
#include "native/simd.h"

QUIRE_API const char* quire_build_hash() { return QUIRE_BUILD_HASH; }
