// Causal attention over pages of 16 keys, float16 or float32.
//
// A tile walks the pages of its segment once: scores, online softmax, weighted values. kernels/specification.py defines
// the order of every sum; FewRows and ManyRows both keep it.
#pragma once

#include <algorithm>

#include "attention_few.h"
#include "attention_many.h"
#include "pool.h"

namespace blockrelay {

// Computes attention of all segments. Returns false when there is no memory. Throws std::bad_alloc.
template <class E>
inline bool attention(Pool& pool, const AttentionCall<E>& call) {
  std::vector<Tile> tiles;
  int64_t cost = 0;
  for (int64_t s = 0; s < call.segment_count; s++) {
    const int64_t* segment = call.segments + s * 3;
    const int64_t query_rows = segment[1] * call.group();
    cost += segment[1] * call.query_heads * (segment[2] + segment[1]) * call.head_dim;
    for (int head = 0; head < call.kv_heads; head++)
      for (int64_t t = (query_rows + kTileRows - 1) / kTileRows; t-- > 0;)  // the longest first
        tiles.push_back({s, t * kTileRows, head, int(std::min<int64_t>(query_rows - t * kTileRows, kTileRows))});
  }
  return pool.run(int64_t(tiles.size()), 1, cost, [&](int64_t begin, int64_t end) {
    float* memory = scratch(std::max(FewRows<E>::memory(call), ManyRows<E>::memory(call)));
    if (!memory) return false;
    FewRows<E> few(call, memory);
    ManyRows<E> many(call, memory);
    for (int64_t i = begin; i < end; i++) {
      const Tile& tile = tiles[size_t(i)];
      if (tile.count <= kFewRows)
        few.run(tile);
      else
        many.run(tile);
    }
    return true;
  });
}

}  // namespace blockrelay
