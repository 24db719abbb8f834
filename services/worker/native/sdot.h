// The instructions of ARM that multiply bytes: SDOT and SMMLA.
//
// These statements stay in the order in which they are written: with intrinsics, GCC loads all weights of a step first, and
// has no registers left for the sums.
#pragma once

#include <arm_neon.h>

#if defined(__AARCH64EB__)
#error "the order of bytes in registers is that of little-endian ARM"
#endif

#if defined(__ARM_FEATURE_DOTPROD)

namespace blockrelay {

// Returns the 16 bytes at p + offset and those behind them.
template <int offset>
inline int8x16x2_t load_two(const int8_t* p) {
  int8x16_t first, second;
  __asm__ volatile("ldp %q0, %q1, [%2, %3]"
                   : "=w"(first), "=w"(second)
                   : "r"(p), "i"(offset), "m"(*reinterpret_cast<const char(*)[offset + 32]>(p)));
  return {{first, second}};
}

// Adds to each int32 lane the products of its four bytes.
inline int32x4_t dot(int32x4_t sum, int8x16_t a, int8x16_t b) {
  __asm__ volatile("sdot %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(a), "w"(b));
  return sum;
}

// Adds to each int32 lane the products of its four bytes of a with the four of lane `lane` of b.
template <int lane>
inline int32x4_t dot_lane(int32x4_t sum, int8x16_t a, int8x16_t b) {
  __asm__ volatile("sdot %0.4s, %1.16b, %2.4b[%3]" : "+w"(sum) : "w"(a), "w"(b), "i"(lane));
  return sum;
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
// Adds the products of two rows of eight bytes with two columns of eight: row 0 with both, then row 1.
inline int32x4_t dot_pairs(int32x4_t sum, int8x16_t rows, int8x16_t columns) {
  __asm__ volatile("smmla %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(rows), "w"(columns));
  return sum;
}
#endif

}  // namespace blockrelay
#endif
