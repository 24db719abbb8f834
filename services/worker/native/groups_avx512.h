// The panels of group_matmul.h with AVX-512.
#pragma once

#include "packed_groups.h"
#include "vnni.h"

namespace blockrelay {

constexpr int kRowsAtOnce = 6;  // rows fill the registers: 12 sums, 12 accumulators, 4 weights, 1 broadcast

// Adds the products of four bytes per lane: nibbles 0..15 times int8. Without VNNI a lane has two sums of 16 bits, enough
// for the 16 products of a group that each has; in_lanes() adds them.
inline __m512i dot_nibbles(__m512i sum, __m512i nibbles, __m512i a) {
#if defined(BLOCKRELAY_VNNI)
  return dot_bytes(sum, nibbles, a);
#else
  return _mm512_add_epi16(sum, _mm512_maddubs_epi16(nibbles, a));
#endif
}

inline __m512i in_lanes(__m512i sum) {
#if defined(BLOCKRELAY_VNNI)
  return sum;
#else
  return _mm512_madd_epi16(sum, _mm512_set1_epi16(1));
#endif
}

inline __m512i four_everywhere(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, sizeof four);
  return _mm512_set1_epi32(four);
}

template <int R>
void multiply_groups_panel(const GroupWeights& w, const SignedRows& rows, int64_t panel, float* y) {
  const uint8_t* weights = w.panels + panel * w.panel_bytes();
  const int8_t* a = rows.a;
  const RowFactors* factors = rows.factors;
  const __m512i low = _mm512_set1_epi8(15);
  __m512 acc[R][2];
  each<R>([&](auto r) { acc[r][0] = acc[r][1] = _mm512_setzero_ps(); });
  for (int64_t g = 0; g < w.groups(); g++) {
    __m512i sum[R][2];
    each<R>([&](auto r) { sum[r][0] = sum[r][1] = _mm512_setzero_si512(); });
    each<kBlocks>([&](auto block) {
      const __m512i both0 = _mm512_load_si512(weights + block * kBlockBytes);
      const __m512i both1 = _mm512_load_si512(weights + block * kBlockBytes + 64);
      const __m512i low0 = _mm512_and_si512(both0, low), low1 = _mm512_and_si512(both1, low);
      const __m512i high0 = _mm512_and_si512(_mm512_srli_epi16(both0, 4), low);
      const __m512i high1 = _mm512_and_si512(_mm512_srli_epi16(both1, 4), low);
      each<R>([&](auto r) {
        const __m512i first = four_everywhere(a + r * kGroupDepth + 8 * block);
        const __m512i second = four_everywhere(a + r * kGroupDepth + 8 * block + 4);
        sum[r][0] = dot_nibbles(sum[r][0], low0, first);
        sum[r][1] = dot_nibbles(sum[r][1], low1, first);
        sum[r][0] = dot_nibbles(sum[r][0], high0, second);
        sum[r][1] = dot_nibbles(sum[r][1], high1, second);
      });
    });
    const Half* gs = reinterpret_cast<const Half*>(weights + kNibbleBytes);
    const Half* gm = gs + kColumns;
    const __m512 gs0 = Register::load(gs).v, gs1 = Register::load(gs + 16).v;
    const __m512 gm0 = Register::load(gm).v, gm1 = Register::load(gm + 16).v;
    each<R>([&](auto r) {
      const __m512 scale = _mm512_set1_ps(factors[r].scale), total = _mm512_set1_ps(factors[r].sum);
      acc[r][0] = _mm512_fmadd_ps(total, gm0, acc[r][0]);
      acc[r][1] = _mm512_fmadd_ps(total, gm1, acc[r][1]);
      acc[r][0] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(in_lanes(sum[r][0])), _mm512_mul_ps(gs0, scale), acc[r][0]);
      acc[r][1] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(in_lanes(sum[r][1])), _mm512_mul_ps(gs1, scale), acc[r][1]);
    });
    weights += kGroupBytes;
    a += R * kGroupDepth;
    factors += R;
  }
  const int64_t column = panel * kColumns;
  const int left0 = lanes_left(column, w.columns), left1 = lanes_left(column + 16, w.columns);
  float* to = y + rows.first * w.columns + column;
  each<R>([&](auto r) {
    store_some(to + r * w.columns, Register{acc[r][0]}, left0);
    if (left1 > 0) store_some(to + r * w.columns + 16, Register{acc[r][1]}, left1);
  });
}

}  // namespace blockrelay
