// The panels of group_matmul.h where no row shares the unpacking of weights with another: AVX2, and plain code.
#pragma once

#include "packed_groups.h"
#include "vnni.h"

namespace blockrelay {

constexpr int kRowsAtOnce = 1;

#if defined(__AVX2__)
// As with AVX-512, on registers of half the width.
inline __m256i dot_nibbles(__m256i sum, __m256i nibbles, __m256i a) {
#if defined(BLOCKRELAY_VNNI)
  return dot_bytes(sum, nibbles, a);
#else
  return _mm256_add_epi16(sum, _mm256_maddubs_epi16(nibbles, a));
#endif
}

inline __m256i in_lanes(__m256i sum) {
#if defined(BLOCKRELAY_VNNI)
  return sum;
#else
  return _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
#endif
}
#endif

// Writes the sums over a group of the products of its nibbles with the 32 bytes of a row to sums [32] as floats.
inline void sum_group(const uint8_t* weights, const int8_t* a, float* sums) {
#if defined(__AVX2__)
  const __m256i low = _mm256_set1_epi8(15);
  __m256i bytes[2 * kBlocks];
  for (int i = 0; i < 2 * kBlocks; i++) {
    int32_t four;
    std::memcpy(&four, a + i * 4, sizeof four);
    bytes[i] = _mm256_set1_epi32(four);
  }
  for (int n = 0; n < kColumns; n += 8) {
    __m256i sum = _mm256_setzero_si256();
    for (int block = 0; block < kBlocks; block++) {
      const __m256i both =
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights + block * kBlockBytes + n * 4));
      const __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
      sum = dot_nibbles(sum, _mm256_and_si256(both, low), bytes[2 * block]);
      sum = dot_nibbles(sum, high, bytes[2 * block + 1]);
    }
    _mm256_storeu_ps(sums + n, _mm256_cvtepi32_ps(in_lanes(sum)));
  }
#else
  int32_t whole[kColumns] = {};
  for (int block = 0; block < kBlocks; block++) {
    const int8_t *first = a + 8 * block, *second = first + 4;
    const uint8_t* bytes = weights + block * kBlockBytes;
    for (int n = 0; n < kColumns; n++)
      for (int j = 0; j < 4; j++) whole[n] += (bytes[n * 4 + j] & 15) * first[j] + (bytes[n * 4 + j] >> 4) * second[j];
  }
  for (int n = 0; n < kColumns; n++) sums[n] = float(whole[n]);
#endif
}

template <int R>
void multiply_groups_panel(const GroupWeights& w, const SignedRows& rows, int64_t panel, float* y) {
  static_assert(R == 1, "one row at a time");
  const int64_t column = panel * kColumns;
  const uint8_t* weights = w.panels + panel * w.panel_bytes();
  V16 acc[2] = {V16::broadcast(0.0f), V16::broadcast(0.0f)};
  for (int64_t g = 0; g < w.groups(); g++, weights += kGroupBytes) {
    float sums[kColumns];
    sum_group(weights, rows.a + g * kGroupDepth, sums);
    const RowFactors& factors = rows.factors[g];
    const Half* gs = reinterpret_cast<const Half*>(weights + kNibbleBytes);
    for (int h = 0; h < 2; h++) {
      acc[h] = fma(V16::broadcast(factors.sum), V16::load(gs + kColumns + h * 16), acc[h]);
      const V16 scale = V16::load(gs + h * 16) * V16::broadcast(factors.scale);
      acc[h] = fma(V16::load(sums + h * 16), scale, acc[h]);
    }
  }
  for (int h = 0; h < 2; h++) {
    const int left = lanes_left(column + h * 16, w.columns);
    if (left > 0) store_some(y + rows.first * w.columns + column + h * 16, acc[h], left);
  }
}

}  // namespace blockrelay
