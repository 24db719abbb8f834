// Code shared by the two ways to compute attention (attention_few.h, attention_many.h): the call, its tiles, what is
// kept of a span of keys, and the sum of weighted values.
#pragma once

#include <algorithm>

#include "arithmetic.h"

namespace blockrelay {

constexpr int kPage = 16;
constexpr int kSpanPages = 16;
constexpr int kSpanKeys = kPage * kSpanPages;  // keys that have a softmax of their own, before spans are combined
constexpr float kLowest = -1e30f;              // the maximum of no scores
constexpr int kTileRows = 128;
constexpr int kAtOnce = 4;  // pages taken at a time, so that sums stay in registers from page to page

// Up to kTileRows query rows of one segment that read the same key/value head; a query row is a pair of row and head.
struct Tile {
  int64_t segment;
  int64_t first;  // first query row within the segment: row * group + head of the group
  int kv_head;
  int count;
};

// The softmax of one query row over some keys: its sums, which are relative to its highest score.
struct Softmax {
  float highest;  // the highest score
  float total;    // sum of exp(score - highest)
  float* acc;     // [stride] sum of exp(score - highest) * value

  void set(const Softmax& other, int stride) {
    highest = other.highest;
    total = other.total;
    std::memcpy(acc, other.acc, size_t(stride) * sizeof(float));
  }

  // Adds the keys of `span`, which come after those that this one has.
  void add(const Softmax& span, int stride) {
    const float top = span.highest > highest ? span.highest : highest;
    const V16 before = exp(V16::broadcast(highest - top)), now = exp(V16::broadcast(span.highest - top));
    for (int d = 0; d < stride; d += kLanes)
      fma(V16::load(span.acc + d), now, V16::load(acc + d) * before).store(acc + d);
    float lane[kLanes];
    fma(V16::broadcast(span.total), now, V16::broadcast(total) * before).store(lane);
    total = lane[0];
    highest = top;
  }
};

template <class E>
struct AttentionCall {
  const float* q;             // [R,Hq,D]
  const E* k_pages;           // [n,Hkv,D,16]
  const E* v_pages;           // [n,Hkv,16,D]
  const int32_t* page_table;  // [S,max_pages]
  const int64_t* segments;    // [S,3] first row, rows, first position
  float* out;                 // [R,Hq,D]
  int64_t segment_count, max_pages, rows;
  int query_heads, kv_heads, head_dim;

  int group() const { return query_heads / kv_heads; }

  // Offset of query row i of a tile in q and out.
  int64_t offset(const Tile& tile, int i) const {
    const int64_t query_row = tile.first + i;
    const int64_t row = segments[tile.segment * 3] + query_row / group();
    return (row * query_heads + int64_t(tile.kv_head) * group() + query_row % group()) * head_dim;
  }

  // Number of keys that query row i of a tile sees.
  int64_t limit(const Tile& tile, int i) const {
    return segments[tile.segment * 3 + 2] + (tile.first + i) / group() + 1;
  }

  // Number of spans that query row i of a tile sees any key of.
  int64_t spans(const Tile& tile, int i) const { return (limit(tile, i) + kSpanKeys - 1) / kSpanKeys; }

  // Number of keys of a span that query row i of a tile sees.
  int seen(const Tile& tile, int i, int64_t span) const {
    return int(std::clamp<int64_t>(limit(tile, i) - span * kSpanKeys, 0, kSpanKeys));
  }

  // Offset of the index-th page of a tile's segment in k_pages and v_pages.
  int64_t page(const Tile& tile, int64_t index) const {
    const int64_t page = page_table[tile.segment * max_pages + index];
    return (page * kv_heads + tile.kv_head) * page_size();
  }

  int64_t page_size() const { return int64_t(head_dim) * kPage; }

  // Floats between query rows in working memory.
  int stride() const { return (head_dim + kLanes - 1) / kLanes * kLanes; }

