// Built for the lowest CPU of the architecture; also the one place that asks which CPU this is.
#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

// 3: AVX-512 with VNNI, without AMX (whose products ONNX Runtime has, and they are faster); 2: AVX-512 F, BW, VL and DQ; 1: AVX2, FMA and F16C; 0: neither. The operating system's support is included.
BLOCKRELAY_EXPORT int32_t blockrelay_cpu_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (!avx2) return 0;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (!avx512) return 1;
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool amx = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & (1u << 25));
  return __builtin_cpu_supports("avx512vnni") && !amx ? 3 : 2;
#else
  return 0;
#endif
}

// Makes the file an extension module to the packaging tools; it is opened with ctypes and never imported.
BLOCKRELAY_EXPORT void* PyInit__baseline(void) { return nullptr; }
