// Attention of a tile with many query rows, as in prefill: a register holds sixteen query rows, so that maxima, exp and
// sums of the softmax need no exchange between lanes. Pages are widened to float once per tile. Several pages that all
// rows see whole are taken at a time, so that the weighted values stay in registers from page to page.
#pragma once

#include "attention_tile.h"

namespace blockrelay {

constexpr int kAhead = 3;  // pages to prefetch ahead: computing one takes less time than a memory access

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
    return (kTileRows + kAtOnce * kPage) * floats + kSpanKeys * kTileRows;
  }

  // Computes the spans of a tile from `first` to `end` - 1, and calls done(i, span, softmax) for each of them and each
  // query row i that sees a key of it.
  template <class Done>
  void run(const Tile& tile, int64_t first, int64_t end, const Done& done) {
    load(tile);
    const int64_t last_page = (call_.limit(tile, tile.count - 1) - 1) / kPage;
    for (int64_t span = first; span < end; span++) {
      const int64_t first_page = span * kSpanPages;
      pages_ = int(std::min<int64_t>(last_page + 1 - first_page, kSpanPages));
      for (int b = 0; b < pages_; b++) page_[b] = call_.page(tile, first_page + b);
      for (int i = 0; i < filled_; i++) seen_[i] = call_.seen(tile, std::min(i, tile.count - 1), span);
      attend(tile.count);
      for (int i = 0; i < tile.count; i++)
        if (seen_[i]) done(i, span, Softmax{highest_[i], total_[i], acc_ + i * stride_});
    }
  }

 private:
  // Loads the scaled queries. Rows beyond the tile that fill the last register are computed from zeros and never
  // written.
  void load(const Tile& tile) {
    const float scale = 1.0f / __builtin_sqrtf(float(call_.head_dim));
    filled_ = (tile.count + kLanes - 1) / kLanes * kLanes;
    for (int i = 0; i < filled_; i++) {
      const float* q = call_.q + call_.offset(tile, i < tile.count ? i : 0);
      const float times = i < tile.count ? scale : 0.0f;
      for (int d = 0; d < call_.head_dim; d++) q_[d * kTileRows + i] = q[d] * times;
    }
  }

  // Computes the softmax of a span for the first `count` query rows. Later rows see as many keys as earlier ones, or
  // more. Rows that see no key of the span may have any result.
  void attend(int count) {
    const int whole = seen_[0] / kPage;  // pages that all rows see whole
    for (int b = 0; b < pages_;) {
      const int some = b < whole ? std::min(whole - b, kAtOnce) : 1;
      for (int c = 0; c < some; c++) {
        fetch(b + c + kAhead < pages_ ? call_.k_pages + page_[b + c + kAhead] : call_.v_pages + page_[0]);
        widen_keys(b + c, c);
      }
      score_from(first_to_see(b), b, some);
      b += some;
    }
    for (int i = 0; i < filled_; i += kLanes) soften(i);
    std::memset(acc_, 0, size_t(filled_) * size_t(stride_) * sizeof(float));
    for (int b = 0; b < pages_;) {
      const int some = b < whole ? std::min(whole - b, kAtOnce) : 1;
      for (int c = 0; c < some; c++) {
        fetch(call_.v_pages + page_[std::min(b + c + kAhead, pages_ - 1)]);
        widen_values(b + c, c);
      }
      if (b < whole)
        weigh_whole(count, b, some);
      else
        weigh_some(count, b);
      b += some;
    }
  }

  // The first of sixteen rows of which any sees a key of page b.
  int first_to_see(int b) const {
    int i = 0;
    while (seen_[i + kLanes - 1] <= b * kPage) i += kLanes;
    return i;
  }

  // Prefetches a page into L2, all at once: computing one takes long enough here.
  void fetch(const E* page) const {
    constexpr int line = 64 / sizeof(E);
    for (int64_t i = 0; i < call_.page_size(); i += line) __builtin_prefetch(page + i, 0, 2);
  }

  // Widens the keys of page b of the span into the c-th page of k_.
  void widen_keys(int b, int c) {
    const E* from = call_.k_pages + page_[b];
    float* k = k_ + c * call_.page_size();
    for (int64_t i = 0; i < call_.page_size(); i += kLanes) V16::load(from + i).store(k + i);
  }

  // Widens the values of page b of the span into the c-th page of v_, padded with zeros up to the stride.
  void widen_values(int b, int c) {
    const int dim = call_.head_dim;
    for (int t = 0; t < kPage; t++) {
      const E* from = call_.v_pages + page_[b] + t * dim;
      float* v = v_ + (c * kPage + t) * stride_;
      for (int d = 0; d < dim; d += kLanes) load_some(from + d, lanes_left(d, dim)).store(v + d);
    }
  }

  // The scores or probabilities of row i and its neighbours for page b of the span.
  float* scores(int i, int b) const {
    return p_ + i / kLanes * (kSpanKeys * kLanes) + RowsTogether::at(i % kLanes, b * kPage);
  }

  // score() for the rows from i on and `pages` pages of k_, which are the pages from b on of the span.
  void score_from(int i, int b, int pages) {
    for (; i + kStripVectors * kLanes <= filled_; i += kStripVectors * kLanes)
      for (int c = 0; c < pages; c++) score<kStripVectors>(i, b + c, c);
    for (; i < filled_; i += kLanes)
      for (int c = 0; c < pages; c++) score<1>(i, b + c, c);
  }

  // p[t][i] = sum over d of q[i][d] * k[d][t], for page b, which is the c-th of k_, and N registers of rows from row i
  // on, kStripKeys keys at a time.
  template <int N>
  void score(int i, int b, int c) {
    for (int first = 0; first < kPage; first += kStripKeys) {
      V16 sum[N * kStripKeys], rows[N];
      each<N * kStripKeys>([&](auto j) { sum[j] = V16::broadcast(0.0f); });
      const float* q = q_ + i;
      const float* keys = k_ + c * call_.page_size() + first;
      for (int d = 0; d < call_.head_dim; d++) {
        each<N>([&](auto j) { rows[j] = V16::load(q + j * kLanes); });
        each<N * kStripKeys>([&](auto j) { sum[j] = fma(rows[j % N], V16::broadcast(keys[j / N]), sum[j]); });
        q += kTileRows;
        keys += kPage;
      }
      each<N * kStripKeys>([&](auto j) { sum[j].store(scores(i + j % N * kLanes, b) + (first + j / N) * kLanes); });
    }
  }

  // Turns the scores of the rows i..i+15 into probabilities relative to their maxima, in place.
  void soften(int i) {
    const int together = seen_[i], end = seen_[i + kLanes - 1];  // keys that all of the rows see, and that any sees
    float* p = scores(i, 0);
    uint8_t hidden[kSpanKeys];  // rows that do not see key t
    for (int t = together, row = 0; t < end; t++) {
      while (seen_[i + row] <= t) row++;
      hidden[t] = uint8_t(row);
    }
    V16 highest = V16::broadcast(kLowest);
    for (int t = 0; t < together; t++) highest = pick_max(V16::load(p + t * kLanes), highest);
    for (int t = together; t < end; t++)
      highest = first(hidden[t], highest, pick_max(V16::load(p + t * kLanes), highest));
    V16 sum[kPage];
    for (auto& one : sum) one = V16::broadcast(0.0f);
    for (int t = 0; t < end; t++) {
      V16 x = exp_of_small(V16::load(p + t * kLanes) - highest);
      if (t >= together) x = first(hidden[t], V16::broadcast(0.0f), x);
      x.store(p + t * kLanes);
      sum[t % kPage] = sum[t % kPage] + x;
    }
    V16 total = sum[0];
    for (int t = 1; t < kPage; t++) total = total + sum[t];
    highest.store(highest_ + i);
    total.store(total_ + i);
  }

  // Adds `pages` pages of v_, which are the pages from b on of the span and which all rows see whole.
  void weigh_whole(int count, int b, int pages) {
    in_groups(0, count, [&](int i, auto n) {
      constexpr int rows = decltype(n)::value;
      int d = 0;
      for (; d + kValueVectors * kLanes <= stride_; d += kValueVectors * kLanes)
        weigh_pages<rows, kValueVectors>(i, d, b, pages);
      for (; d < stride_; d += kLanes) weigh_pages<rows, 1>(i, d, b, pages);
    });
  }

  // Adds p[t][i] * v[t][d] to acc[i][d] for t in order, page after page, for N rows from row i on and M registers of d.
  template <int N, int M>
  void weigh_pages(int i, int d, int b, int pages) {
    float* acc = acc_ + i * stride_ + d;
    V16 sum[N * M], values[M];
    each<N * M>([&](auto j) { sum[j] = V16::load(acc + j / M * stride_ + j % M * kLanes); });
    const float* p = scores(i, b);
    const float* v = v_ + d;
    for (int t = 0; t < pages * kPage; t++) {
      each<M>([&](auto j) { values[j] = V16::load(v + j * kLanes); });
      each<N * M>([&](auto j) { sum[j] = fma(V16::broadcast(p[j / M]), values[j % M], sum[j]); });
      p += kLanes;
      v += stride_;
    }
    each<N * M>([&](auto j) { sum[j].store(acc + j / M * stride_ + j % M * kLanes); });
  }

  // Adds the first page of v_, page b of the span, of which some rows see only a part, or nothing.
  void weigh_some(int count, int b) {
    in_groups(first_to_see(b), count, [&](int i, auto n) {
      constexpr int rows = decltype(n)::value;
      int visible[rows];
      for (int r = 0; r < rows; r++) visible[r] = keys_of_page(seen_[i + r], b);
      weigh_visible<rows, RowsTogether>(acc_ + i * stride_, stride_, scores(i, b), v_, stride_, visible);
    });
  }

  const AttentionCall<E>& call_;
  const int stride_;
  int filled_ = 0;    // number of rows, rounded up to a whole register
  int pages_ = 0;     // of the span that any row sees
  float* const q_;    // [D][kTileRows], scaled
  float* const acc_;  // [kTileRows][stride]
  float* const k_;    // [kAtOnce][D][16]
  float* const v_;    // [kAtOnce][16][stride]
  float* const p_;    // [kTileRows/16][kSpanKeys][16]: scores, then probabilities
  int64_t page_[kSpanPages];
  int seen_[kTileRows];  // keys of the span that a row sees
  float highest_[kTileRows];
  float total_[kTileRows];
};

}  // namespace blockrelay
