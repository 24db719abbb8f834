// Causal attention over pages of 16 keys, float16 or float32.
//
// A tile walks the pages of its segment once, span by span: scores, online softmax, weighted values. A tile whose share
// of the work is large is cut at its spans, so that several threads take part in one long request.
// kernels/specification.py defines the order of every sum; FewRows and ManyRows both keep it.
#pragma once

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <vector>

#include "attention_few.h"
#include "attention_many.h"
#include "pool.h"

namespace blockrelay {

constexpr int64_t kStoredFloats = 4 << 20;  // the most that the spans of the tiles that are cut may occupy: 16 MiB
constexpr int kPartsPerThread = 4;          // enough that threads end at about the same time

// A tile that several threads compute: the softmax of each span and row, until all are there.
struct CutTile {
  CutTile(const Tile& tile, int64_t spans, int stride)
      : tile(tile), rows(new Softmax[size_t(spans * tile.count)]), acc(new float[size_t(spans * tile.count * stride)]) {
    for (int64_t at = 0; at < spans * tile.count; at++) rows[size_t(at)].acc = acc.get() + at * stride;
  }

  Softmax& row(int64_t span, int i) { return rows[size_t(span * tile.count + i)]; }

  const Tile tile;
  const std::unique_ptr<Softmax[]> rows;  // [spans][count]
  const std::unique_ptr<float[]> acc;
  std::atomic<int64_t> parts_left{0};
};

// What one thread computes at a time: spans first..end-1 of a tile, all of them where the tile is not cut.
struct Part {
  Tile tile;
  int64_t first, end;
  CutTile* cut;
};

// The parts of a call, and its rough number of float operations.
struct Parts {
  std::vector<Part> parts;
  std::deque<CutTile> cut;
  int64_t cost = 0;
};

// Divides a call among `threads`. Throws std::bad_alloc.
template <class E>
inline void divide(const AttentionCall<E>& call, int threads, Parts& to) {
  std::vector<Tile> tiles;
  for (int64_t s = 0; s < call.segment_count; s++) {
    const int64_t* segment = call.segments + s * 3;
    const int64_t query_rows = segment[1] * call.group();
    to.cost += segment[1] * call.query_heads * (segment[2] + segment[1]) * call.head_dim;
    for (int head = 0; head < call.kv_heads; head++)
      for (int64_t t = (query_rows + kTileRows - 1) / kTileRows; t-- > 0;)  // the longest first
        tiles.push_back({s, t * kTileRows, head, int(std::min<int64_t>(query_rows - t * kTileRows, kTileRows))});
  }
  const int64_t share = to.cost / (threads * kPartsPerThread) + 1;
  int64_t stored = 0;
  for (const Tile& tile : tiles) {
    const int64_t spans = call.spans(tile, tile.count - 1);
    const int64_t cost = call.limit(tile, tile.count - 1) * tile.count * call.head_dim;
    const int64_t floats = spans * tile.count * call.stride();
    const int64_t parts = std::min(spans, (cost + share - 1) / share);
    if (parts <= 1 || threads == 1 || to.cost < Pool::kWorthSharing || stored + floats > kStoredFloats) {
      to.parts.push_back({tile, 0, spans, nullptr});
      continue;
    }
    stored += floats;
    CutTile& cut = to.cut.emplace_back(tile, spans, call.stride());
    cut.parts_left = parts;
    for (int64_t part = 0; part < parts; part++)
      to.parts.push_back({tile, spans * part / parts, spans * (part + 1) / parts, &cut});
  }
}

// Computes parts one after the other, in one thread.
template <class E>
class Attention {
 public:
  Attention(const AttentionCall<E>& call, float* memory)
      : call_(call), stride_(call.stride()), few_(call, memory + sums(call)), many_(call, memory + sums(call)) {
    for (int i = 0; i < kTileRows; i++) whole_[i].acc = memory + i * stride_;
  }

  static size_t memory(const AttentionCall<E>& call) {
    return sums(call) + std::max(FewRows<E>::memory(call), ManyRows<E>::memory(call));
  }

  void run(const Part& part) {
    if (!part.cut) {
      spans(part, [&](int i, int64_t span, const Softmax& softmax) { add(part.tile, i, span, softmax); });
      return;
    }
    spans(part, [&](int i, int64_t span, const Softmax& softmax) { part.cut->row(span, i).set(softmax, stride_); });
    if (part.cut->parts_left.fetch_sub(1, std::memory_order_acq_rel) == 1)  // the last part combines all
      for (int i = 0; i < part.tile.count; i++)
        for (int64_t span = 0; span < call_.spans(part.tile, i); span++)
          add(part.tile, i, span, part.cut->row(span, i));
  }

 private:
  static size_t sums(const AttentionCall<E>& call) { return size_t(kTileRows * call.stride()); }

  template <class Done>
  void spans(const Part& part, const Done& done) {
    if (part.tile.count <= kFewRows)
      few_.run(part.tile, part.first, part.end, done);
    else
      many_.run(part.tile, part.first, part.end, done);
  }

  // Adds a span to query row i, and writes the row with its last span.
  void add(const Tile& tile, int i, int64_t span, const Softmax& softmax) {
    const bool last = span + 1 == call_.spans(tile, i);
    if (span == 0 && last) return call_.write(tile, i, softmax);
    if (span == 0)
      whole_[i].set(softmax, stride_);
    else
      whole_[i].add(softmax, stride_);
    if (last) call_.write(tile, i, whole_[i]);
  }

  const AttentionCall<E>& call_;
  const int stride_;
  Softmax whole_[kTileRows];
  FewRows<E> few_;
  ManyRows<E> many_;
};

// Computes attention of all segments. Returns false when there is no memory. Throws std::bad_alloc.
template <class E>
inline bool attention(Pool& pool, const AttentionCall<E>& call) {
  Parts all;
  divide(call, pool.threads(), all);
  return pool.run(int64_t(all.parts.size()), 1, all.cost, [&](int64_t begin, int64_t end) {
    float* memory = scratch(Attention<E>::memory(call));
    if (!memory) return false;
    Attention<E> one(call, memory);
    for (int64_t i = begin; i < end; i++) one.run(all.parts[size_t(i)]);
    return true;
  });
}

}  // namespace blockrelay
