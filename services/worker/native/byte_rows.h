// Rows for VNNI, which multiplies them as they are.
#pragma once

#include "packed_weights.h"

namespace blockrelay {

using RowWord = uint32_t;  // four uint8 of a row

// Copies u [rows,K] to [K/4][rows][4], with zeros beyond K. In place, the rows of a group would map to the same few
// sets of the cache, since K is often a power of two.
inline void arrange_rows(const uint8_t* u, int64_t depth, int rows, RowWord* to) {
  const int64_t whole = depth / kDepth;
  for (int r = 0; r < rows; r++) {
    const uint8_t* line = u + r * depth;
    for (int64_t i = 0; i < whole; i++) std::memcpy(to + i * rows + r, line + i * kDepth, kDepth);
    if (depth % kDepth) {
      to[whole * rows + r] = 0;
      std::memcpy(to + whole * rows + r, line + whole * kDepth, size_t(depth % kDepth));
    }
  }
}

}  // namespace blockrelay
