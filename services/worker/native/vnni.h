// The one instruction of AVX512-VNNI and AVX-VNNI that matmuls need, or what stands in for it on an AVX2 CPU in tests.
//
// BLOCKRELAY_VNNI is defined where dot_bytes() is: adding to each int32 lane the four products of its bytes, unsigned ones
// of the first with signed ones of the second.
#pragma once

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(BLOCKRELAY_VNNI_STAND_IN)
#define BLOCKRELAY_VNNI 1
#include <immintrin.h>

namespace blockrelay {

#if defined(__AVX512VNNI__)
// With the intrinsic, or with a reference to the sum, GCC 12 keeps all sums in memory (half the speed).
inline __m512i dot_bytes(__m512i sum, __m512i u, __m512i q) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(u), "v"(q));
  return sum;
}
#elif defined(__AVXVNNI__)
inline __m256i dot_bytes(__m256i sum, __m256i u, __m256i q) {
#if defined(BLOCKRELAY_VNNI_BY_AVX512)  // the same instruction in the encoding of AVX512-VNNI, for tests
  __asm__("%{evex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(u), "x"(q));
#else
  __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(u), "x"(q));
#endif
  return sum;
}
#else
inline __m256i dot_bytes(__m256i sum, __m256i u, __m256i q) {
  const auto pairs = [&](__m128i some, __m128i others) {
    return _mm256_madd_epi16(_mm256_cvtepu8_epi16(some), _mm256_cvtepi8_epi16(others));
  };
  const __m256i low = pairs(_mm256_castsi256_si128(u), _mm256_castsi256_si128(q));
  const __m256i high = pairs(_mm256_extracti128_si256(u, 1), _mm256_extracti128_si256(q, 1));
  return _mm256_add_epi32(sum, _mm256_permute4x64_epi64(_mm256_hadd_epi32(low, high), 0xD8));
}
#endif

}  // namespace blockrelay
#endif
