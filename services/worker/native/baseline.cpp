// Built for the lowest CPU of the architecture; also the one place that asks which CPU this is.
#include "kernels.h"

// 2: AVX-512 F, BW, VL and DQ; 1: AVX2, FMA and F16C; 0: neither. The operating system's support is included.
BLOCKRELAY_EXPORT int32_t blockrelay_cpu_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (!avx2) return 0;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return avx512 ? 2 : 1;
#else
  return 0;
#endif
}

// Makes the file an extension module to the packaging tools; it is opened with ctypes and never imported.
BLOCKRELAY_EXPORT void* PyInit__baseline(void) { return nullptr; }
