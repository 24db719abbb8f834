// The AMX tile instructions that group_tiles.h uses, and in builds with BLOCKRELAY_EMULATED_TILES their definition in C++,
// for tests on CPUs without AMX.
//
// A tile is a register of up to 16 rows of up to 64 bytes; a thread has eight. Shapes are set by configure() and last
// until release(), which also makes a thread's switch cheap again.
#pragma once

#include <cstdint>
#include <cstring>

namespace blockrelay::tile {

// The operand of LDTILECFG: bytes per row and rows of each tile; palette 1 is the only one there is.
struct alignas(64) Shapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(Shapes) == 64, "LDTILECFG reads 64 bytes");

#if defined(BLOCKRELAY_EMULATED_TILES)

struct Registers {
  Shapes shapes;
  uint8_t data[8][16][64];
};
inline thread_local Registers registers;

inline void configure(const Shapes& shapes) {
  registers.shapes = shapes;
  std::memset(registers.data, 0, sizeof registers.data);
}
inline void release() { registers.shapes = Shapes{}; }
template <int T>
void zero() {
  std::memset(registers.data[T], 0, sizeof registers.data[T]);
}
template <int T>
void load(const void* from, int64_t stride) {
  zero<T>();
  for (int r = 0; r < registers.shapes.rows[T]; r++)
    std::memcpy(registers.data[T][r], static_cast<const uint8_t*>(from) + r * stride, registers.shapes.bytes[T]);
}
template <int T>
void store(void* to, int64_t stride) {
  for (int r = 0; r < registers.shapes.rows[T]; r++)
    std::memcpy(static_cast<uint8_t*>(to) + r * stride, registers.data[T][r], registers.shapes.bytes[T]);
}
template <int Sums, int A, int B>
void add_products() {
  const Shapes& shapes = registers.shapes;
  for (int m = 0; m < shapes.rows[Sums]; m++)
    for (int n = 0; n < shapes.bytes[Sums] / 4; n++) {
      int32_t sum;
      std::memcpy(&sum, &registers.data[Sums][m][n * 4], 4);
      for (int k = 0; k < shapes.bytes[A] / 4; k++)
        for (int j = 0; j < 4; j++)
          sum += int8_t(registers.data[A][m][k * 4 + j]) * int8_t(registers.data[B][k][n * 4 + j]);
      std::memcpy(&registers.data[Sums][m][n * 4], &sum, 4);
    }
}

#else

// Written as assembly, since the intrinsics take a tile's number as a literal only.
inline void configure(const Shapes& shapes) { __asm__ volatile("ldtilecfg %0" ::"m"(shapes)); }
inline void release() { __asm__ volatile("tilerelease"); }
template <int T>
inline void zero() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
inline void load(const void* from, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T>
inline void store(void* to, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}
// Adds to Sums[m][n] the products of A[m][4k + j] and B[k][4n + j], all of them int8, for all k and j.
template <int Sums, int A, int B>
inline void add_products() {
  __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(A), "i"(B));
}

#endif

}  // namespace blockrelay::tile
