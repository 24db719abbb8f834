// Built with the flags setup.py names for avx512amx; called only where blockrelay_cpu_features() has what it needs.
#include "kernels.h"

// Returns 1 if tiles compute the bits of the other kernels on this CPU (kernels/libraries.py asks before it takes them).
BLOCKRELAY_EXPORT int32_t blockrelay_tiles_agree() {
  StandardRounding rounding;
  try {
    return tiles_agree();
  } catch (const std::exception&) {
    return 0;
  }
}

// Makes the file an extension module to the packaging tools; it is opened with ctypes and never imported.
BLOCKRELAY_EXPORT void* PyInit__avx512amx(void) { return nullptr; }
