// The kernels for the lowest CPU of the architecture, and the function that tells the features of the CPU.
#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

// Features of this CPU and its operating system, as bits: 1 AVX2, FMA and F16C; 2 AVX-512 F, BW, VL and DQ;
// 4 AVX512-VNNI; 8 AMX tiles of int8; 16 AVX-VNNI; 32 SDOT and 64 SMMLA of ARM. kernels/libraries.py chooses the variant
// by them.
BLOCKRELAY_EXPORT uint32_t blockrelay_cpu_features() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  uint32_t found = 0;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) found |= 1;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    found |= 2;
  if (__builtin_cpu_supports("avx512vnni")) found |= 4;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & (1u << 25))) found |= 8;
  if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 4))) found |= 16;
  return found;
#elif defined(__aarch64__) && defined(__linux__)
  uint32_t found = 0;  // bits of HWCAP_ASIMDDP and HWCAP2_I8MM, which headers of older systems lack
  if (getauxval(AT_HWCAP) & (1u << 20)) found |= 32;
  if (getauxval(AT_HWCAP2) & (1u << 13)) found |= 64;
  return found;
#else
  return 0;
#endif
}

// Makes the file an extension module to the packaging tools; it is opened with ctypes and never imported.
BLOCKRELAY_EXPORT void* PyInit__baseline(void) { return nullptr; }
