// Attention of a tile with few query rows, as in decoding: a register holds sixteen keys.
#pragma once

#include "attention_tile.h"

namespace blockrelay {

constexpr int kFewRows = 8;

// s[i][t] = sum over d of q[i][d] * k[d][t], for N query rows. Prefetches next_k, as large as a page's keys, into L2 on
// the way: pages are not contiguous, so the hardware cannot predict the next one, and prefetching all at once would
// stall.
template <int N, class E>
inline void score(const float* q, int stride, const E* k, const E* next_k, int dim, float* s) {
  V16 sum[N];
  each<N>([&](auto i) { sum[i] = V16::broadcast(0.0f); });
  for (int d = 0; d < dim; d++) {
    __builtin_prefetch(next_k + d * kPage, 0, 2);
    const V16 keys = V16::load(k + d * kPage);
    each<N>([&](auto i) { sum[i] = fma(V16::broadcast(q[i * stride + d]), keys, sum[i]); });
  }
  each<N>([&](auto i) { sum[i].store(s + i * kPage); });
}

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
    return size_t(2 * kFewRows * call.stride() + kFewRows * kPage);
  }

  void run(const Tile& tile) {
    const float scale = 1.0f / __builtin_sqrtf(float(call_.head_dim));
    for (int i = 0; i < tile.count; i++) {
      const float* q = call_.q + call_.offset(tile, i);
      for (int d = 0; d < call_.head_dim; d++) q_[i * stride_ + d] = q[d] * scale;
      std::memset(acc_ + i * stride_, 0, size_t(stride_) * sizeof(float));
      highest_[i] = -1e30f;
      total_[i] = 0.0f;
      limit_[i] = call_.limit(tile, i);
    }
    const int64_t pages = (limit_[tile.count - 1] + kPage - 1) / kPage;
    int begin = 0;
    for (int64_t index = 0; index < pages; index++) {
      while (limit_[begin] <= index * kPage) begin++;
      const int64_t at = call_.page(tile, index);
      const int64_t next = call_.page(tile, index + kAhead < pages ? index + kAhead : index);
      next_k_ = call_.k_pages + next;
      next_v_ = call_.v_pages + next;
      in_groups(begin, tile.count, [&](int i, auto n) {
        attend<decltype(n)::value>(call_.k_pages + at, call_.v_pages + at, index * kPage, i);
      });
    }
    for (int i = 0; i < tile.count; i++) call_.write(tile, i, acc_ + i * stride_, total_[i]);
  }

 private:
  // Adds one page to the query rows i..i+N-1, which see at least its first key.
  template <int N>
  void attend(const E* k, const E* v, int64_t first_key, int i) {
    const int dim = call_.head_dim;
    score<N>(q_ + i * stride_, stride_, k, next_k_, dim, p_);
    int visible[N];
    for (int r = 0; r < N; r++) {
      const int64_t keys = limit_[i + r] - first_key;
      visible[r] = keys < kPage ? int(keys) : kPage;
    }
    soften<N>(i, visible);
    constexpr int line = 64 / sizeof(E);
    for (int at = 0; at < dim * kPage; at += line) __builtin_prefetch(next_v_ + at, 0, 2);
    weigh_visible<N, KeysTogether>(acc_ + i * stride_, stride_, p_, v, dim, visible);
  }

  // Turns the scores in p_ of the query rows i..i+N-1 into probabilities relative to their new maxima, in place.
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

  // Sets a new maximum for query row i and rescales its sums.
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
  const int stride_;
  float* const q_;
  float* const acc_;
  float* const p_;
  const E* next_k_ = nullptr;
  const E* next_v_ = nullptr;
  float highest_[kFewRows];
  float total_[kFewRows];
  int64_t limit_[kFewRows];
};

}  // namespace blockrelay
