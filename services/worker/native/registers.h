// Register: one SIMD register of 16 (AVX-512), 8 (AVX2) or 4 (any other CPU) float32 lanes.
//
// All operations follow IEEE 754 to the last bit and give the same results in every build. lanes.h combines registers
// to sixteen lanes.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace blockrelay {

struct Half {
  uint16_t bits;
};

constexpr float kRound = 12582912.0f;            // adding this rounds |x| < 2^22 to an integer, half to even
constexpr uint32_t kRoundBits = 0x4B400000u;     // its bit pattern
constexpr uint32_t kMagnitude = 0x7FFFFFFFu;
constexpr uint32_t kInfinityBits = 0x7F800000u;
constexpr float kHalfMax = 65504.0f;
constexpr uint16_t kHalfNan = 0x7E00;

template <class To, class From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline float widen(Half h) {
  uint32_t magnitude = (h.bits & 0x7FFFu) << 13;
  float scaled = bit_cast<float>(magnitude) * 0x1p112f;  // exact, also for subnormals
  uint32_t bits = bit_cast<uint32_t>(scaled);
  if ((h.bits & 0x7C00u) == 0x7C00u) bits = kInfinityBits | magnitude;
  return bit_cast<float>(bits | (uint32_t(h.bits & 0x8000u) << 16));
}

// Converts to float16: to nearest even, finite values saturated, infinities and NaN to the canonical NaN.
inline Half narrow(float x) {
  uint32_t bits = bit_cast<uint32_t>(x);
  uint16_t sign = uint16_t((bits >> 16) & 0x8000u);
  bits &= kMagnitude;
  if (bits >= kInfinityBits) return Half{kHalfNan};
  if (bits > bit_cast<uint32_t>(kHalfMax)) bits = bit_cast<uint32_t>(kHalfMax);
  if (bits < 0x38800000u) {  // below 2^-14: float addition at 0.5 rounds to multiples of 2^-24, the subnormals' step
    float shifted = bit_cast<float>(bits) + 0.5f;
    return Half{uint16_t(sign | (bit_cast<uint32_t>(shifted) - 0x3F000000u))};
  }
  bits += 0xFFFu + ((bits >> 13) & 1u);
  return Half{uint16_t(sign | ((bits >> 13) - (112u << 10)))};
}

#if defined(__AVX512F__)

