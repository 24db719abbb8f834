// Attention of a tile with many query rows, as in prefill: a register holds sixteen query rows, so that maxima, exp and
// sums of the softmax need no exchange between lanes. Pages are widened to float once per tile. Several pages that all
// rows see whole are taken at a time, so that the weighted values stay in registers from page to page.
#pragma once

#include "attention_tile.h"

namespace blockrelay {

constexpr int kAtOnce = 4;  // pages taken at a time: they, the queries and the sums still fit into a near cache

template <class E>
class ManyRows {
 public:
  ManyRows(const AttentionCall<E>& call, float* memory)
      : call_(call),
        stride_(call.stride()),
        q_(memory),
        acc_(q_ + kTileRows * call.head_dim),
        k_(acc_ + kTileRows * stride_),
        v_(k_ + kAtOnce * call.page_size()),
        p_(v_ + kAtOnce * kPage * stride_) {}

  static size_t memory(const AttentionCall<E>& call) {
    const size_t floats = size_t(call.head_dim) + size_t(call.stride());
    return (kTileRows + kAtOnce * kPage) * floats + kAtOnce * kPage * kTileRows;
  }

  void run(const Tile& tile) {
    begin(tile);
    const int64_t pages = (limit_[tile.count - 1] + kPage - 1) / kPage;
    const int64_t whole = limit_[0] / kPage;  // pages that all rows see whole
    for (int64_t index = 0; index < pages;) {
      const int count = index < whole ? int(std::min<int64_t>(whole - index, kAtOnce)) : 1;
      for (int b = 0; b < count; b++) {
        fetch(call_.page(tile, std::min(index + b + kAhead, pages - 1)));
        widen(call_.page(tile, index + b), b);
      }
      if (index < whole)
        visit(tile.count, count);
      else
        visit_some(tile.count, index * kPage);
      index += count;
    }
    for (int i = 0; i < tile.count; i++) call_.write(tile, i, acc_ + i * stride_, total_[i]);
  }

 private:
  // Loads the scaled queries and resets the sums. Rows beyond the tile that fill the last register are computed from
  // zeros and never written.
  void begin(const Tile& tile) {
    const float scale = 1.0f / __builtin_sqrtf(float(call_.head_dim));
    filled_ = (tile.count + kLanes - 1) / kLanes * kLanes;
    for (int i = 0; i < filled_; i++) {
      const float* q = call_.q + call_.offset(tile, i < tile.count ? i : 0);
      const float times = i < tile.count ? scale : 0.0f;
      for (int d = 0; d < call_.head_dim; d++) q_[d * kTileRows + i] = q[d] * times;
      std::memset(acc_ + i * stride_, 0, size_t(stride_) * sizeof(float));
      highest_[i] = -1e30f;
      total_[i] = 0.0f;
      limit_[i] = call_.limit(tile, i);
    }
  }

  // Prefetches the page at this offset into L2, all at once: computing a page takes long enough here.
  void fetch(int64_t at) const {
    constexpr int line = 64 / sizeof(E);
    for (int64_t i = at; i < at + call_.page_size(); i += line) {
      __builtin_prefetch(call_.k_pages + i, 0, 2);
      __builtin_prefetch(call_.v_pages + i, 0, 2);
    }
  }

  // Widens the page at this offset into the b-th page of k_ and v_; values are padded with zeros up to the stride.
  void widen(int64_t at, int b) {
    const int dim = call_.head_dim;
    float* k = k_ + b * call_.page_size();
    for (int64_t i = 0; i < call_.page_size(); i += kLanes) V16::load(call_.k_pages + at + i).store(k + i);
    for (int t = 0; t < kPage; t++) {
      const E* from = call_.v_pages + at + t * dim;
      float* v = v_ + (b * kPage + t) * stride_;
      for (int d = 0; d < dim; d += kLanes) load_some(from + d, lanes_left(d, dim)).store(v + d);
    }
  }

  // Adds the first `pages` pages of k_ and v_, which all rows see whole.
  void visit(int count, int pages) {
    score_from(0, pages);
    for (int i = 0; i < filled_; i += kLanes)
      for (int b = 0; b < pages; b++) soften(i, b, [](int, V16 x, V16) { return x; });
    in_groups(0, count, [&](int i, auto n) {
      constexpr int rows = decltype(n)::value;
      int d = 0;
      for (; d + kValueVectors * kLanes <= stride_; d += kValueVectors * kLanes)
        weigh_pages<rows, kValueVectors>(i, d, pages);
      for (; d < stride_; d += kLanes) weigh_pages<rows, 1>(i, d, pages);
    });
  }

  // Adds the first page of k_ and v_, of which some rows see only a part. Rows that see none of it do not change.
  void visit_some(int count, int64_t first_key) {
    int begin = 0;  // the first sixteen rows of which any sees a key
    while (limit_[begin + kLanes - 1] <= first_key) begin += kLanes;
    score_from(begin, 1);
    for (int i = begin; i < filled_; i += kLanes) {
      soften_some(i, first_key);
      if (raised_[0][i / kLanes]) scale_values(i, correction_[0] + i);
    }
    in_groups(begin, count, [&](int i, auto n) {
      constexpr int rows = decltype(n)::value;
      int visible[rows];
      for (int r = 0; r < rows; r++) {
        const int64_t keys = limit_[i + r] - first_key;
        visible[r] = keys >= kPage ? kPage : keys < 0 ? 0 : int(keys);
      }
      weigh_visible<rows, RowsTogether>(acc_ + i * stride_, stride_, p_ + i, v_, stride_, visible);
    });
  }

