// The largest of many float64 numbers, without sorting them all.
#pragma once

#include <algorithm>
#include <vector>

#include "exact_math.h"

namespace blockrelay {

constexpr int kTurn = 32;  // elements of one turn of a loop, whose chains of operations run side by side

struct Candidate {
  double value;
  int64_t index;
};
inline bool before(const Candidate& a, const Candidate& b) {
  return a.value > b.value || (a.value == b.value && a.index < b.index);
}

// Writes the `count` largest of values [n] that are above `above` into `found`, in no order; of equal ones the first.
inline void find_largest(const double* values, int64_t n, int64_t count, double above, std::vector<Candidate>& found) {
  found.clear();
  if (count <= 0) return;
  const size_t most = size_t(std::min(count, n));
  const size_t room = most + std::max<size_t>(most, 64);
  for (int64_t i = 0; i < n; i += kTurn) {
    const int64_t end = std::min<int64_t>(i + kTurn, n);
    if (end - i == kTurn) {  // few are among the largest, so most of the time none of a turn is
      auto any = load_doubles(values + i) > above;
      for (int j = kDoubles; j < kTurn; j += kDoubles) any |= load_doubles(values + i + j) > above;
      int64_t lanes = 0;
      for (int j = 0; j < kDoubles; j++) lanes |= any[j];
      if (!lanes) continue;
    }
    for (int64_t j = i; j < end; j++) {
      if (!(values[j] > above)) continue;
      found.push_back({values[j], j});
      if (found.size() < room) continue;
      std::nth_element(found.begin(), found.begin() + int64_t(most) - 1, found.end(), before);
      found.resize(most);
      above = found.back().value;  // an equal value that comes later has a higher index, and loses
    }
  }
  if (found.size() > most) {
    std::nth_element(found.begin(), found.begin() + int64_t(most) - 1, found.end(), before);
    found.resize(most);
  }
}

inline void sort_by_index(std::vector<Candidate>& found) {
  std::sort(found.begin(), found.end(), [](const Candidate& a, const Candidate& b) { return a.index < b.index; });
}

// Numbers above 0 that share their exponent and the first bits of their fraction.
struct Bucket {
  double sum;
  int64_t count;
};
constexpr int kBucketShift = 46;    // bits of a double that do not matter for its bucket
constexpr int64_t kBuckets = 8192;  // those of 2**-127 to 1: weights are e**-51 at least

inline int64_t bucket_of(double x) {
  int64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return (int64_t(1023) << (52 - kBucketShift)) - (bits >> kBucketShift);
}

// Finds the last of the fewest largest of weights [n], each 0 or from e**-51 to 1, whose sum from the largest on reaches
// `wanted`. Sums of buckets stand for that sum, which depends on its order: wherever its rounding could matter, and
// where the sum of all stays below, this returns false.
inline bool find_boundary(const double* weights, int64_t n, double wanted, std::vector<Candidate>& found,
                          std::vector<Bucket>& buckets, Candidate& boundary) {
  const double margin = wanted * double(n) * 0x1p-50;  // n additions lose n * 2**-53 at most, in either order
  buckets.assign(kBuckets, Bucket{0.0, 0});
  for (int64_t i = 0; i < n; i++) {
    if (weights[i] == 0.0) continue;
    Bucket& bucket = buckets[size_t(bucket_of(weights[i]))];
    bucket.sum += weights[i];
    bucket.count++;
  }
  double sum = 0.0;
  int64_t last = 0;
  while (last < kBuckets && sum + buckets[size_t(last)].sum < wanted + margin) sum += buckets[size_t(last++)].sum;
  if (last == kBuckets || sum > wanted - margin) return false;
  found.clear();
  for (int64_t i = 0; i < n; i++)
    if (weights[i] != 0.0 && bucket_of(weights[i]) == last) found.push_back({weights[i], i});
  std::sort(found.begin(), found.end(), before);
  for (const Candidate& one : found) {
    sum += one.value;
    if (sum < wanted - margin) continue;
    boundary = one;
    return sum > wanted + margin;
  }
  return false;
}

// Finds the fewest largest of weights [n] whose sum reaches `wanted`, or all above 0 where even their sum stays below;
// in the order of their indices. The sum is that of the sorted weights, from the largest on.
inline void find_nucleus(const double* weights, int64_t n, double wanted, std::vector<Candidate>& found,
                         std::vector<Bucket>& buckets) {
  // A few are usually enough; the sums of a longer list begin with the same bits, so its length changes no result.
  for (const int64_t count : {int64_t(64), int64_t(1024), n}) {
    Candidate boundary;
    if (count == n && find_boundary(weights, n, wanted, found, buckets, boundary)) {
      found.clear();
      for (int64_t i = 0; i < n; i++)
        if (weights[i] > boundary.value || (weights[i] == boundary.value && i <= boundary.index))
          found.push_back({weights[i], i});
      return;
    }
    find_largest(weights, n, count, 0.0, found);
    std::sort(found.begin(), found.end(), before);
    double sum = 0.0;
    size_t i = 0;
    while (i < found.size() && (sum += found[i].value) < wanted) i++;
    const bool reached = i < found.size();
    if (reached) found.resize(i + 1);
    if (reached || int64_t(found.size()) < count) break;
  }
  sort_by_index(found);
}

}  // namespace blockrelay
