// The panels of matmul.h with AVX512-VNNI, which multiplies rows as they are: uint8 times int8.
#pragma once

#include "byte_rows.h"
#include "vnni.h"

namespace blockrelay {

constexpr int kGroup = 14;    // rows whose sums fit into the registers: 28 sums, 2 weights, 1 broadcast
constexpr int kInPlace = 4;   // most rows for which arranging them costs more than it saves
constexpr bool kStreams = true;

// Multiplies the R rows of a group by one panel. On the way it prefetches the bytes at `ahead` into L2, `lines` (0 to
// 2) cache lines per step: with two groups per panel, the second finds its weights in cache and would leave memory
// idle.
template <int R, bool in_place>
void multiply_panel(const PackedWeights& w, const RowGroup& group, int64_t panel, const int8_t* ahead, int lines,
                    float* y) {
  const int64_t steps = w.steps(), first = panel * kPanel;
  const int64_t step = in_place ? 1 : R, stride = in_place ? group.stride : 1;
  const int8_t* weights = w.panels + panel * w.panel_bytes();
  const RowWord* u = static_cast<const RowWord*>(group.u);
  __m512i sum[R][2];
  const __m512i start0 = _mm512_loadu_si512(w.start + first), start1 = _mm512_loadu_si512(w.start + first + 16);
  each<R>([&](auto r) {
    sum[r][0] = start0;
    sum[r][1] = start1;
  });
  for (int64_t i = 0; i < steps; i++) {
    const __m512i q0 = _mm512_load_si512(weights), q1 = _mm512_load_si512(weights + 64);
    weights += kPanel * kDepth;
    if (lines > 0) {
      _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T1);
      if (lines > 1) _mm_prefetch(reinterpret_cast<const char*>(ahead + 64), _MM_HINT_T1);
      ahead += 64 * lines;
    }
    each<R>([&](auto r) {
      const __m512i bytes = _mm512_set1_epi32(int(u[r * stride]));
      sum[r][0] = dot_bytes(sum[r][0], bytes, q0);
      sum[r][1] = dot_bytes(sum[r][1], bytes, q1);
    });
    u += step;
  }
  const int width = int(w.columns - first < kPanel ? w.columns - first : kPanel);
  const __mmask16 mask0 = __mmask16(width >= 16 ? 0xFFFF : (1u << width) - 1);
  const __mmask16 mask1 = __mmask16(width >= 32 ? 0xFFFF : width > 16 ? (1u << (width - 16)) - 1 : 0);
  const __m512 scale0 = _mm512_maskz_loadu_ps(mask0, w.scale + first);
  const __m512 scale1 = _mm512_maskz_loadu_ps(mask1, w.scale + first + 16);
  float* to = y + group.first * w.columns + first;
  each<R>([&](auto r) {
    const __m512 y0 = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[r][0]), scale0);
    const __m512 y1 = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[r][1]), scale1);
    if (group.streamed) {
      _mm512_stream_ps(to + r * w.columns, y0);
      _mm512_stream_ps(to + r * w.columns + 16, y1);
    } else {
      _mm512_mask_storeu_ps(to + r * w.columns, mask0, y0);
      _mm512_mask_storeu_ps(to + r * w.columns + 16, mask1, y1);
    }
  });
}

}  // namespace blockrelay
