// Scales, biases, normalises and rotates the heads of each row, and writes keys and values to the row's page slot.
#pragma once

#include "arithmetic.h"
#include "pool.h"

namespace blockrelay {

constexpr int kMaxHeadDim = 256;

template <class E>
struct RotaryCall {
  const float* qkv;        // [R,(Hq+2*Hkv)*D]
  const float* row_scale;  // [R] or null
  const float* bias;       // [(Hq+2*Hkv)*D] or null
  const float* norm_q;     // [D] or null
  const float* norm_k;     // [D] or null
  const float* cos;        // [P,D/2]
  const float* sin;        // [P,D/2]
  const int32_t* positions;
  const int32_t* page;
  const int32_t* slot;
  E* k_pages;  // [n,Hkv,D,16]
  E* v_pages;  // [n,Hkv,16,D]
  float* q;    // [R,Hq,D]
  int64_t rows;
  float eps;
  int query_heads, kv_heads, head_dim;
};

inline void store_page(float* p, V16 x, int count) { store_some(p, x, count); }
inline void store_page(Half* p, V16 x, int count) { x.store(p, count); }

template <class E>
class RotaryRow {
 public:
  explicit RotaryRow(const RotaryCall<E>& call) : call_(call), dim_(call.head_dim) {}

  void run(int64_t row) {
    const int heads = call_.query_heads + 2 * call_.kv_heads;
    const float* qkv = call_.qkv + row * heads * dim_;
    const int64_t page = int64_t(call_.page[row]) * call_.kv_heads;
    const int slot = call_.slot[row];
    for (int h = 0; h < heads; h++) {
      scale_and_bias(qkv + h * dim_, row, h);
      if (h < call_.query_heads) {
        normalise(call_.norm_q);
        rotate(row, call_.q + (row * call_.query_heads + h) * dim_);
      } else if (h < call_.query_heads + call_.kv_heads) {
        normalise(call_.norm_k);
        rotate(row, rotated_);
        E stored[kMaxHeadDim];
        for (int d = 0; d < dim_; d += kLanes)
          store_page(stored + d, load_some(rotated_ + d, lanes_left(d, dim_)), lanes_left(d, dim_));
        E* k = call_.k_pages + (page + h - call_.query_heads) * dim_ * kLanes + slot;
        for (int d = 0; d < dim_; d++) k[d * kLanes] = stored[d];
      } else {
        E* v = call_.v_pages + ((page + h - call_.query_heads - call_.kv_heads) * kLanes + slot) * dim_;
        for (int d = 0; d < dim_; d += kLanes)
          store_page(v + d, load_some(head_ + d, lanes_left(d, dim_)), lanes_left(d, dim_));
      }
    }
  }

 private:
  void scale_and_bias(const float* x, int64_t row, int head) {
    for (int d = 0; d < dim_; d += kLanes) {
      const int lanes = lanes_left(d, dim_);
      V16 some = load_some(x + d, lanes);
      if (call_.row_scale) some = some * V16::broadcast(call_.row_scale[row]);
      if (call_.bias) some = some + load_some(call_.bias + int64_t(head) * dim_ + d, lanes);
      store_some(head_ + d, some, lanes);
    }
  }

  void normalise(const float* weight) {
    if (!weight) return;
    const V16 inverse = V16::broadcast(inverse_root_mean_square(head_, dim_, call_.eps));
    for (int d = 0; d < dim_; d += kLanes) {
      const int lanes = lanes_left(d, dim_);
      store_some(head_ + d, load_some(head_ + d, lanes) * inverse * load_some(weight + d, lanes), lanes);
    }
  }

  void rotate(int64_t row, float* out) const {
    const int half = dim_ / 2;
    const float* cos = call_.cos + int64_t(call_.positions[row]) * half;
    const float* sin = call_.sin + int64_t(call_.positions[row]) * half;
    for (int d = 0; d < half; d += kLanes) {
      const int lanes = lanes_left(d, half);
      const V16 c = load_some(cos + d, lanes), s = load_some(sin + d, lanes);
      const V16 x = load_some(head_ + d, lanes), y = load_some(head_ + half + d, lanes);
      store_some(out + d, fma(x, c, negate(y * s)), lanes);
      store_some(out + half + d, fma(y, c, x * s), lanes);
    }
  }

  const RotaryCall<E>& call_;
  const int dim_;
  float head_[kMaxHeadDim];
  float rotated_[kMaxHeadDim];
};

template <class E>
inline bool rotary_append(Pool& pool, const RotaryCall<E>& call) {
  const int64_t width = int64_t(call.query_heads + 2 * call.kv_heads) * call.head_dim;
  return pool.run(call.rows, 8, call.rows * width * 10, [&](int64_t begin, int64_t end) {
    RotaryRow<E> worker(call);
    for (int64_t row = begin; row < end; row++) worker.run(row);
    return true;
  });
}

}  // namespace blockrelay
