// The panels of matmul.h on ARM: SMMLA for pairs of rows where the CPU has it, SDOT for single rows, products of 16 bits
// where it has neither.
#pragma once

#include "packed_weights.h"
#include "sdot.h"

namespace blockrelay {

// Eight int8 of a row, u - 128, then those of the row that SMMLA takes along, or the same again.
struct RowWord {
  uint64_t own, other;
};
constexpr int kInPlace = 0;  // rows are always arranged
constexpr bool kStreams = false;

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int kGroup = 6;  // three pairs of rows by 16 columns: 24 sums, 3 registers of rows, 2 of weights
constexpr bool in_pairs(int rows) { return rows > 1; }
#else
#if defined(__ARM_FEATURE_DOTPROD)
constexpr int kGroup = 3;  // by 16 columns: the same registers
#else
constexpr int kGroup = 2;  // by 8 columns: 16 sums
#endif
constexpr bool in_pairs(int) { return false; }
#endif
// Words of each step of a group.
constexpr int words_of(int rows) { return in_pairs(rows) ? (rows + 1) / 2 : rows; }

// Copies u [rows,K] to [K/8][words_of(rows)], with zeros beyond K and beside the last row of an odd number.
inline void arrange_rows(const uint8_t* u, int64_t depth, int rows, RowWord* to) {
  constexpr uint64_t zeros = 0x8080808080808080u;
  const int64_t steps = (depth + kDepth - 1) / kDepth;
  const auto eight = [&](int64_t row, int64_t step) {
    uint64_t bytes = zeros;
    const int64_t left = depth - step * kDepth;
    if (row < rows) std::memcpy(&bytes, u + row * depth + step * kDepth, size_t(left < kDepth ? left : kDepth));
    return bytes ^ zeros;
  };
  const int words = words_of(rows);
  const bool pairs = in_pairs(rows);
  for (int64_t i = 0; i < steps; i++)
    for (int word = 0; word < words; word++)
      *to++ = pairs ? RowWord{eight(2 * word, i), eight(2 * word + 1, i)} : RowWord{eight(word, i), eight(word, i)};
}

// Writes the sums of one row and four columns from `column` on, times their scales, to y [R,N].
inline void store_scaled(const PackedWeights& w, int64_t row, int64_t column, int32x4_t sums, float* y) {
  const int64_t left = w.columns - column;
  if (left <= 0) return;
  const int some = int(left < 4 ? left : 4);
  const Register value = Register{(Register::Floats)vcvtq_f32_s32(sums)} * Register::load(w.scale + column, some);
  value.store(y + row * w.columns + column, some);
}

#if defined(__ARM_FEATURE_DOTPROD)
// Adds the products of eight k of a word of rows with two columns: of SDOT those of one row, in two parts for each column.
template <bool pairs>
inline int32x4_t add_products(int32x4_t sum, int8x16_t rows, int8x16_t columns) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  if constexpr (pairs) return dot_pairs(sum, rows, columns);
#endif
  return dot(sum, rows, columns);
}

