// Matmul with 4-bit weights and rows in groups of 32 k (precision w4a8), as kernels/specification.py defines it. For g
// ascending, with the row's scale rs[r][g], and all sums over the k of g:
//   acc = fma(float(sum of (u[r][k] - 128)) * rs[r][g], gm[g][n], acc);
//   acc = fma(float(sum of (u[r][k] - 128) * nibble[k][n]), gs[g][n] * rs[r][g], acc);   y[r][n] = acc.
//
// Sums are exact, and the float steps of an element have one order, so tiling, threads and row count do not change a
// bit. Packed weights are panels of 32 columns. A group has four blocks of 8 k, each 2 x 16 columns x 4 bytes (low
// nibble k = j, high nibble k = 4 + j), then the 32 columns' gs, then their gm: 640 bytes, in order of reading.
#pragma once

#include <utility>
#include <vector>

#include "arithmetic.h"
#include "pool.h"
#include "vnni.h"

namespace blockrelay {

constexpr int kColumns = 32;                // columns of a panel
constexpr int kBlocks = 4;                  // blocks of 8 k per group
constexpr int kBlockBytes = kColumns * 4;
constexpr int kNibbleBytes = kBlocks * kBlockBytes;
constexpr int kGroupBytes = kNibbleBytes + 2 * kColumns * int(sizeof(Half));
constexpr int kRowsAtOnce = 6;  // rows fill the registers of AVX-512: 12 sums, 12 accumulators, 4 weights, 1 broadcast

struct GroupWeights {
  const uint8_t* panels;  // 64-byte aligned
  int64_t depth, columns;

  int64_t groups() const { return depth / kGroupDepth; }
  int64_t panel_count() const { return (columns + kColumns - 1) / kColumns; }
  int64_t panel_bytes() const { return groups() * kGroupBytes; }
};

// Packs q4 [K/2,N] (low nibble row 2i, high nibble row 2i+1), gs and gm [K/32,N] into `panels`. Columns beyond N get 0.
inline void pack_groups(Pool& pool, const uint8_t* q4, const Half* gs, const Half* gm, int64_t depth, int64_t columns,
                        uint8_t* panels) {
  const GroupWeights shape{panels, depth, columns};
  pool.run(shape.panel_count(), 1, depth * columns, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; panel++) {
      const int64_t first = panel * kColumns;
      const int width = int(columns - first < kColumns ? columns - first : kColumns);
      uint8_t* to = panels + panel * shape.panel_bytes();
      std::memset(to, 0, size_t(shape.panel_bytes()));
      for (int64_t g = 0; g < shape.groups(); g++, to += kGroupBytes) {
        for (int k = 0; k < kGroupDepth; k++) {
          const uint8_t* line = q4 + (g * kGroupDepth + k) / 2 * columns + first;
          uint8_t* at = to + k / 8 * kBlockBytes + k % 4;
          for (int n = 0; n < width; n++) {
            const int nibble = k % 2 ? line[n] >> 4 : line[n] & 15;
            at[n * 4] |= uint8_t(k % 8 < 4 ? nibble : nibble << 4);
          }
        }
        const size_t bytes = size_t(width) * sizeof(Half);
        std::memcpy(to + kNibbleBytes, gs + g * columns + first, bytes);
        std::memcpy(to + kNibbleBytes + kColumns * sizeof(Half), gm + g * columns + first, bytes);
      }
    }
    return true;
  });
}

// What a group of one row is multiplied by: its scale for gs, and its sum times its scale for gm.
struct RowFactors {
  float scale, sum;
};

// Rows of one call side by side: `a` is u - 128 as [K/4][rows][4], `factors` is [K/32][rows].
struct SignedRows {
  int64_t first;
  int rows;
  uint32_t* a;
  RowFactors* factors;
};

// Fills `to` from u [R,K] and its scales [R,K/32].
inline void arrange_signed(const uint8_t* u, const float* scale, int64_t depth, const SignedRows& to) {
  for (int r = 0; r < to.rows; r++) {
    const uint8_t* line = u + (to.first + r) * depth;
    for (int64_t g = 0; g < depth / kGroupDepth; g++) {
      int32_t sum = -128 * kGroupDepth;
      for (int k = 0; k < kGroupDepth; k++) sum += line[g * kGroupDepth + k];
      const float factor = scale[(to.first + r) * (depth / kGroupDepth) + g];
      to.factors[g * to.rows + r] = {factor, float(sum) * factor};
    }
    for (int64_t i = 0; i < depth / 4; i++) {
      uint32_t four;
      std::memcpy(&four, line + i * 4, 4);
      to.a[i * to.rows + r] = four ^ 0x80808080u;
    }
  }
}

using MultiplyGroups = void (*)(const GroupWeights&, const SignedRows&, int64_t panel, float* y);

#if defined(__AVX512BW__)

