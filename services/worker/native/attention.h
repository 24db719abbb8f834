// Causal attention over pages of 16 keys, float16 or float32.
//
// A tile is up to kTileRows query rows (row, head of the group) of one segment and one key/value head. It walks the
// pages once: scores of kScoreRows query rows at a time (each key register is loaded once for them), online softmax,
// weighted values. float16 pages are widened once per tile when several groups of query rows will read them.
#pragma once

#include "arithmetic.h"
#include "pool.h"

namespace blockrelay {

constexpr int kPage = 16;
constexpr int kTileRows = 32;
constexpr int kAhead = 3;  // pages: one takes less time than memory needs to answer

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
};

struct Tile {
  int64_t segment;
  int64_t first;  // query row within the segment: row * group + head of the group
  int kv_head;
};

// s[i][t] = sum over d of q[i][d] * k[d][t], for N query rows. Fetches next_k, as large as a page's keys, into L2 on the
// way: pages lie apart, so the hardware does not see the next one coming, and asking for all of it at once would stall.
template <int N, class F, class E>
inline void score(const float* q, int stride, const F* k, const E* next_k, int dim, float* s) {
  V16 sum[N];
  each<N>([&](auto i) { sum[i] = V16::broadcast(0.0f); });
  for (int d = 0; d < dim; d++) {
    __builtin_prefetch(next_k + d * kPage, 0, 2);
    const V16 keys = V16::load(k + d * kPage);
    each<N>([&](auto i) { sum[i] = fma(V16::broadcast(q[i * stride + d]), keys, sum[i]); });
  }
  each<N>([&](auto i) { sum[i].store(s + i * kPage); });
}

// acc[i][d] += p[i][t] * v[t][d] for t from begin to end, for N query rows and M registers of d.
template <int N, int M, class E>
inline void weigh_columns(float* acc, int stride, const float* p, const E* v, int v_stride, int begin, int end) {
  V16 sum[N * M], values[M];
  each<N * M>([&](auto j) { sum[j] = V16::load(acc + j / M * stride + j % M * kLanes); });
  for (int t = begin; t < end; t++) {
    each<M>([&](auto j) { values[j] = V16::load(v + t * v_stride + j * kLanes); });
    each<N * M>([&](auto j) { sum[j] = fma(V16::broadcast(p[j / M * kPage + t]), values[j % M], sum[j]); });
  }
  each<N * M>([&](auto j) { sum[j].store(acc + j / M * stride + j % M * kLanes); });
}

template <int N, class E>
inline void weigh(float* acc, int stride, const float* p, const E* v, int v_stride, int dim, int begin, int end) {
  int d = 0;
  for (; d + kValueVectors * kLanes <= dim; d += kValueVectors * kLanes)
    weigh_columns<N, kValueVectors>(acc + d, stride, p, v + d, v_stride, begin, end);
  for (; d + kLanes <= dim; d += kLanes) weigh_columns<N, 1>(acc + d, stride, p, v + d, v_stride, begin, end);
  if (d < dim) {
    for (int i = 0; i < N; i++) {
      V16 sum = V16::load(acc + i * stride + d);
      for (int t = begin; t < end; t++)
        sum = fma(V16::broadcast(p[i * kPage + t]), V16::load(v + t * v_stride + d, dim - d), sum);
      sum.store(acc + i * stride + d);
    }
  }
}

template <class E>
class TileWorker {
 public:
  TileWorker(const AttentionCall<E>& call, float* memory)
      : call_(call),
        group_(call.query_heads / call.kv_heads),
        stride_((call.head_dim + kLanes - 1) / kLanes * kLanes),
        q_(memory),
        acc_(q_ + kTileRows * stride_),
        k_wide_(acc_ + kTileRows * stride_),
        v_wide_(k_wide_ + kPage * stride_),
        p_(v_wide_ + kPage * stride_) {}

  static size_t memory(int head_dim) {
    size_t stride = size_t(head_dim + kLanes - 1) / kLanes * kLanes;
    return (2 * kTileRows + 2 * kPage) * stride + kTileRows * kPage;
  }

  void run(const Tile& tile) {
    const int64_t* segment = call_.segments + tile.segment * 3;
    const int64_t left = segment[1] * group_ - tile.first;
    const int count = left < kTileRows ? int(left) : kTileRows;
    const int64_t first_position = segment[2];
    const float scale = 1.0f / __builtin_sqrtf(float(call_.head_dim));
    for (int i = 0; i < count; i++) {
      const float* q = call_.q + offset(segment[0], tile, i);
      for (int d = 0; d < call_.head_dim; d++) q_[i * stride_ + d] = q[d] * scale;
      std::memset(acc_ + i * stride_, 0, size_t(stride_) * sizeof(float));
      highest_[i] = -1e30f;
      total_[i] = 0.0f;
      limit_[i] = first_position + (tile.first + i) / group_ + 1;
    }
    const int32_t* table = call_.page_table + tile.segment * call_.max_pages;
    const int64_t pages = (limit_[count - 1] + kPage - 1) / kPage;
    const int64_t page_size = int64_t(call_.head_dim) * kPage;
    int begin = 0;
    for (int64_t index = 0; index < pages; index++) {
      while (limit_[begin] <= index * kPage) begin++;
      const int64_t at = (int64_t(table[index]) * call_.kv_heads + tile.kv_head) * page_size;
      const int64_t soon = index + kAhead < pages ? index + kAhead : index;
      const int64_t next = (int64_t(table[soon]) * call_.kv_heads + tile.kv_head) * page_size;
      next_k_ = call_.k_pages + next;
      next_v_ = call_.v_pages + next;
      visit(call_.k_pages + at, call_.v_pages + at, index * kPage, begin, count);
    }
    for (int i = 0; i < count; i++) {
      const V16 inverse = V16::broadcast(1.0f / total_[i]);
      float* out = call_.out + offset(segment[0], tile, i);
      for (int d = 0; d < call_.head_dim; d += kLanes)
        store_some(out + d, V16::load(acc_ + i * stride_ + d) * inverse, lanes_left(d, call_.head_dim));
    }
  }

