// Built with the flags setup.py names for amx; called only where blockrelay_cpu_features() has what it needs.
#include "kernels.h"

// Multiplies one tile by another. Returns whether the result is right; ends the process with SIGILL where the system only
// claims to have tiles. kernels/libraries.py calls it in a process of its own.
BLOCKRELAY_EXPORT int32_t blockrelay_try_tiles() {
  uint8_t u[kAmxRows][kAmxBytes];
  int8_t q[kAmxRows][kAmxBytes];
  int32_t sums[kAmxRows][16];
  for (int i = 0; i < kAmxRows; i++)
    for (int j = 0; j < kAmxBytes; j++) u[i][j] = uint8_t(37 * i + 11 * j), q[i][j] = int8_t(53 * i - 7 * j);
  tiles::configure(shapes_for(kAmxRows, 0));
  tiles::zero<0>();
  tiles::load<4>(u, kAmxBytes);
  tiles::load<6>(q, kAmxBytes);
  tiles::dot_bytes<0, 4, 6>();
  tiles::store<0>(sums, kAmxBytes);
  tiles::release();
  for (int m = 0; m < kAmxRows; m++)
    for (int n = 0; n < 16; n++) {
      int32_t sum = 0;
      for (int k = 0; k < kAmxBytes; k++) sum += int32_t(u[m][k]) * q[k / 4][4 * n + k % 4];
      if (sums[m][n] != sum) return 0;
    }
  return 1;
}

// Makes the file an extension module to the packaging tools; it is opened with ctypes and never imported.
BLOCKRELAY_EXPORT void* PyInit__amx(void) { return nullptr; }