// Adds the products of four bytes per lane: nibbles 0..15 times int8. Without VNNI a lane has two sums of 16 bits, enough
// for the 16 products of a group that each has; in_lanes() adds them.
inline __m512i dot_nibbles(__m512i sum, __m512i nibbles, __m512i a) {
#if defined(BLOCKRELAY_VNNI)
  return dot_bytes(sum, nibbles, a);
#else
  return _mm512_add_epi16(sum, _mm512_maddubs_epi16(nibbles, a));
#endif
}

inline __m512i in_lanes(__m512i sum) {
#if defined(BLOCKRELAY_VNNI)
  return sum;
#else
  return _mm512_madd_epi16(sum, _mm512_set1_epi16(1));
#endif
}

template <int R>
void multiply_groups_panel(const GroupWeights& w, const SignedRows& rows, int64_t panel, float* y) {
  const uint8_t* weights = w.panels + panel * w.panel_bytes();
  const uint32_t* a = rows.a;
  const RowFactors* factors = rows.factors;
  const __m512i low = _mm512_set1_epi8(15);
  __m512 acc[R][2];
  each<R>([&](auto r) { acc[r][0] = acc[r][1] = _mm512_setzero_ps(); });
  for (int64_t g = 0; g < w.groups(); g++) {
    __m512i sum[R][2];
    each<R>([&](auto r) { sum[r][0] = sum[r][1] = _mm512_setzero_si512(); });
    each<kBlocks>([&](auto block) {
      const __m512i both0 = _mm512_load_si512(weights + block * kBlockBytes);
      const __m512i both1 = _mm512_load_si512(weights + block * kBlockBytes + 64);
      const __m512i low0 = _mm512_and_si512(both0, low), low1 = _mm512_and_si512(both1, low);
      const __m512i high0 = _mm512_and_si512(_mm512_srli_epi16(both0, 4), low);
      const __m512i high1 = _mm512_and_si512(_mm512_srli_epi16(both1, 4), low);
      each<R>([&](auto r) {
        const __m512i first = _mm512_set1_epi32(int(a[2 * block * R + r]));
        const __m512i second = _mm512_set1_epi32(int(a[(2 * block + 1) * R + r]));
        sum[r][0] = dot_nibbles(sum[r][0], low0, first);
        sum[r][1] = dot_nibbles(sum[r][1], low1, first);
        sum[r][0] = dot_nibbles(sum[r][0], high0, second);
        sum[r][1] = dot_nibbles(sum[r][1], high1, second);
      });
    });
    const Half* gs = reinterpret_cast<const Half*>(weights + kNibbleBytes);
    const Half* gm = gs + kColumns;
    const __m512 gs0 = Register::load(gs).v, gs1 = Register::load(gs + 16).v;
    const __m512 gm0 = Register::load(gm).v, gm1 = Register::load(gm + 16).v;
    each<R>([&](auto r) {
      const __m512 scale = _mm512_set1_ps(factors[r].scale), total = _mm512_set1_ps(factors[r].sum);
      acc[r][0] = _mm512_fmadd_ps(total, gm0, acc[r][0]);
      acc[r][1] = _mm512_fmadd_ps(total, gm1, acc[r][1]);
      acc[r][0] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(in_lanes(sum[r][0])), _mm512_mul_ps(gs0, scale), acc[r][0]);
      acc[r][1] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(in_lanes(sum[r][1])), _mm512_mul_ps(gs1, scale), acc[r][1]);
    });
    weights += kGroupBytes;
    a += 2 * kBlocks * R;
    factors += R;
  }
  const int64_t column = panel * kColumns;
  const int left0 = lanes_left(column, w.columns), left1 = lanes_left(column + 16, w.columns);
  float* to = y + rows.first * w.columns + column;
  each<R>([&](auto r) {
    store_some(to + r * w.columns, Register{acc[r][0]}, left0);
    if (left1 > 0) store_some(to + r * w.columns + 16, Register{acc[r][1]}, left1);
  });
}

template <int... I>
inline MultiplyGroups group_multiplier(int rows, std::integer_sequence<int, I...>) {
  static constexpr MultiplyGroups all[] = {multiply_groups_panel<I + 1>...};
  return all[rows - 1];
}

inline MultiplyGroups group_multiplier(int rows) {
  return group_multiplier(rows, std::make_integer_sequence<int, kRowsAtOnce>());
}

#else

#if defined(__AVX2__)
// As with AVX-512, on registers of half the width.
inline __m256i dot_nibbles(__m256i sum, __m256i nibbles, __m256i a) {
#if defined(BLOCKRELAY_VNNI)
  return dot_bytes(sum, nibbles, a);
#else
  return _mm256_add_epi16(sum, _mm256_maddubs_epi16(nibbles, a));
#endif
}

