// Packed int8 weights: panels of 32 columns, [N/32][K/D][32 columns][D k] with zeros beyond N and K, so that a panel is
// one sequential stream: reading the weights limits decode. D is 4, the bytes of an int32 lane, and 8 on ARM, where an
// instruction takes so many.
#pragma once

#include <algorithm>

#include "lanes.h"
#include "pool.h"

namespace blockrelay {

constexpr int kPanel = 32;  // columns of a panel
#if defined(__aarch64__)
constexpr int kDepth = 8;  // k of a step
#else
constexpr int kDepth = 4;
#endif
constexpr int kZeroPoint = 128;

struct PackedWeights {
  const int8_t* panels;  // 64-byte aligned
  const int32_t* start;  // [N/32 * 32]: start of the sum of u * q, -128 times the column's sum of q
  const float* scale;    // [N]
  int64_t depth, columns;

  int64_t steps() const { return (depth + kDepth - 1) / kDepth; }
  int64_t panel_count() const { return (columns + kPanel - 1) / kPanel; }
  int64_t panel_bytes() const { return steps() * kPanel * kDepth; }
};

constexpr int kPanelsAtOnce = 8;  // packed together: a thread reads 256 bytes of each line, whole cache lines of a page

// Packs `kDepth` lines of `width` columns into a step of a panel, and adds them to `sums`. Compilers vectorise the loops,
// whose lengths are constants.
inline void pack_step(const int8_t* const* line, int width, int8_t* to, int32_t* __restrict sums) {
  uint8_t from[kDepth][kPanel] = {};
  for (int d = 0; d < kDepth; d++) std::memcpy(from[d], line[d], width == kPanel ? size_t(kPanel) : size_t(width));
  for (int half = 0; half < kDepth; half += 4) {
    const uint8_t(*l)[kPanel] = from + half;
    uint32_t words[kPanel];
    for (int n = 0; n < kPanel; n++) {
      words[n] = uint32_t(l[0][n]) | uint32_t(l[1][n]) << 8 | uint32_t(l[2][n]) << 16 | uint32_t(l[3][n]) << 24;
      sums[n] += int8_t(l[0][n]) + int8_t(l[1][n]) + int8_t(l[2][n]) + int8_t(l[3][n]);
    }
    for (int n = 0; n < kPanel; n++) std::memcpy(to + n * kDepth + half, words + n, 4);
  }
}

// Packs q [K,N] into `panels`, which are zeros, and `start`, as PackedWeights describes them.
inline void pack_weights(Pool& pool, const int8_t* q, int64_t depth, int64_t columns, int8_t* panels, int32_t* start) {
  static constexpr int8_t kZeros[kPanel] = {};
  const PackedWeights shape{panels, start, nullptr, depth, columns};
  pool.run(shape.panel_count(), kPanelsAtOnce, depth * columns, [&](int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end; first += kPanelsAtOnce) {
      const int64_t last = std::min<int64_t>(end, first + kPanelsAtOnce);
      int32_t sums[kPanelsAtOnce][kPanel] = {};
      for (int64_t k = 0; k < depth; k += kDepth)
        for (int64_t panel = first; panel < last; panel++) {
          const int8_t* line[kDepth];
          for (int d = 0; d < kDepth; d++) line[d] = k + d < depth ? q + (k + d) * columns + panel * kPanel : kZeros;
          const int width = int(std::min<int64_t>(kPanel, columns - panel * kPanel));
          pack_step(line, width, panels + panel * shape.panel_bytes() + k * kPanel, sums[panel - first]);
        }
      for (int64_t panel = first; panel < last; panel++)
        for (int n = 0; n < kPanel; n++) start[panel * kPanel + n] = -kZeroPoint * sums[panel - first][n];
    }
    return true;
  });
}

struct RowGroup {
  int64_t first;  // first row
  int rows;
  const void* u;   // RowWords; arranged: [K/D][rows]; in place: row r at u + r * stride
  int64_t stride;  // 0 unless in place
  bool streamed;   // y bypasses the caches, which would read each of its lines before it is overwritten
};

// Multiplies the rows of a group by a panel into y.
using MultiplyPanel = void (*)(const PackedWeights&, const RowGroup&, int64_t panel, const int8_t* ahead, int lines,
                               float* y);

}  // namespace blockrelay