  void write(const Tile& tile, int i, const Softmax& whole) const {
    const V16 inverse = V16::broadcast(1.0f / whole.total);
    float* to = out + offset(tile, i);
    for (int d = 0; d < head_dim; d += kLanes)
      store_some(to + d, V16::load(whole.acc + d) * inverse, lanes_left(d, head_dim));
  }
};

// Layouts of the probabilities: at(i, t) is the offset of query row i, of sixteen that begin at a multiple of sixteen,
// and key t of a span.
struct KeysTogether {
  static constexpr int at(int i, int t) { return i * kSpanKeys + t; }
};
struct RowsTogether {
  static constexpr int at(int i, int t) { return t * kLanes + i; }
};

// Number of keys of page b of a span that a row sees if it sees `seen` of the span.
inline int keys_of_page(int seen, int b) { return std::clamp(seen - b * kPage, 0, kPage); }

// acc[i][d] += p[i][t] * v[t][d] for t from begin to end, for N query rows and M registers of d.
template <int N, int M, class Layout, class E>
inline void weigh_columns(float* acc, int stride, const float* p, const E* v, int dim, int begin, int end) {
  V16 sum[N * M], values[M];
  each<N * M>([&](auto j) { sum[j] = V16::load(acc + j / M * stride + j % M * kLanes); });
  for (int t = begin; t < end; t++) {
    each<M>([&](auto j) { values[j] = V16::load(v + t * dim + j * kLanes); });
    each<N * M>([&](auto j) { sum[j] = fma(V16::broadcast(p[Layout::at(j / M, t)]), values[j % M], sum[j]); });
  }
  each<N * M>([&](auto j) { sum[j].store(acc + j / M * stride + j % M * kLanes); });
}

// weigh_columns for all d.
template <int N, class Layout, class E>
inline void weigh(float* acc, int stride, const float* p, const E* v, int dim, int begin, int end) {
  int d = 0;
  for (; d + kValueVectors * kLanes <= dim; d += kValueVectors * kLanes)
    weigh_columns<N, kValueVectors, Layout>(acc + d, stride, p, v + d, dim, begin, end);
  for (; d + kLanes <= dim; d += kLanes) weigh_columns<N, 1, Layout>(acc + d, stride, p, v + d, dim, begin, end);
  if (d < dim) {
    for (int i = 0; i < N; i++) {
      V16 sum = V16::load(acc + i * stride + d);
      for (int t = begin; t < end; t++)
        sum = fma(V16::broadcast(p[Layout::at(i, t)]), V16::load(v + t * dim + d, dim - d), sum);
      sum.store(acc + i * stride + d);
    }
  }
}

// weigh for N query rows, where row r sees visible[r] keys; `visible` is ascending.
template <int N, class Layout, class E>
inline void weigh_visible(float* acc, int stride, const float* p, const E* v, int dim, const int* visible) {
  weigh<N, Layout>(acc, stride, p, v, dim, 0, visible[0]);
  for (int r = 1; r < N; r++)
    if (visible[r] > visible[0])
      weigh<1, Layout>(acc + r * stride, stride, p + Layout::at(r, 0), v, dim, visible[0], visible[r]);
}

// Calls f(i, N) for groups of query rows i..i+N-1 that cover begin..end-1. N is a constant: kScoreRows while that many
// rows are left, then 4, 2 and 1.
template <class F>
inline void in_groups(int begin, int end, const F& f) {
  int i = begin;
  for (; end - i >= kScoreRows; i += kScoreRows) f(i, std::integral_constant<int, kScoreRows>{});
  if (kScoreRows > 4 && end - i >= 4) {
    f(i, std::integral_constant<int, 4>{});
    i += 4;
  }
  if (end - i >= 2) {
    f(i, std::integral_constant<int, 2>{});
    i += 2;
  }
  if (end - i >= 1) f(i, std::integral_constant<int, 1>{});
}

}  // namespace blockrelay
