// Random values and comparisons for smoke.cpp, whose results go into one digest.
#pragma once

#include <random>

#include "kernels.h"

namespace {

std::mt19937 generator(1);

int64_t between(int64_t low, int64_t high) { return low + int64_t(generator() % uint64_t(high - low + 1)); }

uint64_t digest = 0xCBF29CE484222325u;  // FNV-1a

void digest_byte(uint8_t byte) { digest = (digest ^ byte) * 0x100000001B3u; }

void digest_value(uint8_t x) { digest_byte(x); }
void digest_value(Half x) {
  for (int shift = 0; shift < 16; shift += 8) digest_byte(uint8_t(x.bits >> shift));
}
void digest_value(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x != x ? nan() : x);  // payloads are not defined
  for (int shift = 0; shift < 32; shift += 8) digest_byte(uint8_t(bits >> shift));
}

template <class T>
using Buffer = std::vector<T>;

// Returns random numbers between -2 and 2.
Buffer<float> tame(int64_t count) {
  Buffer<float> buffer(static_cast<size_t>(count));
  for (auto& x : buffer) x = float(int32_t(generator())) * 0x1p-30f;
  return buffer;
}

// tame(), in a quarter of the calls with one number that is NaN, infinite, huge or tiny.
Buffer<float> floats(int64_t count) {
  auto buffer = tame(count);
  const float odd[] = {nan(), bit_cast<float>(0xFF800000u), 3e38f, -1e30f, 1e-42f};
  if (count && between(0, 3) == 0) buffer[size_t(between(0, count - 1))] = odd[between(0, 4)];
  return buffer;
}

bool equal(float a, float b) { return bit_cast<uint32_t>(a) == bit_cast<uint32_t>(b) || (a != a && b != b); }
bool equal(Half a, Half b) { return a.bits == b.bits; }
bool equal(uint8_t a, uint8_t b) { return a == b; }

template <class T>
bool same(const Buffer<T>& a, const Buffer<T>& b) {
  for (const T& x : a) digest_value(x);
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](T x, T y) { return equal(x, y); });
}

struct Pools {
  void* one = blockrelay_open(1);
  void* three = blockrelay_open(3);
  ~Pools() {
    blockrelay_close(one);
    blockrelay_close(three);
  }
};

}  // namespace
