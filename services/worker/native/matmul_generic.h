// The panels of matmul.h in plain code, for CPUs without one of their own; compilers vectorise the inner loop.
#pragma once

#include "byte_rows.h"

namespace blockrelay {

constexpr int kGroup = 4;    // rows that share the weights in the nearest cache
constexpr int kInPlace = 0;  // rows are always arranged
constexpr bool kStreams = false;

template <int R, bool in_place>
void multiply_panel(const PackedWeights& w, const RowGroup& group, int64_t panel, const int8_t*, int, float* y) {
  const int64_t steps = w.steps(), first = panel * kPanel;
  const int width = int(w.columns - first < kPanel ? w.columns - first : kPanel);
  for (int r = 0; r < R; r++) {
    const int8_t* q = w.panels + panel * w.panel_bytes();
    const RowWord* u = static_cast<const RowWord*>(group.u) + r;
    int32_t sum[kPanel];
    std::memcpy(sum, w.start + first, sizeof sum);
    for (int64_t i = 0; i < steps; i++, u += R, q += kPanel * kDepth) {
      uint8_t four[kDepth];
      std::memcpy(four, u, sizeof four);
      for (int n = 0; n < kPanel; n++) {
        const int8_t* some = q + n * kDepth;
        sum[n] += four[0] * some[0] + four[1] * some[1] + four[2] * some[2] + four[3] * some[3];
      }
    }
    for (int n = 0; n < width; n++) y[(group.first + r) * w.columns + first + n] = float(sum[n]) * w.scale[first + n];
  }
}

}  // namespace blockrelay