// Multiplies the R rows of a group by C columns, from `column` on, whose weights begin at q. A turn has `steps_at_once`
// steps.
template <int R, int C, int steps_at_once>
inline void multiply_columns(const PackedWeights& w, const RowGroup& group, int64_t column, const int8_t* q, float* y) {
  constexpr bool pairs = in_pairs(R);
  constexpr int words = words_of(R), sums = C / 2, step_bytes = kPanel * kDepth;
  const int8_t* u = static_cast<const int8_t*>(group.u);
  int32x4_t sum[words][sums];
  each<words>([&](auto r) { each<sums>([&](auto j) { sum[r][j] = vdupq_n_s32(0); }); });
  const auto add = [&](auto step) __attribute__((always_inline)) {
    int8x16_t rows[words];
    each<words>([&](auto r) { rows[r] = vld1q_s8(u + (step * words + r) * 16); });
    each<sums / 2>([&](auto j) __attribute__((always_inline)) {
      const int8x16x2_t some = load_two<step * step_bytes + j * 32>(q);
      each<2>([&](auto i) __attribute__((always_inline)) {
        each<words>([&](auto r) __attribute__((always_inline)) {
          sum[r][2 * j + i] = add_products<pairs>(sum[r][2 * j + i], rows[r], some.val[i]);
        });
      });
    });
  };
  int64_t left = w.steps();
  for (; left >= steps_at_once; left -= steps_at_once) {
    each<steps_at_once>(add);
    q += steps_at_once * step_bytes;
    u += steps_at_once * words * 16;
  }
  for (; left > 0; left--, q += step_bytes, u += words * 16) each<1>(add);
  each<words>([&](auto r) {
    each<sums / 2>([&](auto j) {
      const int32x4_t two = sum[r][2 * j], next = sum[r][2 * j + 1];
      if constexpr (pairs) {
        const int64x2_t first = vreinterpretq_s64_s32(two), second = vreinterpretq_s64_s32(next);
        const int64_t row = group.first + 2 * r;
        store_scaled(w, row, column + j * 4, vreinterpretq_s32_s64(vzip1q_s64(first, second)), y);
        if (2 * r + 1 < R) store_scaled(w, row + 1, column + j * 4, vreinterpretq_s32_s64(vzip2q_s64(first, second)), y);
      } else {
        store_scaled(w, group.first + r, column + j * 4, vpaddq_s32(two, next), y);
      }
    });
  });
}

template <int R, bool in_place>
void multiply_panel(const PackedWeights& w, const RowGroup& group, int64_t panel, const int8_t*, int, float* y) {
  constexpr int columns = R == 1 ? 32 : 16, steps_at_once = 4;
  const int8_t* q = w.panels + panel * w.panel_bytes();
  for (int n = 0; n < kPanel; n += columns)
    multiply_columns<R, columns, steps_at_once>(w, group, panel * kPanel + n, q + n * kDepth, y);
}
#else
// Multiplies the R rows of a group by 8 columns at a time; a sum has one column in four parts.
template <int R, bool in_place>
void multiply_panel(const PackedWeights& w, const RowGroup& group, int64_t panel, const int8_t*, int, float* y) {
  constexpr int columns = 8;
  for (int n = 0; n < kPanel; n += columns) {
    const int8_t* q = w.panels + panel * w.panel_bytes() + n * kDepth;
    const int8_t* u = static_cast<const int8_t*>(group.u);
    int32x4_t sum[R][columns];
    each<R>([&](auto r) { each<columns>([&](auto j) { sum[r][j] = vdupq_n_s32(0); }); });
    for (int64_t left = w.steps(); left > 0; left--, q += kPanel * kDepth, u += R * 16) {
      int8x16_t rows[R];
      each<R>([&](auto r) { rows[r] = vld1q_s8(u + r * 16); });
      each<columns / 2>([&](auto j) {
        const int8x16_t two = vld1q_s8(q + j * 16);
        each<R>([&](auto r) {  // two products of bytes -128 together would not fit into 16 bits
          sum[r][2 * j] = vpadalq_s16(sum[r][2 * j], vmull_s8(vget_low_s8(two), vget_low_s8(rows[r])));
          sum[r][2 * j + 1] = vpadalq_s16(sum[r][2 * j + 1], vmull_high_s8(two, rows[r]));
        });
      });
    }
    each<R>([&](auto r) {
      each<columns / 4>([&](auto j) {
        const int32x4_t two = vpaddq_s32(sum[r][4 * j], sum[r][4 * j + 1]);
        const int32x4_t next = vpaddq_s32(sum[r][4 * j + 2], sum[r][4 * j + 3]);
        store_scaled(w, group.first + r, panel * kPanel + n + j * 4, vpaddq_s32(two, next), y);
      });
    });
  }
}
#endif

}  // namespace blockrelay
