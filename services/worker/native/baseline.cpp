// The kernels for the lowest CPU of the architecture, and the function that tells the features of the CPU.
#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#if defined(__x86_64__)
// Returns whether this process may use tiles: the CPU has them, the system keeps them when it changes threads (XCR0), and
// permits them when asked.
static bool tiles_permitted() {
#if defined(__linux__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kTiles = 3u << 24, kSavedStates = 1u << 27;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kTiles) != kTiles) return false;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & kSavedStates)) return false;
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr unsigned kTileStates = 3u << 17;
  constexpr long kAskPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM; older headers lack the name
  return (low & kTileStates) == kTileStates && syscall(SYS_arch_prctl, kAskPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

// Features of this CPU and its operating system, as bits: 1 AVX2, FMA and F16C; 2 AVX-512 F, BW, VL and DQ;
// 4 AVX512-VNNI; 8 AMX tiles of int8, which this process may use now; 16 AVX-VNNI; 32 SDOT and 64 SMMLA of ARM.
// kernels/libraries.py chooses the variant by them.
BLOCKRELAY_EXPORT uint32_t blockrelay_cpu_features() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  uint32_t found = 0;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) found |= 1;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    found |= 2;
  if (__builtin_cpu_supports("avx512vnni")) found |= 4;
  if (tiles_permitted()) found |= 8;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) && a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 4)))
    found |= 16;
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
