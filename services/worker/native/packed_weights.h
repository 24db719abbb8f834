// Packed int8 weights: panels of 32 columns, [N/32][K/D][32 columns][D k] with zeros beyond N and K, so that a panel is
// one sequential stream: reading the weights limits decode. D is 4, the bytes of an int32 lane, and 8 on ARM, where an
// instruction takes so many.
#pragma once

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

// Packs q [K,N] into `panels` and `start`, as PackedWeights describes them.
inline void pack_weights(Pool& pool, const int8_t* q, int64_t depth, int64_t columns, int8_t* panels, int32_t* start) {
  const PackedWeights shape{panels, start, nullptr, depth, columns};
  pool.run(shape.panel_count(), 1, depth * columns, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; panel++) {
      const int64_t first = panel * kPanel;
      const int width = int(columns - first < kPanel ? columns - first : kPanel);
      int8_t* to = panels + panel * shape.panel_bytes();
      int32_t sums[kPanel] = {};
      std::memset(to, 0, size_t(shape.panel_bytes()));
      for (int64_t k = 0; k < depth; k++) {
        const int8_t* line = q + k * columns + first;
        int8_t* at = to + k / kDepth * kPanel * kDepth + k % kDepth;
        for (int n = 0; n < width; n++) {
          at[n * kDepth] = line[n];
          sums[n] += line[n];
        }
      }
      for (int n = 0; n < kPanel; n++) start[first + n] = -kZeroPoint * sums[n];
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
