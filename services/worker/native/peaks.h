// What this machine gives at most, for a roofline: memory that is read by all threads, and multiply-adds in registers.
#pragma once

#include "lanes.h"
#include "matmul.h"
#include "pool.h"

namespace blockrelay {

// Reads `bytes` at p, each thread an equal part of them: in turns of a MiB two threads got two thirds of what memory gives.
// Returns their sum as words, which keeps the reads alive.
inline uint64_t read_all(Pool& pool, const uint8_t* p, int64_t bytes) {
  const int64_t parts = pool.threads(), lines = bytes / 128;
  std::atomic<uint64_t> total{0};
  pool.run(parts, 1, bytes, [&](int64_t begin, int64_t end) {
    uint64_t sum[16] = {};
    for (int64_t line = lines * begin / parts; line < lines * end / parts; line++) {
      uint64_t words[16];
      std::memcpy(words, p + line * 128, sizeof words);
      for (int i = 0; i < 16; i++) sum[i] += words[i];
    }
    uint64_t own = 0;
    for (const uint64_t word : sum) own += word;
    total.fetch_add(own, std::memory_order_relaxed);
    return true;
  });
  return total.load(std::memory_order_relaxed);
}

// A unit that multiplies: `add` makes `products` multiply-adds, and `hide` makes the compiler forget what a register has.
#if defined(__AVX512VNNI__)
struct ByteUnit {
  using Word = __m512i;
  static constexpr int64_t products = 64;
  static Word add(Word sum, Word a, Word b) { return dot_bytes(sum, a, b); }
  static void hide(Word& x) { __asm__ volatile("" : "+v"(x)); }
};
#elif defined(BLOCKRELAY_VNNI)
struct ByteUnit {
  using Word = __m256i;
  static constexpr int64_t products = 32;
  static Word add(Word sum, Word a, Word b) { return dot_bytes(sum, a, b); }
  static void hide(Word& x) { __asm__ volatile("" : "+x"(x)); }
};
#elif defined(__ARM_FEATURE_DOTPROD)
struct ByteUnit {
  using Word = int8x16_t;
  static int32x4_t sums(Word x) { return vreinterpretq_s32_s8(x); }
#if defined(__ARM_FEATURE_MATMUL_INT8)
  static constexpr int64_t products = 32;
  static Word add(Word sum, Word a, Word b) { return vreinterpretq_s8_s32(dot_pairs(sums(sum), a, b)); }
#else
  static constexpr int64_t products = 16;
  static Word add(Word sum, Word a, Word b) { return vreinterpretq_s8_s32(dot(sums(sum), a, b)); }
#endif
  static void hide(Word& x) { __asm__ volatile("" : "+w"(x)); }
};
#elif defined(__aarch64__)
struct ByteUnit {
  using Word = int8x16_t;
  static constexpr int64_t products = 8;
  static Word add(Word sum, Word a, Word b) {
    const int16x8_t eight = vmull_s8(vget_low_s8(a), vget_low_s8(b));
    return vreinterpretq_s8_s32(vpadalq_s16(vreinterpretq_s32_s8(sum), eight));
  }
  static void hide(Word& x) { __asm__ volatile("" : "+w"(x)); }
};
#elif defined(__SSE2__) && !defined(BLOCKRELAY_GENERIC)
struct ByteUnit {  // bytes are widened before, which is left out here
  using Word = Quads;
  static constexpr int64_t products = 4 * Quads::columns;
  static Word add(Word sum, Word a, Word b) { return add_products(sum, a, b); }
  static void hide(Word& x) { __asm__ volatile("" : "+x"(x.v)); }
};
#else
struct ByteUnit {  // a vector type of the compiler, which hide() sends through memory
  typedef int32_t Word __attribute__((vector_size(16)));
  static constexpr int64_t products = 4;
  static Word add(Word sum, Word a, Word b) { return sum + a * b; }
  static void hide(Word& x) { __asm__ volatile("" : "+m"(x)); }
};
#endif

struct FloatUnit {
  using Word = Register;
  static constexpr int64_t products = Register::width;
  static Word add(Word sum, Word a, Word b) { return fma(a, b, sum); }
  static void hide(Word& x) {
#if defined(__AVX512F__)
    __asm__ volatile("" : "+v"(x.v));
#elif defined(__SSE2__)
    __asm__ volatile("" : "+x"(x.v));
#elif defined(__aarch64__)
    __asm__ volatile("" : "+w"(x.v));
#else
    __asm__ volatile("" : "+m"(x.v));
#endif
  }
};

// Makes `steps` steps of a unit on every thread, several times over; a step adds to sums that do not wait for each other.
// Returns how many multiply-adds that was.
template <class Unit>
inline double multiply_adds(Pool& pool, int64_t steps) {
  constexpr int kSums = 12;  // latency times units of most CPUs; more would not fit into the registers of AVX2
  const int64_t parts = 8 * int64_t(pool.threads());
  pool.run(parts, 1, INT64_MAX, [&](int64_t begin, int64_t end) {
    typename Unit::Word sum[kSums] = {}, a = {}, b = {};
    each<kSums>([&](auto j) __attribute__((always_inline)) { Unit::hide(sum[j]); });  // or all were one sum
    Unit::hide(b);
    for (int64_t i = 0; i < steps * (end - begin); i++)
      each<kSums>([&](auto j) __attribute__((always_inline)) {
        Unit::hide(a);  // or sums of products would share them
        sum[j] = Unit::add(sum[j], a, b);
      });
    each<kSums>([&](auto j) __attribute__((always_inline)) { Unit::hide(sum[j]); });
    return true;
  });
  return double(parts) * double(steps) * kSums * double(Unit::products);
}

}  // namespace blockrelay
