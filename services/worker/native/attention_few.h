// Attention of a tile with few query rows, as in decoding: a register holds sixteen keys.
#pragma once

#include "attention_tile.h"

namespace blockrelay {

constexpr int kFewRows = 8;
constexpr int kFetchAhead = 4;  // pages between the one that is computed and the one that is prefetched

// Prefetches a list of pages into L2, little by little. Pages are not contiguous, so the hardware cannot predict the
// next one; a memory that always has something to fetch, and never too much at once, serves up to a quarter more.
template <class E>
class Prefetcher {
 public:
  // Begins with the page at `first`; `last` is the last one of the list.
  Prefetcher(const E* const* first, const E* const* last, int64_t page_size)
      : page_(first), last_(last), size_(page_size), next_(*first), end_(next_ + page_size) {}

  // Prefetches the next `count` elements.
  template <int count>
  __attribute__((always_inline)) void elements() {
    // A loop rather than each(): GCC drops calls of functions that only prefetch.
    for (int i = 0; i < count; i += 64 / sizeof(E)) __builtin_prefetch(next_ + i, 0, 2);
    next_ += count;
    if (next_ < end_) return;
    if (page_ != last_) page_++;
    next_ = *page_;
    end_ = next_ + size_;
  }

 private:
  const E* const* page_;
  const E* const* last_;
  int64_t size_;
  const E* next_;
  const E* end_;
};

template <class E>
class FewRows {
 public:
  FewRows(const AttentionCall<E>& call, float* memory)
      : call_(call),
        stride_(call.stride()),
        q_(memory),
        acc_(q_ + kFewRows * stride_),
        p_(acc_ + kFewRows * stride_) {}

  static size_t memory(const AttentionCall<E>& call) {
    return size_t(2 * kFewRows * call.stride() + kFewRows * kSpanKeys);
  }

  // Computes the spans of a tile from `first` to `end` - 1, and calls done(i, span, softmax) for each of them and each
  // query row i that sees a key of it.
  template <class Done>
  void run(const Tile& tile, int64_t first, int64_t end, const Done& done) {
    load(tile);
    for (int64_t span = first; span < end; span++) {
      list_pages(tile, span * kSpanPages);
      int begin = 0;  // the first row that sees a key
      for (int i = 0; i < tile.count; i++) {
        seen_[i] = call_.seen(tile, i, span);
        if (seen_[i] == 0) begin = i + 1;
      }
      attend(begin, tile.count);
      for (int i = begin; i < tile.count; i++) done(i, span, Softmax{highest_[i], total_[i], acc_ + i * stride_});
    }
  }

 private:
  // Loads the scaled queries.
  void load(const Tile& tile) {
    const float scale = 1.0f / __builtin_sqrtf(float(call_.head_dim));
    for (int i = 0; i < tile.count; i++) {
      const float* q = call_.q + call_.offset(tile, i);
      for (int d = 0; d < call_.head_dim; d++) q_[i * stride_ + d] = q[d] * scale;
    }
  }

  // Lists the pages of a span in the order in which they are needed, then the first ones of the next span.
  void list_pages(const Tile& tile, int64_t first) {
    const int64_t last = (call_.limit(tile, tile.count - 1) - 1) / kPage;
    pages_ = int(std::min<int64_t>(last + 1 - first, kSpanPages));
    for (int b = 0; b < pages_; b++) {
      const int64_t at = call_.page(tile, first + b);
      needed_[b] = call_.k_pages + at;
      needed_[pages_ + b] = call_.v_pages + at;
    }
    for (int b = 0; b < 2 * kFetchAhead; b++)
      needed_[2 * pages_ + b] = call_.k_pages + call_.page(tile, std::min(first + kSpanPages + b, last));
  }

  // Computes the softmax of a span for the query rows from `begin` to `end` - 1. Keys and values are prefetched at
  // seven eighths of the pace at which they are computed, because soften() has its share too: kFetchAhead pages.
  void attend(int begin, int end) {
    const E* const* last = needed_ + 2 * (pages_ + kFetchAhead) - 1;
    Prefetcher<E> ahead(needed_ + std::min(kFetchAhead, pages_), last, call_.page_size());
    for (int first = 0; first < pages_; first += kAtOnce)
      in_groups(begin, end, [&](int i, auto n) {
        score_pages<decltype(n)::value>(i, first, ahead, i == begin);
      });
    const int lines = int(kFetchAhead * call_.page_size() * sizeof(E) / 64) / (kSpanPages * (end - begin));
    for (int i = begin; i < end; i++) {
      soften(i, ahead, lines);
      std::memset(acc_ + i * stride_, 0, size_t(stride_) * sizeof(float));
    }
    for (int first = 0; first < pages_; first += kAtOnce)
      in_groups(begin, end, [&](int i, auto n) {
        weigh_pages<decltype(n)::value>(i, first, ahead, i == begin);
      });
  }

  // Computes the scores of N query rows from row i on, for up to kAtOnce pages of the span from `first` on.
  template <int N>
  void score_pages(int i, int first, Prefetcher<E>& ahead, bool fetch) {
    constexpr int together = std::min(kAtOnce, std::max(1, kScoreRows / N));  // pages, for kScoreRows chains of sums
    const int end = std::min(first + kAtOnce, pages_);
    int b = first;
    for (; b + together <= end; b += together) score<N, together>(i, b, ahead, fetch);
    for (; b < end; b++) score<N, 1>(i, b, ahead, fetch);
  }