 private:
  int64_t offset(int64_t first_row, const Tile& tile, int i) const {
    const int64_t query_row = tile.first + i;
    const int64_t row = first_row + query_row / group_;
    const int64_t head = int64_t(tile.kv_head) * group_ + query_row % group_;
    return (row * call_.query_heads + head) * call_.head_dim;
  }

  // One page, for the query rows begin..count-1 that see at least its first key.
  void visit(const E* k, const E* v, int64_t first_key, int begin, int count) {
    const int dim = call_.head_dim;
    if (sizeof(E) == sizeof(Half) && count - begin > kScoreRows) {
      for (int d = 0; d < dim; d++) V16::load(k + d * kPage).store(k_wide_ + d * kPage);
      for (int t = 0; t < kPage; t++)
        for (int d = 0; d < dim; d += kLanes)
          load_some(v + t * dim + d, lanes_left(d, dim)).store(v_wide_ + t * stride_ + d);
      attend(k_wide_, v_wide_, stride_, first_key, begin, count);
    } else {
      attend(k, v, dim, first_key, begin, count);
    }
  }

  template <class F>
  void attend(const F* k, const F* v, int v_stride, int64_t first_key, int begin, int count) {
    for (int i = begin; i < count;) {
      const int left = count - i;
      if (left >= kScoreRows)
        i = attend_rows<kScoreRows>(k, v, v_stride, first_key, i);
      else if (left >= 4)
        i = attend_rows<4>(k, v, v_stride, first_key, i);
      else if (left >= 2)
        i = attend_rows<2>(k, v, v_stride, first_key, i);
      else
        i = attend_rows<1>(k, v, v_stride, first_key, i);
    }
  }

  template <int N, class F>
  int attend_rows(const F* k, const F* v, int v_stride, int64_t first_key, int i) {
    const int dim = call_.head_dim;
    float* acc = acc_ + i * stride_;
    score<N>(q_ + i * stride_, stride_, k, next_k_, dim, p_);
    int visible[N];
    for (int r = 0; r < N; r++) {
      const int64_t keys = limit_[i + r] - first_key;
      visible[r] = keys < kPage ? int(keys) : kPage;
    }
    soften<N>(i, visible);
    constexpr int line = 64 / sizeof(E);
    for (int at = 0; at < dim * kPage; at += line) __builtin_prefetch(next_v_ + at, 0, 2);
    weigh<N>(acc, stride_, p_, v, v_stride, dim, 0, visible[0]);  // limits do not fall within a tile
    for (int r = 1; r < N; r++)
      if (visible[r] > visible[0])
        weigh<1>(acc + r * stride_, stride_, p_ + r * kPage, v, v_stride, dim, visible[0], visible[r]);
    return i + N;
  }

  // Scores in p_ of the query rows i..i+N-1 to probabilities relative to their new maxima, in place.
  template <int N>
  void soften(int i, const int* visible) {
    V16 s[N];
    each<N>([&](auto r) {
      const V16 old = V16::broadcast(highest_[i + r]);
      s[r] = V16::load(p_ + r * kPage);
      const float highest = highest_lane(first(visible[r], pick_max(s[r], old), old));
      if (highest > highest_[i + r]) raise(i + r, highest);
      s[r] = s[r] - V16::broadcast(highest);
    });
    each<N>([&](auto r) { first(visible[r], exp(s[r]), V16::broadcast(0.0f)).store(p_ + r * kPage); });
    float sums[N];
    sums_in_order<N>(p_, sums);
    each<N>([&](auto r) { total_[i + r] += sums[r]; });
  }

  // A new maximum for query row i.
  void raise(int i, float highest) {
    const V16 correction = exp(V16::broadcast(highest_[i] - highest));
    float lane[kLanes];
    correction.store(lane);
    total_[i] *= lane[0];
    float* acc = acc_ + i * stride_;
    for (int d = 0; d < stride_; d += kLanes) (V16::load(acc + d) * correction).store(acc + d);
    highest_[i] = highest;
  }

  const AttentionCall<E>& call_;
  const int group_;
  const int stride_;
  float* const q_;
  float* const acc_;
  float* const k_wide_;
  float* const v_wide_;
  float* const p_;
  const E* next_k_ = nullptr;
  const E* next_v_ = nullptr;
  float highest_[kTileRows];
  float total_[kTileRows];
  int64_t limit_[kTileRows];
};

// False when there is no memory. Throws std::bad_alloc.
template <class E>
inline bool attention(Pool& pool, const AttentionCall<E>& call) {
  const int group = call.query_heads / call.kv_heads;
  std::vector<Tile> tiles;
  int64_t cost = 0;
  for (int64_t s = 0; s < call.segment_count; s++) {
    const int64_t* segment = call.segments + s * 3;
    cost += segment[1] * call.query_heads * (segment[2] + segment[1]) * call.head_dim;
    for (int head = 0; head < call.kv_heads; head++)
      for (int64_t first = 0; first < segment[1] * group; first += kTileRows) tiles.push_back({s, first, head});
  }
  return pool.run(int64_t(tiles.size()), 1, cost, [&](int64_t begin, int64_t end) {
    float* memory = scratch(TileWorker<E>::memory(call.head_dim));
    if (!memory) return false;
    TileWorker<E> worker(call, memory);
    for (int64_t i = begin; i < end; i++) worker.run(tiles[size_t(i)]);
    return true;
  });
}

}  // namespace blockrelay
