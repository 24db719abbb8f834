// The panels of matmul.h on CPUs without VNNI: weights are widened to 16 bits, and pairs of products with 16-bit rows
// are added to 32 bits, which is exact for all bytes.
#pragma once

#include "packed_weights.h"

namespace blockrelay {

using RowWord = uint64_t;    // four int16 of a row: u - 128
constexpr int kInPlace = 0;  // rows are always arranged
constexpr bool kStreams = false;

// Quads: four int16 for each of a few columns; a sum of products has two int32 for each of them.
#if defined(__AVX512BW__)
struct Quads {
  static constexpr int columns = 8;
  __m512i v;
  static Quads load(const int8_t* p) { return {_mm512_cvtepi8_epi16(_mm256_load_si256((const __m256i*)p))}; }
  static Quads broadcast(RowWord four) { return {_mm512_set1_epi64(int64_t(four))}; }
  static Quads zero() { return {_mm512_setzero_si512()}; }
  void store(int32_t* p) const { _mm512_storeu_si512(p, v); }
};
inline Quads add_products(Quads sum, Quads a, Quads b) {
  return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(a.v, b.v))};
}
constexpr int kGroup = 6;  // rows whose sums fit into the registers: 24 sums, 4 weights, 1 broadcast
// Quads of columns that are multiplied at a time.
constexpr int quads_at_once(int) { return 4; }
#elif defined(__AVX2__)
struct Quads {
  static constexpr int columns = 4;
  __m256i v;
  static Quads load(const int8_t* p) { return {_mm256_cvtepi8_epi16(_mm_load_si128((const __m128i*)p))}; }
  static Quads broadcast(RowWord four) { return {_mm256_set1_epi64x(int64_t(four))}; }
  static Quads zero() { return {_mm256_setzero_si256()}; }
  void store(int32_t* p) const { _mm256_storeu_si256((__m256i*)p, v); }
};
inline Quads add_products(Quads sum, Quads a, Quads b) {
  return {_mm256_add_epi32(sum.v, _mm256_madd_epi16(a.v, b.v))};
}
constexpr int kGroup = 6;  // 12 sums, 2 weights, 1 broadcast
constexpr int quads_at_once(int rows) { return rows == 1 ? 8 : rows == 2 ? 4 : 2; }
#else
struct Quads {
  static constexpr int columns = 2;
  __m128i v;
  static Quads load(const int8_t* p) {
    const __m128i bytes = _mm_loadl_epi64((const __m128i*)p);
    return {_mm_srai_epi16(_mm_unpacklo_epi8(bytes, bytes), 8)};
  }
  static Quads broadcast(RowWord four) {
    const __m128i word = _mm_loadl_epi64((const __m128i*)&four);
    return {_mm_unpacklo_epi64(word, word)};
  }
  static Quads zero() { return {_mm_setzero_si128()}; }
  void store(int32_t* p) const { _mm_storeu_si128((__m128i*)p, v); }
};
inline Quads add_products(Quads sum, Quads a, Quads b) { return {_mm_add_epi32(sum.v, _mm_madd_epi16(a.v, b.v))}; }
constexpr int kGroup = 6;
constexpr int quads_at_once(int rows) { return rows == 1 ? 8 : rows == 2 ? 4 : 2; }
#endif

// Copies u [rows,K] to [K/4][rows][4] as u - 128, with zeros beyond K.
inline void arrange_rows(const uint8_t* u, int64_t depth, int rows, RowWord* to) {
  const int64_t steps = (depth + kDepth - 1) / kDepth;
  for (int r = 0; r < rows; r++)
    for (int64_t i = 0; i < steps; i++) {
      int16_t four[kDepth] = {};
      const int some = int(depth - i * kDepth < kDepth ? depth - i * kDepth : kDepth);
      for (int k = 0; k < some; k++) four[k] = int16_t(u[r * depth + i * kDepth + k] - kZeroPoint);
      std::memcpy(to + i * rows + r, four, sizeof four);
    }
}

// Multiplies the R rows of a group by one panel, quads_at_once(R) of its columns after the other.
template <int R, bool in_place>
void multiply_panel(const PackedWeights& w, const RowGroup& group, int64_t panel, const int8_t*, int, float* y) {
  constexpr int quads = quads_at_once(R), columns = quads * Quads::columns;
  const int64_t steps = w.steps(), first = panel * kPanel;
  const int width = int(w.columns - first < kPanel ? w.columns - first : kPanel);
  for (int part = 0; part < width; part += columns) {
    const int8_t* weights = w.panels + panel * w.panel_bytes() + part * kDepth;
    const RowWord* u = static_cast<const RowWord*>(group.u);
    Quads sum[R][quads];
    each<R>([&](auto r) { each<quads>([&](auto q) { sum[r][q] = Quads::zero(); }); });
    for (int64_t i = 0; i < steps; i++) {
      Quads some[quads];
      each<quads>([&](auto q) { some[q] = Quads::load(weights + q * Quads::columns * kDepth); });
      each<R>([&](auto r) {
        const Quads row = Quads::broadcast(u[r]);
        each<quads>([&](auto q) { sum[r][q] = add_products(sum[r][q], some[q], row); });
      });
      weights += kPanel * kDepth;
      u += R;
    }
    each<R>([&](auto r) {
      int32_t halves[2 * columns];
      each<quads>([&](auto q) { sum[r][q].store(halves + q * 2 * Quads::columns); });
      float* to = y + (group.first + r) * w.columns + first + part;
      const float* scale = w.scale + first + part;
      const int some = width - part < columns ? width - part : columns;
      for (int n = 0; n < some; n++) to[n] = float(halves[2 * n] + halves[2 * n + 1]) * scale[n];
    });
  }
}

}  // namespace blockrelay
