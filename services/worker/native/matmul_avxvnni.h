// The panels of matmul.h with AVX-VNNI: as with AVX512-VNNI, in half as many registers of half the width. Not one template
// for both: in the loops that both need, GCC 12 keeps the sums of AVX-512 in memory (0.4 of the speed).
#pragma once

#include "byte_rows.h"
#include "vnni.h"

namespace blockrelay {

constexpr int kGroup = 3;    // rows whose sums fit into the registers: 12 sums, 3 broadcasts, 1 weight
constexpr int kInPlace = 3;  // most rows for which arranging them costs more than it saves
constexpr bool kStreams = false;

// Multiplies the R rows of a group by one panel, and prefetches `lines` cache lines at `ahead` per step.
template <int R, bool in_place>
void multiply_panel(const PackedWeights& w, const RowGroup& group, int64_t panel, const int8_t* ahead, int lines,
                    float* y) {
  constexpr int lanes = 8, registers = kPanel / lanes;
  const int64_t steps = w.steps(), first = panel * kPanel;
  const int64_t step = in_place ? 1 : R, stride = in_place ? group.stride : 1;
  const int8_t* weights = w.panels + panel * w.panel_bytes();
  const RowWord* u = static_cast<const RowWord*>(group.u);
  __m256i sum[R][registers];
  each<R>([&](auto r) {
    each<registers>([&](auto j) {
      sum[r][j] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w.start + first + j * lanes));
    });
  });
  for (int64_t i = 0; i < steps; i++) {
    __m256i bytes[R];
    each<R>([&](auto r) { bytes[r] = _mm256_set1_epi32(int(u[r * stride])); });
    each<registers>([&](auto j) {
      const __m256i q = _mm256_load_si256(reinterpret_cast<const __m256i*>(weights + j * lanes * kDepth));
      each<R>([&](auto r) { sum[r][j] = dot_bytes(sum[r][j], bytes[r], q); });
    });
    weights += kPanel * kDepth;
    if (lines > 0) {
      _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T1);
      if (lines > 1) _mm_prefetch(reinterpret_cast<const char*>(ahead + 64), _MM_HINT_T1);
      ahead += 64 * lines;
    }
    u += step;
  }
  each<R>([&](auto r) {
    float* to = y + (group.first + r) * w.columns + first;
    each<registers>([&](auto j) {
      const int64_t left = w.columns - first - j * lanes;
      if (left <= 0) return;
      const int some = left < lanes ? int(left) : lanes;
      const Register scale = Register::load(w.scale + first + j * lanes, some);
      (Register{_mm256_cvtepi32_ps(sum[r][j])} * scale).store(to + j * lanes, some);
    });
  });
}

}  // namespace blockrelay
