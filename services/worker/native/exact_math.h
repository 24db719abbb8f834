// exp, log and random numbers as sampling/exact_math.py and sampling/sampler.py define them: the same float64 operations
// in the same order on every instruction set.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace blockrelay {

#if defined(__AVX512F__)
constexpr int kDoubles = 8;
#elif defined(__AVX2__)
constexpr int kDoubles = 4;
#else
constexpr int kDoubles = 2;
#endif
using Doubles = double __attribute__((vector_size(kDoubles * sizeof(double))));
using Bits = uint64_t __attribute__((vector_size(kDoubles * sizeof(uint64_t))));

inline Doubles all(double x) { return x - Doubles{}; }

inline Doubles load_doubles(const double* p) {
  Doubles x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

inline Doubles load_doubles(const float* p) {
  float __attribute__((vector_size(kDoubles * sizeof(float)))) x;
  std::memcpy(&x, p, sizeof x);
  return __builtin_convertvector(x, Doubles);
}

constexpr double kLn2High = 6.93147180369123816490e-01, kLn2Low = 1.90821492927058770002e-10;

constexpr int kSide = 4;  // registers that are computed side by side: one alone would wait for itself most of the time

// Replaces each x <= 0 by exp(x), or by 0 below -700.
inline void exp_of_negative(Doubles (&x)[kSide]) {
  constexpr double rounding = 6755399441055744.0;  // 1.5 * 2**52: adding it rounds to a whole number
  constexpr double factorials[] = {6227020800.0, 479001600.0, 39916800.0, 3628800.0, 362880.0, 40320.0, 5040.0,
                                   720.0,        120.0,       24.0,       6.0,       2.0,      1.0,     1.0};
  Doubles r[kSide], p[kSide], shifted[kSide];
#pragma GCC unroll 4
  for (int i = 0; i < kSide; i++) {
    const Doubles clamped = x[i] > -700.0 ? x[i] : all(-700.0);
    shifted[i] = clamped * 1.4426950408889634 + rounding;
    const Doubles k = shifted[i] - rounding;
    r[i] = (clamped - k * kLn2High) - k * kLn2Low;
    p[i] = all(1.0 / factorials[0]);
  }
#pragma GCC unroll 13
  for (int n = 1; n < 14; n++)
#pragma GCC unroll 4
    for (int i = 0; i < kSide; i++) p[i] = p[i] * r[i] + 1.0 / factorials[n];
#pragma GCC unroll 4
  for (int i = 0; i < kSide; i++) {
    Bits bits;
    std::memcpy(&bits, &shifted[i], sizeof bits);
    bits = (bits + 1023) << 52;  // 2**k: the upper bits of `shifted` fall out
    Doubles power;
    std::memcpy(&power, &bits, sizeof power);
    x[i] = x[i] < -700.0 ? all(0.0) : p[i] * power;
  }
}

// The natural logarithm of a positive normal number.
inline double log_of(double x) {
  int exponent;
  double mantissa = std::frexp(x, &exponent);
  if (mantissa < 0.7071067811865476) {
    mantissa = mantissa * 2.0;
    exponent = exponent - 1;
  }
  const double s = (mantissa - 1.0) / (mantissa + 1.0), square = s * s;
  double series = 0.0;
  for (int n = 23; n > 0; n -= 2) series = series * square + 1.0 / n;
  return exponent * kLn2High + (exponent * kLn2Low + 2.0 * s * series);
}

// The random number of a position, in [0, 1): Philox4x64-10 of the key (seed, 0), as NumPy's generator gives it.
inline double uniform(uint64_t seed, uint64_t position) {
  uint64_t c[4] = {position + 1, position + 1 == 0, 0, 0}, key[2] = {seed, 0};
  for (int round = 0; round < 10; round++) {
    const auto first = static_cast<unsigned __int128>(0xD2E7470EE14C6C93u) * c[0];
    const auto second = static_cast<unsigned __int128>(0xCA5A826395121157u) * c[2];
    const uint64_t next[4] = {uint64_t(second >> 64) ^ c[1] ^ key[0], uint64_t(second),
                              uint64_t(first >> 64) ^ c[3] ^ key[1], uint64_t(first)};
    std::memcpy(c, next, sizeof c);
    key[0] += 0x9E3779B97F4A7C15u;
    key[1] += 0xBB67AE8584CAA73Bu;
  }
  return double(c[0] >> 11) * 0x1p-53;
}

}  // namespace blockrelay
