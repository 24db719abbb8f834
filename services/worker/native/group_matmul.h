// Matmul with 4-bit weights and rows in groups of 32 k (precision w4a8), as kernels/specification.py defines it. For g
// ascending, with the row's scale rs[r][g], and all sums over the k of g:
//   acc = fma(float(sum of (u[r][k] - 128)) * rs[r][g], gm[g][n], acc);
//   acc = fma(float(sum of (u[r][k] - 128) * nibble[k][n]), gs[g][n] * rs[r][g], acc);   y[r][n] = acc.
//
// Sums are exact, and the float steps of an element have one order, so tiling, threads and row count do not change a
// bit.
#pragma once

#include <utility>
#include <vector>

#if defined(__AVX512BW__)
#include "groups_avx512.h"
#elif defined(__ARM_FEATURE_DOTPROD)
#include "groups_arm.h"
#else
#include "groups_by_row.h"
#endif

namespace blockrelay {

template <int... I>
inline MultiplyGroups group_multiplier(int rows, std::integer_sequence<int, I...>) {
  static constexpr MultiplyGroups all[] = {multiply_groups_panel<I + 1>...};
  return all[rows - 1];
}

inline MultiplyGroups group_multiplier(int rows) {
  return group_multiplier(rows, std::make_integer_sequence<int, kRowsAtOnce>());
}

// Multiplies u [R,K] uint8, with scales [R,K/32], by w into y [R,N]; R >= 1, K a multiple of 32. Returns false when
// there is no memory. Throws std::bad_alloc.
inline bool multiply_groups(Pool& pool, const uint8_t* u, const float* scale, int64_t rows, const GroupWeights& w,
                            float* y) {
  const int64_t calls = (rows + kRowsAtOnce - 1) / kRowsAtOnce;
  float* const place = scratch(size_t(rows * (w.depth / 4 + 2 * w.groups())));
  if (!place) return false;
  int8_t* const a = reinterpret_cast<int8_t*>(place);
  RowFactors* const factors = reinterpret_cast<RowFactors*>(a + rows * w.depth);
  std::vector<SignedRows> parts;
  for (int64_t i = 0; i < calls; i++) {
    const int64_t first = rows * i / calls, end = rows * (i + 1) / calls;
    parts.push_back({first, int(end - first), a + first * w.depth, factors + first * w.groups()});
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
