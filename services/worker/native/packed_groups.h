// Packed int4 weights of groups of 32 k: panels of 32 columns. A group has four blocks of 8 k, each 2 x 16 columns x 4
// bytes (low nibble k = j, high nibble k = 4 + j), then the 32 columns' gs, then their gm: 640 bytes, in order of reading.
#pragma once

#include <algorithm>

#include "arithmetic.h"
#include "pool.h"

namespace blockrelay {

constexpr int kColumns = 32;                // columns of a panel
constexpr int kBlocks = 4;                  // blocks of 8 k per group
constexpr int kBlockBytes = kColumns * 4;
constexpr int kNibbleBytes = kBlocks * kBlockBytes;
constexpr int kGroupBytes = kNibbleBytes + 2 * kColumns * int(sizeof(Half));

struct GroupWeights {
  const uint8_t* panels;  // 64-byte aligned
  int64_t depth, columns;

  int64_t groups() const { return depth / kGroupDepth; }
  int64_t panel_count() const { return (columns + kColumns - 1) / kColumns; }
  int64_t panel_bytes() const { return groups() * kGroupBytes; }
};

constexpr int kGroupPanelsAtOnce = 8;  // packed together, as int8 weights are (packed_weights.h)

// Packs 4 lines of `width` columns, 8 k, into a block of a panel. Compilers vectorise it for whole panels.
inline void pack_block(const uint8_t* const* line, int width, uint8_t* __restrict to) {
  uint8_t from[4][kColumns] = {};
  if (width == kColumns)
    for (int i = 0; i < 4; i++) std::memcpy(from[i], line[i], kColumns);
  else
    for (int i = 0; i < 4; i++) std::memcpy(from[i], line[i], size_t(width));
  for (int n = 0; n < kColumns; n++) {
    to[4 * n] = uint8_t((from[0][n] & 15) | (from[2][n] << 4));
    to[4 * n + 1] = uint8_t((from[0][n] >> 4) | (from[2][n] & 0xF0));
    to[4 * n + 2] = uint8_t((from[1][n] & 15) | (from[3][n] << 4));
    to[4 * n + 3] = uint8_t((from[1][n] >> 4) | (from[3][n] & 0xF0));
  }
}

// Packs q4 [K/2,N] (low nibble row 2i, high nibble row 2i+1), gs and gm [K/32,N] into `panels`, which are zeros. Columns
// beyond N get 0.
inline void pack_groups(Pool& pool, const uint8_t* q4, const Half* gs, const Half* gm, int64_t depth, int64_t columns,
                        uint8_t* panels) {
  const GroupWeights shape{panels, depth, columns};
  pool.run(shape.panel_count(), kGroupPanelsAtOnce, depth * columns, [&](int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end; first += kGroupPanelsAtOnce) {
      const int64_t last = std::min<int64_t>(end, first + kGroupPanelsAtOnce);
      for (int64_t g = 0; g < shape.groups(); g++)
        for (int64_t panel = first; panel < last; panel++) {
          const int64_t column = panel * kColumns;
          const int width = int(std::min<int64_t>(kColumns, columns - column));
          uint8_t* to = panels + panel * shape.panel_bytes() + g * kGroupBytes;
          for (int block = 0; block < kBlocks; block++) {
            const uint8_t* line[4];
            for (int i = 0; i < 4; i++) line[i] = q4 + ((g * kBlocks + block) * 4 + i) * columns + column;
            pack_block(line, width, to + block * kBlockBytes);
          }
          const size_t bytes = size_t(width) * sizeof(Half);
          std::memcpy(to + kNibbleBytes, gs + g * columns + column, bytes);
          std::memcpy(to + kNibbleBytes + kColumns * sizeof(Half), gm + g * columns + column, bytes);
        }
    }
    return true;
  });
}

// What a group of one row is multiplied by: its scale for gs, and its sum times its scale for gm.
struct RowFactors {
  float scale, sum;
};

// Rows of one call side by side: `a` is u - 128 as [K/32][rows][32], `factors` is [K/32][rows].
struct SignedRows {
  int64_t first;
  int rows;
  int8_t* a;
  RowFactors* factors;
};

// Fills `to` from u [R,K] and its scales [R,K/32].
inline void arrange_signed(const uint8_t* u, const float* scale, int64_t depth, const SignedRows& to) {
  const int64_t groups = depth / kGroupDepth;
  for (int r = 0; r < to.rows; r++)
    for (int64_t g = 0; g < groups; g++) {
      const uint8_t* from = u + (to.first + r) * depth + g * kGroupDepth;
      int8_t* a = to.a + (g * to.rows + r) * kGroupDepth;
      int32_t sum = 0;
      for (int k = 0; k < kGroupDepth; k++) sum += a[k] = int8_t(from[k] ^ 0x80);
      const float factor = scale[(to.first + r) * groups + g];
      to.factors[g * to.rows + r] = {factor, float(sum) * factor};
    }
}

using MultiplyGroups = void (*)(const GroupWeights&, const SignedRows&, int64_t panel, float* y);

}  // namespace blockrelay
