// Attention of a tile with many query rows, as in reading a prompt: a register holds sixteen query rows, so that
// maxima, exp and sums of the softmax need no exchange between lanes. float16 pages are widened once per tile.
#pragma once

#include "attention_tile.h"

namespace blockrelay {

template <class E>
class ManyRows {
 public:
  ManyRows(const AttentionCall<E>& call, float* memory)
      : call_(call),
        stride_(call.stride()),
        q_(memory),
        acc_(q_ + kTileRows * call.head_dim),
        k_wide_(acc_ + kTileRows * stride_),
        v_wide_(k_wide_ + call.page_size()),
        p_(v_wide_ + call.page_size()) {}

  static size_t memory(const AttentionCall<E>& call) {
    return size_t(kTileRows * (call.head_dim + call.stride()) + 2 * call.page_size() + kTileRows * kPage);
  }

  void run(const Tile& tile) {
    begin(tile);
    const int64_t pages = (limit_[tile.count - 1] + kPage - 1) / kPage;
    for (int64_t index = 0; index < pages; index++) {
      fetch(call_.page(tile, index + kAhead < pages ? index + kAhead : index));
      const int64_t at = call_.page(tile, index);
      const float* k = widen(call_.k_pages + at, k_wide_);
      const float* v = widen(call_.v_pages + at, v_wide_);
      visit(k, v, index * kPage, tile.count);
    }
    for (int i = 0; i < tile.count; i++) call_.write(tile, i, acc_ + i * stride_, total_[i]);
  }

 private:
  // Rows that fill the last register are computed along, from zeros, and never written.
  void begin(const Tile& tile) {
    const float scale = 1.0f / __builtin_sqrtf(float(call_.head_dim));
    vectors_ = (tile.count + kLanes - 1) / kLanes;
    for (int i = 0; i < vectors_ * kLanes; i++) {
      const float* q = call_.q + call_.offset(tile, i < tile.count ? i : 0);
      const float times = i < tile.count ? scale : 0.0f;
      for (int d = 0; d < call_.head_dim; d++) q_[d * kTileRows + i] = q[d] * times;
      std::memset(acc_ + i * stride_, 0, size_t(stride_) * sizeof(float));
      highest_[i] = -1e30f;
      total_[i] = 0.0f;
      limit_[i] = call_.limit(tile, i);
    }
  }

  // The page at this place into L2, all at once: a page takes long to compute here.
  void fetch(int64_t at) const {
    constexpr int line = 64 / sizeof(E);
    for (int64_t i = at; i < at + call_.page_size(); i += line) {
      __builtin_prefetch(call_.k_pages + i, 0, 2);
      __builtin_prefetch(call_.v_pages + i, 0, 2);
    }
  }

  const float* widen(const float* page, float*) const { return page; }
  const float* widen(const Half* page, float* to) const {
    for (int64_t i = 0; i < call_.page_size(); i += kLanes) V16::load(page + i).store(to + i);
    return to;
  }

  // One page for all rows; those that see none of it stay as they are.
  void visit(const float* k, const float* v, int64_t first_key, int count) {
    int at = 0;
    for (; at + kStripVectors <= vectors_; at += kStripVectors) score<kStripVectors>(k, at * kLanes);
    for (; at < vectors_; at++) score<1>(k, at * kLanes);
    for (int i = 0; i < vectors_ * kLanes; i += kLanes) {
      if (limit_[i] - first_key >= kPage)
        soften(i, [](int, V16 x, V16) { return x; });
      else
        soften_some(i, first_key);
    }
    const int dim = call_.head_dim;
    const bool all = limit_[0] - first_key >= kPage;
    in_groups(0, count, [&](int i, auto n) {
      constexpr int rows = decltype(n)::value;
      float* acc = acc_ + i * stride_;
      if (all) return weigh<rows, RowsTogether>(acc, stride_, p_ + i, v, dim, 0, kPage);
      int visible[rows];
      for (int r = 0; r < rows; r++) {
        const int64_t keys = limit_[i + r] - first_key;
        visible[r] = keys >= kPage ? kPage : keys < 0 ? 0 : int(keys);
      }
      weigh_visible<rows, RowsTogether>(acc, stride_, p_ + i, v, dim, visible);
    });
  }

  // p_[t][i] = sum over d of q[i][d] * k[d][t], for N registers of rows from row i on, kStripKeys keys at a time.
  template <int N>
  void score(const float* k, int i) {
    for (int first = 0; first < kPage; first += kStripKeys) {
      V16 sum[N * kStripKeys], rows[N];
      each<N * kStripKeys>([&](auto j) { sum[j] = V16::broadcast(0.0f); });
      const float* q = q_ + i;
      const float* keys = k + first;
      for (int d = 0; d < call_.head_dim; d++) {
        each<N>([&](auto j) { rows[j] = V16::load(q + j * kLanes); });
        each<N * kStripKeys>([&](auto j) { sum[j] = fma(rows[j % N], V16::broadcast(keys[j / N]), sum[j]); });
        q += kTileRows;
        keys += kPage;
      }
      each<N * kStripKeys>([&](auto j) { sum[j].store(p_ + RowsTogether::at(i + j % N * kLanes, first + j / N)); });
    }
  }

  // soften() for sixteen rows that do not all see the whole page. Whoever sees a key is followed by rows that do too.
  void soften_some(int i, int64_t first_key) {
    int hidden[kPage];  // rows that do not see key t
    for (int t = 0, row = 0; t < kPage; t++) {
      while (row < kLanes && limit_[i + row] <= first_key + t) row++;
      hidden[t] = row;
    }
    soften(i, [&](int t, V16 x, V16 otherwise) { return first(hidden[t], otherwise, x); });
  }

  // Scores of the rows i..i+15 to probabilities relative to their new maxima, in place. seen(t, x, otherwise) takes x
  // in the lanes whose row sees key t.
  template <class Seen>
  void soften(int i, const Seen& seen) {
    float* p = p_ + i;
    const V16 old = V16::load(highest_ + i);
    V16 highest = old;
    for (int t = 0; t < kPage; t++) highest = seen(t, pick_max(V16::load(p + t * kTileRows), highest), highest);
    V16 total = V16::load(total_ + i);
    if (any_greater(highest, old)) {
      const V16 correction = exp_of_small(old - highest);  // 1 where the maximum stays
      total = total * correction;
      highest.store(highest_ + i);
      scale_values(i, correction);
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

  void scale_values(int i, V16 correction) {
    float lane[kLanes];
    correction.store(lane);
    for (int r = 0; r < kLanes; r++) {
      if (lane[r] == 1.0f) continue;
      float* acc = acc_ + (i + r) * stride_;
      for (int d = 0; d < stride_; d += kLanes) (V16::load(acc + d) * V16::broadcast(lane[r])).store(acc + d);
    }
  }

  const AttentionCall<E>& call_;
  const int stride_;
  int vectors_ = 0;      // registers of query rows
  float* const q_;       // [D][kTileRows], scaled
  float* const acc_;     // [kTileRows][stride]
  float* const k_wide_;  // [D][16]
  float* const v_wide_;  // [16][D]
  float* const p_;       // [16][kTileRows]
  float highest_[kTileRows];
  float total_[kTileRows];
  int64_t limit_[kTileRows];
};

}  // namespace blockrelay