  // p[i][t] = sum over d of q[i][d] * k[d][t], for N query rows from row i on, and P pages from page b on.
  template <int N, int P>
  void score(int i, int b, Prefetcher<E>& prefetcher, bool fetch) {
    V16 sum[N * P], keys[P];
    const E* k[P];
    each<P>([&](auto j) { k[j] = needed_[b + j]; });
    each<N * P>([&](auto j) { sum[j] = V16::broadcast(0.0f); });
    const float* q = q_ + i * stride_;
    const int fetching = fetch ? call_.head_dim / 8 * 7 : 0;
    Prefetcher<E> ahead = prefetcher;
    for (int d = 0; d < call_.head_dim; d++) {
      if (d < fetching) ahead.template elements<P * kLanes>();
      each<P>([&](auto j) { keys[j] = V16::load(k[j] + d * kPage); });
      each<N * P>([&](auto j) { sum[j] = fma(V16::broadcast(q[j / P * stride_ + d]), keys[j % P], sum[j]); });
    }
    prefetcher = ahead;
    float* p = p_ + KeysTogether::at(i, b * kPage);
    each<N * P>([&](auto j) { sum[j].store(p + KeysTogether::at(j / P, j % P * kPage)); });
  }

  // Turns the scores of query row i into probabilities relative to their maximum, in place; prefetches `lines` a page.
  void soften(int i, Prefetcher<E>& ahead, int lines) {
    float* p = p_ + KeysTogether::at(i, 0);
    const int whole = seen_[i] / kPage, rest = seen_[i] % kPage;
    V16 top = V16::broadcast(kLowest);
    for (int b = 0; b < whole; b++) top = pick_max(V16::load(p + b * kPage), top);
    if (rest) top = first(rest, pick_max(V16::load(p + whole * kPage), top), top);
    highest_[i] = highest_lane(top);
    const V16 highest = V16::broadcast(highest_[i]);
    V16 sum = V16::broadcast(0.0f);
    for (int b = 0; b < whole + (rest != 0); b++) {
      for (int line = 0; line < lines; line++) ahead.template elements<64 / sizeof(E)>();
      V16 x = exp_of_small(V16::load(p + b * kPage) - highest);
      if (b == whole) x = first(rest, x, V16::broadcast(0.0f));
      x.store(p + b * kPage);
      sum = sum + x;
    }
    total_[i] = add_lanes(sum);
  }

  // Adds up to kAtOnce pages of values from `first` on to N query rows from row i on.
  template <int N>
  void weigh_pages(int i, int first, Prefetcher<E>& ahead, bool fetch) {
    const int end = std::min(first + kAtOnce, pages_), whole = std::min(end, seen_[i] / kPage);
    int d = 0;
    for (; d + kValueVectors * kLanes <= call_.head_dim; d += kValueVectors * kLanes)
      weigh_whole<N, kValueVectors>(i, first, whole, d, kLanes, ahead, fetch);
    for (; d + kLanes <= call_.head_dim; d += kLanes) weigh_whole<N, 1>(i, first, whole, d, kLanes, ahead, fetch);
    if (d < call_.head_dim) weigh_whole<N, 1>(i, first, whole, d, call_.head_dim - d, ahead, fetch);
    for (int b = std::max(first, whole); b < end; b++) {
      int visible[N];
      for (int r = 0; r < N; r++) visible[r] = keys_of_page(seen_[i + r], b);
      weigh_visible<N, KeysTogether>(acc_ + i * stride_, stride_, p_ + KeysTogether::at(i, b * kPage),
                                     needed_[pages_ + b], call_.head_dim, visible);
    }
  }

  // Adds the pages from `first` to `end` - 1, which all N query rows see whole, for M registers of values from d on, of
  // which the last has `lanes` lanes.
  template <int N, int M>
  __attribute__((always_inline)) void weigh_whole(int i, int first, int end, int d, int lanes,
                                                  Prefetcher<E>& prefetcher, bool fetch) {
    const int dim = call_.head_dim, fetching = fetch ? kPage / 8 * 7 : 0;
    Prefetcher<E> ahead = prefetcher;
    float* acc = acc_ + i * stride_ + d;
    V16 sum[N * M], values[M];
    each<N * M>([&](auto j) { sum[j] = V16::load(acc + j / M * stride_ + j % M * kLanes); });
    for (int b = first; b < end; b++) {
      const E* v = needed_[pages_ + b] + d;
      const float* p = p_ + KeysTogether::at(i, b * kPage);
      for (int t = 0; t < kPage; t++) {
        if (t < fetching) ahead.template elements<M * kLanes>();
        each<M>([&](auto j) { values[j] = load_some(v + t * dim + j * kLanes, j == M - 1 ? lanes : kLanes); });
        each<N * M>([&](auto j) {
          sum[j] = fma(V16::broadcast(p[KeysTogether::at(j / M, t)]), values[j % M], sum[j]);
        });
      }
    }
    prefetcher = ahead;
    each<N * M>([&](auto j) { sum[j].store(acc + j / M * stride_ + j % M * kLanes); });
  }

  const AttentionCall<E>& call_;
  const int stride_;
  float* const q_;    // [kFewRows][stride], scaled
  float* const acc_;  // [kFewRows][stride]
  float* const p_;    // [kFewRows][kSpanKeys]: scores, then probabilities
  int pages_ = 0;     // of the span that any row sees
  const E* needed_[2 * kSpanPages + 2 * kFetchAhead];  // keys of the span, values of the span, keys of the next span
  int seen_[kFewRows];                                 // keys of the span that a row sees
  float highest_[kFewRows];
  float total_[kFewRows];
};

}  // namespace blockrelay
