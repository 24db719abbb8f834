// The panels of group_matmul.h on ARM with SDOT.
#pragma once

#include "packed_groups.h"
#include "sdot.h"

namespace blockrelay {

constexpr int kRowsAtOnce = 3;  // by 16 columns: 12 sums, 12 accumulators, 2 of weights, 3 of rows

template <int R>
void multiply_groups_panel(const GroupWeights& w, const SignedRows& rows, int64_t panel, float* y) {
  constexpr int columns = 16, registers = columns / 4;
  const int8x16_t low = vdupq_n_s8(15);
  for (int part = 0; part < kColumns; part += columns) {
    const uint8_t* weights = w.panels + panel * w.panel_bytes();
    const int8_t* a = rows.a;
    const RowFactors* factors = rows.factors;
    Register acc[R][registers];
    each<R>([&](auto r) { each<registers>([&](auto j) { acc[r][j] = Register::broadcast(0.0f); }); });
    for (int64_t g = 0; g < w.groups(); g++) {
      const int8_t* nibbles = reinterpret_cast<const int8_t*>(weights) + part * 4;
      int32x4_t sum[R][registers];
      each<R>([&](auto r) { each<registers>([&](auto j) { sum[r][j] = vdupq_n_s32(0); }); });
      each<2>([&](auto half) __attribute__((always_inline)) {
        int8x16_t row[R];
        each<R>([&](auto r) { row[r] = vld1q_s8(a + r * kGroupDepth + half * 16); });
        each<kBlocks / 2>([&](auto block) __attribute__((always_inline)) {
          each<registers / 2>([&](auto pair) __attribute__((always_inline)) {
            const int8x16x2_t both = load_two<(2 * half + block) * kBlockBytes + pair * 32>(nibbles);
            each<2>([&](auto i) __attribute__((always_inline)) {
              const int8x16_t first = vandq_s8(both.val[i], low);
              const int8x16_t second = vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(both.val[i]), 4));
              each<R>([&](auto r) __attribute__((always_inline)) {
                sum[r][2 * pair + i] = dot_lane<2 * block>(sum[r][2 * pair + i], first, row[r]);
                sum[r][2 * pair + i] = dot_lane<2 * block + 1>(sum[r][2 * pair + i], second, row[r]);
              });
            });
          });
        });
      });
      const Half* gs = reinterpret_cast<const Half*>(weights + kNibbleBytes) + part;
      each<registers>([&](auto j) {
        const Register scale = Register::load(gs + j * 4), minimum = Register::load(gs + kColumns + j * 4);
        each<R>([&](auto r) {
          acc[r][j] = fma(Register::broadcast(factors[r].sum), minimum, acc[r][j]);
          const Register whole{(Register::Floats)vcvtq_f32_s32(sum[r][j])};
          acc[r][j] = fma(whole, scale * Register::broadcast(factors[r].scale), acc[r][j]);
        });
      });
      weights += kGroupBytes;
      a += R * kGroupDepth;
      factors += R;
    }
    const int64_t column = panel * kColumns + part;
    each<R>([&](auto r) {
      each<registers>([&](auto j) {
        const int64_t left = w.columns - column - j * 4;
        float* to = y + (rows.first + r) * w.columns + column + j * 4;
        if (left > 0) acc[r][j].store(to, int(left < 4 ? left : 4));
      });
    });
  }
}

}  // namespace blockrelay
