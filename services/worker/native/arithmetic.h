// Sums, exp, norm and quantisation as kernels/specification.py defines them, on sixteen lanes.
#pragma once

#include "lanes.h"

namespace blockrelay {

constexpr int kSumLanes = 64;  // accumulators of a sum of squares: four registers, whose chains run side by side
constexpr int kGroupDepth = 32;  // inputs of a linear layer that share a scale where rows are in groups

inline float nan() { return bit_cast<float>(0x7FC00000u); }

// Number of elements from i to n, sixteen at most.
inline int lanes_left(int64_t i, int64_t n) { return n - i < kLanes ? int(n - i) : kLanes; }

template <class E>
inline V16 load_some(const E* p, int count) {
  return count == kLanes ? V16::load(p) : V16::load(p, count);
}

inline void store_some(float* p, V16 x, int count) {
  if (count == kLanes)
    x.store(p);
  else
    x.store(p, count);
}

// Sum of the lanes, from the first to the last.
inline float add_lanes(V16 x) {
  float lane[kLanes];
  x.store(lane);
  float sum = lane[0];
  for (int i = 1; i < kLanes; i++) sum += lane[i];
  return sum;
}

// exp() for x <= 88 or NaN.
inline V16 exp_of_small(V16 x) {
  x = pick_max(V16::broadcast(-87.0f), x);
  V16 shifted = x * V16::broadcast(1.44269504f) + V16::broadcast(kRound);
  V16 k = shifted - V16::broadcast(kRound);
  V16 y = fma(k, V16::broadcast(-0.693359375f), x);
  y = fma(k, V16::broadcast(2.12194440e-4f), y);
  V16 p = V16::broadcast(1.9875691500e-4f);
  p = fma(p, y, V16::broadcast(1.3981999507e-3f));
  p = fma(p, y, V16::broadcast(8.3334519073e-3f));
  p = fma(p, y, V16::broadcast(4.1665795894e-2f));
  p = fma(p, y, V16::broadcast(1.6666665459e-1f));
  p = fma(p, y, V16::broadcast(5.0000001201e-1f));
  p = fma(p, y * y, y) + V16::broadcast(1.0f);
  return p * power_of_two(shifted);
}

inline V16 exp(V16 x) { return exp_of_small(pick_min(V16::broadcast(88.0f), x)); }

inline V16 swiglu(V16 gate, V16 up) {
  return gate / (V16::broadcast(1.0f) + exp(negate(gate))) * up;
}

// The factor of x in norm(), before the weight: 1 / sqrt(mean square + eps), or NaN if that is not finite.
inline float inverse_root_mean_square(const float* x, int64_t n, float eps) {
  constexpr int registers = kSumLanes / kLanes;
  V16 sum[registers];
  each<registers>([&](auto j) { sum[j] = V16::broadcast(0.0f); });
  int64_t i = 0;
  for (; i + kSumLanes <= n; i += kSumLanes)
    each<registers>([&](auto j) {
      const V16 some = V16::load(x + i + j * kLanes);
      sum[j] = fma(some, some, sum[j]);
    });
  for (int j = 0; i < n; i += kLanes, j++) {
    const V16 some = load_some(x + i, lanes_left(i, n));
    sum[j] = fma(some, some, sum[j]);
  }
  float spread = add_lanes((sum[0] + sum[1]) + (sum[2] + sum[3])) / float(n) + eps;
  bool finite = (bit_cast<uint32_t>(spread) & kMagnitude) < kInfinityBits;
  return finite ? 1.0f / __builtin_sqrtf(spread) : nan();
}

// Multiplies each block of `size` values of x [n], a power of two from 16 on, by a Hadamard matrix, in butterflies.
inline void hadamard(float* x, int64_t n, int64_t size) {
  for (float* block = x; block != x + n; block += size) {
    for (int64_t i = 0; i < size; i += kLanes)
      butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(V16::load(block + i))))).store(block + i);
    for (int64_t step = kLanes; step < size; step *= 2)
      for (int64_t i = 0; i < size; i += kLanes) {
        if (i & step) continue;
        const V16 first = V16::load(block + i), second = V16::load(block + i + step);
        (first + second).store(block + i);
        (first - second).store(block + i + step);
      }
  }
}

// Quantises the n values that value(i, lanes) returns, which is called twice for each i. Returns the row scale.
template <class Value>
inline float quantise_row(Value value, int64_t n, uint8_t* u) {
  V16 largest = V16::broadcast(0.0f);
  for (int64_t i = 0; i < n; i += kLanes) largest = max_magnitude(largest, value(i, lanes_left(i, n)));
  float lane[kLanes];
  largest.store(lane);
  uint32_t bits = 0;
  for (float each : lane) bits = bit_cast<uint32_t>(each) > bits ? bit_cast<uint32_t>(each) : bits;
  if (bits >= kInfinityBits) {
    std::memset(u, 128, size_t(n));
    return nan();
  }
  float scale = bit_cast<float>(bits) * (1.0f / 127.0f) + 1e-12f;
  for (int64_t i = 0; i < n; i += kLanes) {
    int lanes = lanes_left(i, n);
    (value(i, lanes) / V16::broadcast(scale) + V16::broadcast(kRound)).store_zero_128(u + i, lanes);
  }
  return scale;
}

// Quantises the n values that value(i, lanes) returns, a multiple of 32, in groups of 32 with one of `scales` each.
template <class Value>
inline void quantise_groups(Value value, int64_t n, uint8_t* u, float* scales) {
  static_assert(kGroupDepth == 2 * kLanes, "a group is two V16");
  V16 largest = V16::broadcast(0.0f);
  for (int64_t i = 0; i < n; i += kGroupDepth) {
    const V16 first = value(i, kLanes), second = value(i + kLanes, kLanes);
    const V16 magnitude = max_magnitude(max_magnitude(V16::broadcast(0.0f), first), second);
    largest = max_magnitude(largest, magnitude);
    const float scale = highest_lane(magnitude) * (1.0f / 127.0f) + 1e-12f;
    *scales++ = scale;
    (first / V16::broadcast(scale) + V16::broadcast(kRound)).store_zero_128(u + i, kLanes);
    (second / V16::broadcast(scale) + V16::broadcast(kRound)).store_zero_128(u + i + kLanes, kLanes);
  }
  float lane[kLanes];
  largest.store(lane);
  bool finite = true;
  for (float each : lane) finite &= bit_cast<uint32_t>(each) < kInfinityBits;
  if (finite) return;
  // What was written above for a row that is not finite is not used.
  std::memset(u, 128, size_t(n));
  for (int64_t g = 1; g <= n / kGroupDepth; g++) scales[-g] = nan();
}

// Quantises n values with one scale, or in groups of `group` where that is not 0; `scales` are those of all rows.
template <class Value>
inline void quantise_values(Value value, int64_t row, int64_t n, int64_t group, uint8_t* u, float* scales) {
  if (group)
    quantise_groups(value, n, u + row * n, scales + row * (n / kGroupDepth));
  else
    scales[row] = quantise_row(value, n, u + row * n);
}

}  // namespace blockrelay