  // score() for the rows from i on and the first `pages` pages of k_.
  void score_from(int i, int pages) {
    for (; i + kStripVectors * kLanes <= filled_; i += kStripVectors * kLanes)
      for (int b = 0; b < pages; b++) score<kStripVectors>(i, b);
    for (; i < filled_; i += kLanes)
      for (int b = 0; b < pages; b++) score<1>(i, b);
  }

  // p_[t][i] = sum over d of q[i][d] * k[d][t], for page b and N registers of rows from row i on, kStripKeys keys at a
  // time.
  template <int N>
  void score(int i, int b) {
    for (int first = 0; first < kPage; first += kStripKeys) {
      V16 sum[N * kStripKeys], rows[N];
      each<N * kStripKeys>([&](auto j) { sum[j] = V16::broadcast(0.0f); });
      const float* q = q_ + i;
      const float* keys = k_ + b * call_.page_size() + first;
      for (int d = 0; d < call_.head_dim; d++) {
        each<N>([&](auto j) { rows[j] = V16::load(q + j * kLanes); });
        each<N * kStripKeys>([&](auto j) { sum[j] = fma(rows[j % N], V16::broadcast(keys[j / N]), sum[j]); });
        q += kTileRows;
        keys += kPage;
      }
      float* p = p_ + RowsTogether::at(i, b * kPage + first);
      each<N * kStripKeys>([&](auto j) { sum[j].store(p + RowsTogether::at(j % N * kLanes, j / N)); });
    }
  }

  // soften() for sixteen rows that do not all see the whole page, the first of k_. If a row sees a key, all rows after
  // it do too.
  void soften_some(int i, int64_t first_key) {
    int hidden[kPage];  // rows that do not see key t
    for (int t = 0, row = 0; t < kPage; t++) {
      while (row < kLanes && limit_[i + row] <= first_key + t) row++;
      hidden[t] = row;
    }
    soften(i, 0, [&](int t, V16 x, V16 otherwise) { return first(hidden[t], otherwise, x); });
  }

  // Turns the scores of the rows i..i+15 in page b into probabilities relative to their new maxima, in place, and
  // stores the factor for acc in correction_. seen(t, x, otherwise) selects x in the lanes whose row sees key t.
  template <class Seen>
  void soften(int i, int b, const Seen& seen) {
    float* p = p_ + RowsTogether::at(i, b * kPage);
    const V16 old = V16::load(highest_ + i);
    V16 highest = old;
    for (int t = 0; t < kPage; t++) highest = seen(t, pick_max(V16::load(p + t * kTileRows), highest), highest);
    V16 total = V16::load(total_ + i);
    const bool raised = raised_[b][i / kLanes] = any_greater(highest, old);
    if (raised) {
      const V16 correction = exp_of_small(old - highest);  // 1 where the maximum stays
      total = total * correction;
      highest.store(highest_ + i);
      correction.store(correction_[b] + i);
    }
    V16 sum = V16::broadcast(0.0f);
    for (int t = 0; t < kPage; t++) {
      const V16 x = exp_of_small(V16::load(p + t * kTileRows) - highest);
      const V16 probability = seen(t, x, V16::broadcast(0.0f));
      probability.store(p + t * kTileRows);
      sum = sum + probability;
    }
    (total + sum).store(total_ + i);
  }

  void scale_values(int i, const float* correction) {
    for (int r = 0; r < kLanes; r++) {
      if (correction[r] == 1.0f) continue;
      float* acc = acc_ + (i + r) * stride_;
      for (int d = 0; d < stride_; d += kLanes) (V16::load(acc + d) * V16::broadcast(correction[r])).store(acc + d);
    }
  }

  // Multiplies acc[i][d] by its correction and adds p[t][i] * v[t][d] for t in order, page after page, for N rows from
  // row i on and M registers of d.
  template <int N, int M>
  void weigh_pages(int i, int d, int pages) {
    float* acc = acc_ + i * stride_ + d;
    V16 sum[N * M], values[M];
    each<N * M>([&](auto j) { sum[j] = V16::load(acc + j / M * stride_ + j % M * kLanes); });
    const float* p = p_ + i;
    const float* v = v_ + d;
    for (int b = 0; b < pages; b++) {
      if (raised_[b][i / kLanes]) {
        const float* correction = correction_[b] + i;
        each<N * M>([&](auto j) { sum[j] = sum[j] * V16::broadcast(correction[j / M]); });
      }
      for (int t = 0; t < kPage; t++) {
        each<M>([&](auto j) { values[j] = V16::load(v + j * kLanes); });
        each<N * M>([&](auto j) { sum[j] = fma(V16::broadcast(p[j / M]), values[j % M], sum[j]); });
        p += kTileRows;
        v += stride_;
      }
    }
    each<N * M>([&](auto j) { sum[j].store(acc + j / M * stride_ + j % M * kLanes); });
  }

  const AttentionCall<E>& call_;
  const int stride_;
  int filled_ = 0;    // number of rows, rounded up to a whole register
  float* const q_;    // [D][kTileRows], scaled
  float* const acc_;  // [kTileRows][stride]
  float* const k_;    // [kAtOnce][D][16]
  float* const v_;    // [kAtOnce][16][stride]
  float* const p_;    // [kAtOnce][16][kTileRows]
  float highest_[kTileRows];
  float total_[kTileRows];
  int64_t limit_[kTileRows];
  float correction_[kAtOnce][kTileRows];  // valid where raised_, which has an entry for sixteen rows
  bool raised_[kAtOnce][kTileRows / kLanes];
};

}  // namespace blockrelay
