// Draws tokens from rows of logits with the numbers that sampling/sampler.py defines, so that a token depends neither on
// the instruction set nor on the threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <limits>
#include <new>
#include <vector>

#include "largest.h"
#include "pool.h"

namespace blockrelay {

// What a token is drawn from and by; kernels/sampled_rows.py lays it out. Addresses may be null where nothing is said.
struct SampledRow {
  const float* logits;        // [count], finite
  const uint32_t* allowed;    // bit i of word i / 32: token i may be drawn; null: all may
  const int64_t* changed;     // [changes] indices of logits that are replaced for the draw
  const double* replacement;  // [changes]
  int64_t changes;
  int64_t count;
  uint64_t seed;
  uint64_t position;
  double temperature;
  double top_p;
  double min_p;
  double total;  // sum of the weights of the whole row where `logits` are only its largest; NaN: it has all
  int64_t top_k;
  int64_t logprobs;  // most likely tokens to list; -1: no log probabilities at all
  // The results: an index into logits, and its log probability.
  int64_t token;
  double logprob;
};
static_assert(sizeof(SampledRow) == 128, "as kernels/sampled_rows.py lays it out");

// Working memory of one thread.
struct SamplingMemory {
  std::vector<double> row, weights, sums;
  std::vector<int64_t> ids;
  std::vector<Candidate> found;
  std::vector<Bucket> buckets;
};

template <class E>
double largest_of(const E* row, int64_t n) {
  E best[kTurn];
  std::fill(best, best + kTurn, row[0]);
  int64_t i = 0;
  for (; i + kTurn <= n; i += kTurn)
    for (int j = 0; j < kTurn; j++) best[j] = row[i + j] > best[j] ? row[i + j] : best[j];
  for (; i < n; i++) best[0] = row[i] > best[0] ? row[i] : best[0];
  return *std::max_element(best, best + kTurn);
}

// Returns the index of the first element that equals `value`, which is there.
template <class E>
int64_t index_of(const E* row, double value) {
  int64_t i = 0;
  while (!(row[i] == value)) i++;
  return i;
}

// Writes to `out` what use() makes of x = (element - largest) / temperature for each element of a row; it changes kSide
// registers at a time. `out` has room for kTurn elements more; what is written behind its last element is 0. Where `sums`
// is given, the values are also added from left to right, and the running sum behind each kTurn of them is written there.
template <class E, class Use>
void map_row(const E* row, int64_t n, double largest, double temperature, double* out, double* sums, const Use& use) {
  constexpr int step = kSide * kDoubles;
  static_assert(kTurn % step == 0, "a turn is a whole number of steps");
  double sum = 0.0;
  for (int64_t i = 0; i < n; i += step) {
    const E* from = row + i;
    E last[step];
    if (i + step > n) {
      std::fill(last, last + step, E(largest));
      std::copy(from, row + n, last);
      from = last;
    }
    Doubles x[kSide];
#pragma GCC unroll 4
    for (int j = 0; j < kSide; j++) x[j] = load_doubles(from + j * kDoubles) - largest;
    if (temperature != 1.0)
#pragma GCC unroll 4
      for (int j = 0; j < kSide; j++) x[j] = x[j] / temperature;
    use(x);
#pragma GCC unroll 4
    for (int j = 0; j < kSide; j++) std::memcpy(out + i + j * kDoubles, &x[j], sizeof x[j]);
    if (i + step > n) std::fill(out + n, out + i + step, 0.0);
    if (!sums) continue;
    for (int j = 0; j < step; j++) sum += out[i + j];
    sums[i / kTurn] = sum;
  }
}

// The place of the random number u in running sums [n]: the first that is above u times the last one, or n.
inline int64_t place_of(double u, const std::vector<double>& sums) {
  const double target = u * sums.back();
  return std::upper_bound(sums.begin(), sums.end(), target) - sums.begin();
}

// Draws an index into weights [n], of which none is kept out, by their running sums behind each kTurn.
inline int64_t draw_of_all(const double* weights, int64_t n, const std::vector<double>& sums, double u) {
  const double target = u * sums.back();
  const int64_t turn = place_of(u, sums);
  if (turn < int64_t(sums.size())) {
    double sum = turn ? sums[size_t(turn - 1)] : 0.0;
    for (int64_t i = turn * kTurn; i < n; i++)
      if ((sum += weights[i]) > target) return i;
  }
  int64_t last = n - 1;  // u * total was rounded up to the total
  while (weights[last] == 0.0) last--;
  return last;
}

// Draws an index into a row of logits; -1 where no token may be drawn.
template <class E>
int64_t draw(const E* row, const SampledRow& r, SamplingMemory& memory) {
  constexpr double unreachable = -51.0;  // as in sampling/sampler.py
  int64_t n = r.count;
  const double largest = largest_of(row, n);
  if (!std::isfinite(largest) || row[0] != row[0]) return -1;  // no token is allowed, or the caller let NaN through
  if (r.temperature == 0.0) return index_of(row, largest);

  auto& found = memory.found;
  const bool few = r.top_k > 0 && r.top_k < n;
  double total = r.top_k > 0 ? std::numeric_limits<double>::quiet_NaN() : r.total;
  const bool all_of_them = !(r.top_p < 1.0) && !(r.min_p > 0.0);
  const bool summed = all_of_them || (r.top_p < 1.0 && std::isnan(total));
  memory.weights.resize(std::max(memory.weights.size(), size_t(n + kTurn)));
  double* const weights = memory.weights.data();
  auto weight = [](Doubles (&x)[kSide]) {
    Doubles before[kSide];
    std::copy(x, x + kSide, before);
    exp_of_negative(x);
    for (int i = 0; i < kSide; i++) x[i] = before[i] >= unreachable ? x[i] : all(0.0);
  };
  if (few) {
    map_row(row, n, largest, r.temperature, weights, nullptr, [](Doubles (&)[kSide]) {});
    find_largest(weights, n, r.top_k, std::nextafter(unreachable, -100.0), found);
    sort_by_index(found);
    n = int64_t(found.size());
    memory.ids.clear();
    for (const Candidate& one : found) {
      weights[memory.ids.size()] = one.value;
      memory.ids.push_back(one.index);
    }
  }
  memory.sums.resize(size_t((n + kTurn - 1) / kTurn));
  double* const sums = summed ? memory.sums.data() : nullptr;
  if (few)
    map_row(weights, n, 0.0, 1.0, weights, sums, weight);
  else
    map_row(row, n, largest, r.temperature, weights, sums, weight);
  auto id_of = [&](int64_t index) { return few ? memory.ids[size_t(index)] : index; };

  const double u = uniform(r.seed, r.position);
  if (all_of_them) return id_of(draw_of_all(weights, n, memory.sums, u));
  if (r.top_p < 1.0) {
    find_nucleus(weights, n, r.top_p * (summed ? memory.sums.back() : total), found, memory.buckets);
    if (r.min_p > 0.0)
      found.erase(std::remove_if(found.begin(), found.end(), [&](const Candidate& one) { return one.value < r.min_p; }),
                  found.end());
  } else {
    found.clear();
    for (int64_t i = 0; i < n; i++)
      if (weights[i] >= r.min_p) found.push_back({weights[i], i});
  }
  memory.sums.clear();
  double sum = 0.0;
  for (const Candidate& one : found) memory.sums.push_back(sum += one.value);
  const size_t chosen = std::min(size_t(place_of(u, memory.sums)), found.size() - 1);
  return id_of(found[chosen].index);
}

// Writes the log probability of r.token, and the most likely tokens with theirs; `ids` and `logprobs` have r.logprobs.
inline void log_probabilities(SampledRow& r, int64_t* ids, double* logprobs, SamplingMemory& memory) {
  const int64_t n = r.count;
  memory.weights.resize(std::max(memory.weights.size(), size_t(n + kTurn)));
  memory.sums.resize(size_t((n + kTurn - 1) / kTurn));
  double* const values = memory.weights.data();
  const double largest = largest_of(r.logits, n);
  map_row(r.logits, n, largest, 1.0, values, memory.sums.data(), [](Doubles (&x)[kSide]) { exp_of_negative(x); });
  const double log_total = log_of(memory.sums.back());
  map_row(r.logits, n, largest, 1.0, values, nullptr, [&](Doubles (&x)[kSide]) {
    for (Doubles& one : x) one = one - log_total;
  });
  r.logprob = values[r.token];
  find_largest(values, n, r.logprobs, -std::numeric_limits<double>::infinity(), memory.found);
  std::sort(memory.found.begin(), memory.found.end(), before);
  for (size_t i = 0; i < memory.found.size(); i++) {
    ids[i] = memory.found[i].index;
    logprobs[i] = memory.found[i].value;
  }
}

// Returns a row with its changes and without the tokens that may not be drawn; null for an index out of range.
inline const double* changed_row(const SampledRow& r, std::vector<double>& row) {
  row.assign(r.logits, r.logits + r.count);
  for (int64_t i = 0; i < r.changes; i++) {
    if (r.changed[i] < 0 || r.changed[i] >= r.count) return nullptr;
    row[size_t(r.changed[i])] = r.replacement[i];
  }
  if (r.allowed)
    for (int64_t i = 0; i < r.count; i++)
      if (!(r.allowed[i / 32] >> (i % 32) & 1)) row[size_t(i)] = -std::numeric_limits<double>::infinity();
  return row.data();
}

// Samples all rows; lists [rows][width] of the most likely tokens are written where a row asks for them. Returns false
// for an index out of range. Throws std::bad_alloc.
inline bool sample_rows(Pool& pool, SampledRow* rows, int64_t count, int64_t* ids, double* logprobs, int64_t width) {
  std::atomic<bool> memory_left{true};
  int64_t cost = 0;
  for (int64_t i = 0; i < count; i++) cost += rows[i].count * (rows[i].temperature == 0.0 && rows[i].logprobs < 0 ? 2 : 40);
  const bool in_range = pool.run(count, 1, cost, [&](int64_t begin, int64_t end) {
    static thread_local SamplingMemory memory;
    try {
      for (int64_t i = begin; i < end; i++) {
        SampledRow& r = rows[i];
        if (r.count < 1 || r.logprobs > width) return false;
        if (r.changes || r.allowed) {
          const double* row = changed_row(r, memory.row);
          if (!row) return false;
          r.token = draw(row, r, memory);
        } else {
          r.token = draw(r.logits, r, memory);
        }
        if (r.logprobs >= 0 && r.token >= 0) log_probabilities(r, ids + i * width, logprobs + i * width, memory);
      }
    } catch (...) {  // bad_alloc, or length_error: nothing may leave a thread of the pool
      memory_left = false;
    }
    return true;
  });
  if (!memory_left) throw std::bad_alloc();
  return in_range;
}

}  // namespace blockrelay