inline __m256i in_lanes(__m256i sum) {
#if defined(BLOCKRELAY_VNNI)
  return sum;
#else
  return _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
#endif
}
#endif

// Writes the sums over a group of the products of its nibbles with one row, whose bytes have `stride` words between
// them, to sums [32] as floats.
inline void sum_groups(const uint8_t* weights, const uint32_t* a, int64_t stride, float* sums) {
#if defined(__AVX2__)
  const __m256i low = _mm256_set1_epi8(15);
  __m256i bytes[2 * kBlocks];
  for (int i = 0; i < 2 * kBlocks; i++) bytes[i] = _mm256_set1_epi32(int(a[i * stride]));
  for (int n = 0; n < kColumns; n += 8) {
    __m256i sum = _mm256_setzero_si256();
    for (int block = 0; block < kBlocks; block++) {
      const __m256i both =
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights + block * kBlockBytes + n * 4));
      const __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
      sum = dot_nibbles(sum, _mm256_and_si256(both, low), bytes[2 * block]);
      sum = dot_nibbles(sum, high, bytes[2 * block + 1]);
    }
    _mm256_storeu_ps(sums + n, _mm256_cvtepi32_ps(in_lanes(sum)));
  }
#else
  int32_t whole[kColumns] = {};
  for (int block = 0; block < kBlocks; block++) {
    int8_t first[4], second[4];
    std::memcpy(first, a + 2 * block * stride, 4);
    std::memcpy(second, a + (2 * block + 1) * stride, 4);
    const uint8_t* bytes = weights + block * kBlockBytes;
    for (int n = 0; n < kColumns; n++)
      for (int j = 0; j < 4; j++) whole[n] += (bytes[n * 4 + j] & 15) * first[j] + (bytes[n * 4 + j] >> 4) * second[j];
  }
  for (int n = 0; n < kColumns; n++) sums[n] = float(whole[n]);
#endif
}

inline void multiply_groups_panel(const GroupWeights& w, const SignedRows& rows, int64_t panel, float* y) {
  const int64_t column = panel * kColumns;
  for (int r = 0; r < rows.rows; r++) {
    const uint8_t* weights = w.panels + panel * w.panel_bytes();
    V16 acc[2] = {V16::broadcast(0.0f), V16::broadcast(0.0f)};
    for (int64_t g = 0; g < w.groups(); g++, weights += kGroupBytes) {
      float sums[kColumns];
      sum_groups(weights, rows.a + g * 2 * kBlocks * rows.rows + r, rows.rows, sums);
      const RowFactors& factors = rows.factors[g * rows.rows + r];
      const Half* gs = reinterpret_cast<const Half*>(weights + kNibbleBytes);
      for (int h = 0; h < 2; h++) {
        acc[h] = fma(V16::broadcast(factors.sum), V16::load(gs + kColumns + h * 16), acc[h]);
        const V16 scale = V16::load(gs + h * 16) * V16::broadcast(factors.scale);
        acc[h] = fma(V16::load(sums + h * 16), scale, acc[h]);
      }
    }
    for (int h = 0; h < 2; h++) {
      const int left = lanes_left(column + h * 16, w.columns);
      if (left > 0) store_some(y + (rows.first + r) * w.columns + column + h * 16, acc[h], left);
    }
  }
}

inline MultiplyGroups group_multiplier(int) { return multiply_groups_panel; }

#endif

// Multiplies u [R,K] uint8, with scales [R,K/32], by w into y [R,N]; R >= 1, K a multiple of 32. Returns false when
// there is no memory. Throws std::bad_alloc.
inline bool multiply_groups(Pool& pool, const uint8_t* u, const float* scale, int64_t rows, const GroupWeights& w,
                            float* y) {
  const int64_t steps = w.depth / 4, calls = (rows + kRowsAtOnce - 1) / kRowsAtOnce;
  uint32_t* a = reinterpret_cast<uint32_t*>(scratch(size_t(rows * (steps + 2 * w.groups()))));
  if (!a) return false;
  RowFactors* factors = reinterpret_cast<RowFactors*>(a + rows * steps);
  std::vector<SignedRows> parts;
  for (int64_t i = 0; i < calls; i++) {
    const int64_t first = rows * i / calls, end = rows * (i + 1) / calls;
    parts.push_back({first, int(end - first), a + first * steps, factors + first * w.groups()});
  }
  pool.run(calls, 1, rows * w.depth / 2, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) arrange_signed(u, scale, w.depth, parts[size_t(i)]);
    return true;
  });
  const int64_t panels = w.panel_count(), grain = panels < 32 ? 1 : panels / 32;
  return pool.run(panels, grain, w.depth * w.columns * (2 + rows / 4), [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; panel++)
      for (const SignedRows& part : parts) group_multiplier(part.rows)(w, part, panel, y);
    return true;
  });
}

}  // namespace blockrelay
