// Causal attention over pages of 16 keys, float16 or float32.
//
// A tile takes the pages of its segment span by span: scores, softmax of the span, weighted values; spans are added up
// in order. A tile whose share of the work is large is cut at its spans, so that several threads take part in one long
// request. kernels/specification.py defines the order of every sum; FewRows and ManyRows both keep it.
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

constexpr int kPartsPerThread = 4;          // enough that threads end at about the same time
constexpr int64_t kStoredFloats = 4 << 20;  // what the spans of cut tiles may occupy; tiles beyond it are left whole

// What one thread computes at a time: spans first..end-1 of a tile.
struct Part {
  Tile tile;
  int64_t first, end;
  int64_t cut;  // index of the tile among those that are cut, or -1 where this is all of it
  int64_t size() const { return (end - first) * tile.count; }
};

// A tile that several threads compute: where the softmax of its spans and rows, [spans][count], begins among those that
// are kept, and how many of its parts are not there yet.
struct CutTile {
  explicit CutTile(int64_t begin, int64_t parts) : begin(begin), parts_left(parts) {}
  const int64_t begin;
  std::atomic<int64_t> parts_left;
};

// A call, divided among threads.
struct Division {
  std::vector<Part> parts;
  std::deque<CutTile> cut;
  std::vector<Softmax> kept;
  std::unique_ptr<float[]> acc;  // of `kept`
  int64_t cost = 0;              // rough number of float operations

  Softmax& softmax(const Part& part, int64_t span, int i) {
    return kept[size_t(cut[size_t(part.cut)].begin + span * part.tile.count + i)];
  }
};

// Divides a call among `threads`. Throws std::bad_alloc.
template <class E>
inline Division divide(const AttentionCall<E>& call, int threads) {
  Division to;
  std::vector<Tile> tiles;
  for (int64_t s = 0; s < call.segment_count; s++) {
    const int64_t* segment = call.segments + s * 3;
    const int64_t query_rows = segment[1] * call.group();
    to.cost += segment[1] * call.query_heads * (segment[2] + segment[1]) * call.head_dim;
    for (int head = 0; head < call.kv_heads; head++)
      for (int64_t t = 0; t < query_rows; t += kTileRows)
        tiles.push_back({s, t, head, int(std::min<int64_t>(query_rows - t, kTileRows))});
  }
  const int64_t share = to.cost / (threads * kPartsPerThread) + 1;
  int64_t kept = 0;
  bool uneven = false;
  for (const Tile& tile : tiles) {
    const int64_t spans = call.spans(tile, tile.count - 1);
    const int64_t cost = call.limit(tile, tile.count - 1) * tile.count * call.head_dim;
    const int64_t parts = std::min(spans, (cost + share - 1) / share);
    uneven = uneven || cost > share;
    if (parts <= 1 || threads == 1 || to.cost < Pool::kWorthSharing ||
        (kept + spans * tile.count) * call.stride() > kStoredFloats) {
      to.parts.push_back({tile, 0, spans, -1});
      continue;
    }
    for (int64_t part = 0; part < parts; part++)
      to.parts.push_back({tile, spans * part / parts, spans * (part + 1) / parts, int64_t(to.cut.size())});
    to.cut.emplace_back(kept, parts);
    kept += spans * tile.count;
  }
  // The largest first: the last one to begin decides when all are done.
  if (uneven)
    std::stable_sort(to.parts.begin(), to.parts.end(),
                     [](const Part& a, const Part& b) { return a.size() > b.size(); });
  if (kept == 0) return to;
  to.kept.resize(size_t(kept));
  to.acc.reset(new float[size_t(kept * call.stride())]);
  for (int64_t at = 0; at < kept; at++) to.kept[size_t(at)].acc = to.acc.get() + at * call.stride();
  return to;
}

// Computes parts one after the other, in one thread.
template <class E>
class Attention {
 public:
  Attention(const AttentionCall<E>& call, Division& division, float* memory)
      : call_(call),
        division_(division),
        stride_(call.stride()),
        few_(call, memory + sums(call)),
        many_(call, memory + sums(call)) {
    for (int i = 0; i < kTileRows; i++) whole_[i].acc = memory + i * stride_;
  }

  static size_t memory(const AttentionCall<E>& call) {
    return sums(call) + std::max(FewRows<E>::memory(call), ManyRows<E>::memory(call));
  }

  void run(const Part& part) {
    if (part.cut < 0) {
      spans(part, [&](int i, int64_t span, const Softmax& softmax) { add(part.tile, i, span, softmax); });
      return;
    }
    spans(part, [&](int i, int64_t span, const Softmax& softmax) {
      division_.softmax(part, span, i).set(softmax, stride_);
    });
    CutTile& cut = division_.cut[size_t(part.cut)];
    if (cut.parts_left.fetch_sub(1, std::memory_order_acq_rel) == 1)  // the last part adds up all spans
      for (int i = 0; i < part.tile.count; i++)
        for (int64_t span = 0; span < call_.spans(part.tile, i); span++)
          add(part.tile, i, span, division_.softmax(part, span, i));
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
  Division& division_;
  const int stride_;
  Softmax whole_[kTileRows];
  FewRows<E> few_;
  ManyRows<E> many_;
};

// Computes attention of all segments. Returns false when there is no memory. Throws std::bad_alloc.
template <class E>
inline bool attention(Pool& pool, const AttentionCall<E>& call) {
  Division division = divide(call, pool.threads());
  return pool.run(int64_t(division.parts.size()), 1, division.cost, [&](int64_t begin, int64_t end) {
    float* memory = scratch(Attention<E>::memory(call));
    if (!memory) return false;
    Attention<E> one(call, division, memory);
    for (int64_t i = begin; i < end; i++) one.run(division.parts[size_t(i)]);
    return true;
  });
}

}  // namespace blockrelay