struct Register {
  static constexpr int width = 16;
  __m512 v;
  static __mmask16 first_lanes(int n) { return __mmask16((1u << n) - 1u); }
  static Register load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Register load(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
  static Register load(const Half* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
  static Register load(const Half* p, int n) {
    return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(n), p))};
  }
  static Register broadcast(float x) { return {_mm512_set1_ps(x)}; }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void store(float* p, int n) const { _mm512_mask_storeu_ps(p, first_lanes(n), v); }
  // Converts each lane as narrow() does.
  void store(Half* p, int n) const {
    const __m512 limit = _mm512_set1_ps(kHalfMax);
    __m512 magnitude = _mm512_abs_ps(v);
    __mmask16 finite = _mm512_cmp_ps_mask(magnitude, _mm512_set1_ps(bit_cast<float>(kInfinityBits)), _CMP_LT_OQ);
    __m512 saturated = _mm512_max_ps(_mm512_min_ps(v, limit), _mm512_sub_ps(_mm512_setzero_ps(), limit));
    __m512 kept = _mm512_mask_blend_ps(finite, _mm512_set1_ps(bit_cast<float>(0x7FC00000u)), saturated);
    _mm256_mask_storeu_epi16(p, first_lanes(n), _mm512_cvtps_ph(kept, _MM_FROUND_TO_NEAREST_INT));
  }
  // Stores the integers x of lanes that hold x + kRound, plus 128, as bytes.
  void store_zero_128(uint8_t* p, int n) const {
    __m512i i = _mm512_add_epi32(_mm512_castps_si512(v), _mm512_set1_epi32(128));
    _mm512_mask_cvtepi32_storeu_epi8(p, first_lanes(n), i);
  }
};
inline Register operator+(Register a, Register b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Register operator-(Register a, Register b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Register operator*(Register a, Register b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Register operator/(Register a, Register b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Register fma(Register a, Register b, Register c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Register negate(Register a) {
  return {_mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(int(0x80000000u))))};
}
// a > b ? a : b and a < b ? a : b; the result is b where one is NaN.
inline Register pick_max(Register a, Register b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Register pick_min(Register a, Register b) { return {_mm512_min_ps(a.v, b.v)}; }
// Takes lanes below n from a, the others from b.
inline Register first(int n, Register a, Register b) {
  return {_mm512_mask_blend_ps(Register::first_lanes(n), b.v, a.v)};
}
// Returns the largest lane; no lane may be NaN.
inline float highest_lane(Register a) { return _mm512_reduce_max_ps(a.v); }
// Maximum of m and |x| as integers with their bit patterns: NaN counts as larger than infinity.
inline Register max_magnitude(Register m, Register x) {
  __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(x.v), _mm512_set1_epi32(int(kMagnitude)));
  return {_mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(m.v), magnitude))};
}
// Lanes whose number has bit `step` become (lane - step) - lane, the others lane + (lane + step).
template <int step>
inline Register butterfly(Register a) {
  constexpr __mmask16 upper = step == 1 ? 0xAAAA : step == 2 ? 0xCCCC : step == 4 ? 0xF0F0 : 0xFF00;
  constexpr int swap = step == 1 || step == 4 ? 0xB1 : 0x4E;
  const __m512 other = step < 4 ? _mm512_permute_ps(a.v, swap) : _mm512_shuffle_f32x4(a.v, a.v, swap);
  return {_mm512_mask_sub_ps(_mm512_add_ps(a.v, other), upper, other, a.v)};
}
// Returns 2^k for lanes that hold k + kRound.
inline Register power_of_two(Register shifted) {
  __m512i k = _mm512_add_epi32(_mm512_castps_si512(shifted.v), _mm512_set1_epi32(int(127u - kRoundBits)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(k, 23))};
}
#elif defined(__AVX2__)

struct Register {
  static constexpr int width = 8;
  __m256 v;
  static __m256i first_lanes(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static Register load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static Register load(const float* p, int n) { return {_mm256_maskload_ps(p, first_lanes(n))}; }
  static Register load(const Half* p) { return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p))}; }
  static Register load(const Half* p, int n) {
    Half some[width] = {};
    std::memcpy(some, p, size_t(n) * sizeof(Half));
    return load(some);
  }
  static Register broadcast(float x) { return {_mm256_set1_ps(x)}; }
  void store(float* p) const { _mm256_storeu_ps(p, v); }
  void store(float* p, int n) const { _mm256_maskstore_ps(p, first_lanes(n), v); }
  void store(Half* p, int n) const {
    const __m256 limit = _mm256_set1_ps(kHalfMax);
    __m256 magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v);
    __m256 finite = _mm256_cmp_ps(magnitude, _mm256_set1_ps(bit_cast<float>(kInfinityBits)), _CMP_LT_OQ);
    __m256 saturated = _mm256_max_ps(_mm256_min_ps(v, limit), _mm256_sub_ps(_mm256_setzero_ps(), limit));
    __m256 kept = _mm256_blendv_ps(_mm256_set1_ps(bit_cast<float>(0x7FC00000u)), saturated, finite);
    __m128i halves = _mm256_cvtps_ph(kept, _MM_FROUND_TO_NEAREST_INT);
    std::memcpy(p, &halves, size_t(n) * sizeof(Half));
  }
  void store_zero_128(uint8_t* p, int n) const {
    __m256i i = _mm256_add_epi32(_mm256_castps_si256(v), _mm256_set1_epi32(128));
    i = _mm256_and_si256(i, _mm256_set1_epi32(255));
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
    uint64_t bytes = uint64_t(_mm_cvtsi128_si64(_mm_packus_epi16(words, words)));
    std::memcpy(p, &bytes, size_t(n));
  }
};
inline Register operator+(Register a, Register b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Register operator-(Register a, Register b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Register operator*(Register a, Register b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Register operator/(Register a, Register b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Register fma(Register a, Register b, Register c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Register negate(Register a) { return {_mm256_xor_ps(a.v, _mm256_set1_ps(-0.0f))}; }
inline Register pick_max(Register a, Register b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Register pick_min(Register a, Register b) { return {_mm256_min_ps(a.v, b.v)}; }
inline Register first(int n, Register a, Register b) {
  return {_mm256_blendv_ps(b.v, a.v, _mm256_castsi256_ps(Register::first_lanes(n)))};
}
inline float highest_lane(Register a) {
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline Register max_magnitude(Register m, Register x) {
  __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(x.v), _mm256_set1_epi32(int(kMagnitude)));
  return {_mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(m.v), magnitude))};
}
template <int step>
inline Register butterfly(Register a) {
  const __m256 other = step == 4 ? _mm256_permute2f128_ps(a.v, a.v, 1) : _mm256_permute_ps(a.v, step == 1 ? 0xB1 : 0x4E);
  constexpr int upper = step == 1 ? 0xAA : step == 2 ? 0xCC : 0xF0;
  return {_mm256_blend_ps(_mm256_add_ps(a.v, other), _mm256_sub_ps(other, a.v), upper)};
}
inline Register power_of_two(Register shifted) {
  __m256i k = _mm256_add_epi32(_mm256_castps_si256(shifted.v), _mm256_set1_epi32(int(127u - kRoundBits)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(k, 23))};
}

#else

#if defined(__SSE2__)
// A fused multiply-add without the instruction: the product of two floats plus a float, computed in double and rounded
// to float, is right unless the double sum lies half way between two floats or below the normal floats
// (kernels/float32.py has the proof). The C library's fmaf is right too, but tens of times slower on such a CPU.
constexpr int kBelowFloat = 0x1FFFFFFF, kHalfWay = 0x10000000;  // masks of a double's low word
constexpr int kSmallestNormalFloat = 0x38100000;                // high word of the double 2^-126

// Returns x + y rounded to odd: rounding that once more, to float, gives the rounded exact sum.
inline __m128d sum_to_odd(__m128d x, __m128d y) {
  double a[2], b[2];
  _mm_storeu_pd(a, x);
  _mm_storeu_pd(b, y);
  for (int i = 0; i < 2; i++) {
    const double sum = a[i] + b[i], from_b = sum - a[i];
    const double error = (a[i] - (sum - from_b)) + (b[i] - from_b);  // Knuth's TwoSum: exact
    int64_t bits = bit_cast<int64_t>(sum);
    if (error != 0 && sum - sum == 0 && !(bits & 1)) bits += (error > 0) == (sum > 0) ? 1 : -1;
    a[i] = bit_cast<double>(bits);
  }
  return _mm_loadu_pd(a);
}
#endif

// Four lanes in a vector type of the compiler, which uses SSE2, NEON or plain code.
struct Register {
  static constexpr int width = 4;
  typedef float Floats __attribute__((vector_size(16)));
  typedef uint32_t Words __attribute__((vector_size(16)));
  typedef int32_t Mask __attribute__((vector_size(16)));
  Floats v;
  static Register load(const float* p) {
    Register r;
    std::memcpy(&r.v, p, sizeof r.v);
    return r;
  }
  static Register load(const float* p, int n) {
    Register r{};
    std::memcpy(&r.v, p, size_t(n) * sizeof(float));
    return r;
  }
  static Register load(const Half* p) {
#if defined(__ARM_NEON) && defined(__aarch64__)
    uint16x4_t h;
    std::memcpy(&h, p, sizeof h);
    return {(Floats)vcvt_f32_f16(vreinterpret_f16_u16(h))};
#else
    return {Floats{widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3])}};
#endif
  }
  static Register load(const Half* p, int n) {
    Half some[width] = {};
    std::memcpy(some, p, size_t(n) * sizeof(Half));
    return load(some);
  }
  static Register broadcast(float x) { return {Floats{x, x, x, x}}; }
  void store(float* p) const { std::memcpy(p, &v, sizeof v); }
  void store(float* p, int n) const { std::memcpy(p, &v, size_t(n) * sizeof(float)); }
  void store(Half* p, int n) const {
    for (int i = 0; i < n; i++) p[i] = narrow(v[i]);
  }
  void store_zero_128(uint8_t* p, int n) const {
    Words words = (Words)v;
    for (int i = 0; i < n; i++) p[i] = uint8_t(words[i] + 128u);
  }
};
inline Register operator+(Register a, Register b) { return {a.v + b.v}; }
inline Register operator-(Register a, Register b) { return {a.v - b.v}; }
inline Register operator*(Register a, Register b) { return {a.v * b.v}; }
inline Register operator/(Register a, Register b) { return {a.v / b.v}; }
inline Register fma(Register a, Register b, Register c) {
#if defined(__ARM_NEON) && defined(__aarch64__)
  return {(Register::Floats)vfmaq_f32((float32x4_t)c.v, (float32x4_t)a.v, (float32x4_t)b.v)};
#elif defined(__SSE2__)
  const __m128 x = (__m128)a.v, y = (__m128)b.v, z = (__m128)c.v;
  const __m128d product0 = _mm_mul_pd(_mm_cvtps_pd(x), _mm_cvtps_pd(y));
  const __m128d product1 = _mm_mul_pd(_mm_cvtps_pd(_mm_movehl_ps(x, x)), _mm_cvtps_pd(_mm_movehl_ps(y, y)));
  const __m128d addend0 = _mm_cvtps_pd(z), addend1 = _mm_cvtps_pd(_mm_movehl_ps(z, z));
  __m128d sum0 = _mm_add_pd(product0, addend0), sum1 = _mm_add_pd(product1, addend1);
  const __m128 words0 = _mm_castpd_ps(sum0), words1 = _mm_castpd_ps(sum1);
  const __m128i low = _mm_castps_si128(_mm_shuffle_ps(words0, words1, _MM_SHUFFLE(2, 0, 2, 0)));
  const __m128i high = _mm_castps_si128(_mm_shuffle_ps(words0, words1, _MM_SHUFFLE(3, 1, 3, 1)));
  const __m128i half_way = _mm_cmpeq_epi32(_mm_and_si128(low, _mm_set1_epi32(kBelowFloat)), _mm_set1_epi32(kHalfWay));
  const __m128i magnitude = _mm_and_si128(high, _mm_set1_epi32(int(kMagnitude)));
  const __m128i small = _mm_cmplt_epi32(magnitude, _mm_set1_epi32(kSmallestNormalFloat));
  if (__builtin_expect(_mm_movemask_epi8(_mm_or_si128(half_way, small)) != 0, 0)) {
    sum0 = sum_to_odd(product0, addend0);
    sum1 = sum_to_odd(product1, addend1);
  }
  return {(Register::Floats)_mm_movelh_ps(_mm_cvtpd_ps(sum0), _mm_cvtpd_ps(sum1))};
#else
  Register r;
  for (int i = 0; i < 4; i++) r.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
  return r;
#endif
}
inline Register choose(Register::Mask mask, Register a, Register b) {
  Register::Mask mixed = (mask & (Register::Mask)a.v) | (~mask & (Register::Mask)b.v);
  return {(Register::Floats)mixed};
}
inline Register negate(Register a) {
  Register::Words sign = Register::Words{} + 0x80000000u;
  return {(Register::Floats)((Register::Words)a.v ^ sign)};
}
inline Register pick_max(Register a, Register b) { return choose(a.v > b.v, a, b); }
inline Register pick_min(Register a, Register b) { return choose(a.v < b.v, a, b); }
inline Register first(int n, Register a, Register b) {
  Register::Mask lane = {0, 1, 2, 3};
  return choose(lane < (Register::Mask{} + n), a, b);
}
inline float highest_lane(Register a) {
  float best = a.v[0];
  for (int i = 1; i < Register::width; i++) best = a.v[i] > best ? a.v[i] : best;
  return best;
}
inline Register max_magnitude(Register m, Register x) {
  Register::Mask magnitude = (Register::Mask)((Register::Words)x.v & (Register::Words{} + kMagnitude));
  return choose((Register::Mask)m.v > magnitude, m, {(Register::Floats)magnitude});
}
template <int step>
inline Register butterfly(Register a) {
  const auto x = a.v;
  if constexpr (step == 1) return {Register::Floats{x[0] + x[1], x[0] - x[1], x[2] + x[3], x[2] - x[3]}};
  return {Register::Floats{x[0] + x[2], x[1] + x[3], x[0] - x[2], x[1] - x[3]}};
}
inline Register power_of_two(Register shifted) {
  Register::Words k = (Register::Words)shifted.v + (127u - kRoundBits);
  return {(Register::Floats)(k << 23)};
}

#endif

}  // namespace blockrelay
