// Integer matmul: y[r][n] = float(sum over k of (u[r][k] - 128) * q[k][n]) * scale[n].
//
// The sum is exact in int32 for K <= 65536, so instruction set, tiling, threads and row count do not change a bit; one
// float multiplication follows.
#pragma once

#include <utility>
#include <vector>

#include "vnni.h"
#if defined(__AVX512VNNI__)
#include "matmul_avx512vnni.h"
#include "matmul_tiles.h"
#elif defined(BLOCKRELAY_VNNI)
#include "matmul_avxvnni.h"
#elif defined(__aarch64__)
#include "matmul_arm.h"
#elif defined(__SSE2__) && !defined(BLOCKRELAY_GENERIC)
#include "matmul_pairs.h"
#else
#include "matmul_generic.h"
#endif

namespace blockrelay {

constexpr int64_t kStreamed = 3 << 20;  // bytes of y above which no cache near a core keeps it until it is read

template <bool in_place, int... I>
inline MultiplyPanel multiplier(int rows, std::integer_sequence<int, I...>) {
  static constexpr MultiplyPanel all[] = {multiply_panel<I + 1, in_place>..., nullptr};  // no empty array
  return all[rows - 1];
}

inline MultiplyPanel multiplier(const RowGroup& group) {
  return group.stride ? multiplier<true>(group.rows, std::make_integer_sequence<int, kInPlace>())
                      : multiplier<false>(group.rows, std::make_integer_sequence<int, kGroup>());
}

// Multiplies u [R,K] uint8 by w into y [R,N], R >= 1. Returns false when there is no memory. Throws std::bad_alloc.
inline bool multiply(Pool& pool, const uint8_t* u, int64_t rows, const PackedWeights& w, float* y) {
  const bool streamed = kStreams && rows * w.columns * int64_t(sizeof(float)) > kStreamed && w.columns % kPanel == 0 &&
                        reinterpret_cast<uintptr_t>(y) % 64 == 0;
#if defined(BLOCKRELAY_TILES)
  if (by_tiles(rows, w)) return multiply_by_tiles(pool, u, rows, w, y, streamed);
#endif
  const int64_t steps = w.steps(), group_count = (rows + kGroup - 1) / kGroup;
  const bool in_place = rows <= kInPlace && w.depth % kDepth == 0;
  RowWord* arranged = nullptr;
  if (!in_place) {
    const int64_t words = group_count * kGroup * steps;
    arranged = reinterpret_cast<RowWord*>(scratch(size_t(words) * sizeof(RowWord) / sizeof(float)));
    if (!arranged) return false;
  }
  std::vector<RowGroup> groups;
  for (int64_t g = 0; g < group_count; g++) {
    const int64_t first = rows * g / group_count, end = rows * (g + 1) / group_count;
    if (in_place)
      groups.push_back({first, int(end - first), u, steps, streamed});
    else
      groups.push_back({first, int(end - first), arranged + g * kGroup * steps, 0, streamed});
  }
  if (!in_place)
    pool.run(group_count, 1, rows * w.depth / 2, [&](int64_t begin, int64_t end) {
      for (int64_t g = begin; g < end; g++) {
        const int64_t first = groups[size_t(g)].first;
        arrange_rows(u + first * w.depth, w.depth, groups[size_t(g)].rows, arranged + g * kGroup * steps);
      }
      return true;
    });
  const int64_t panels = w.panel_count();
  const int64_t grain = panels < 32 ? 1 : panels / 32;
  return pool.run(panels, grain, w.depth * w.columns * (2 + rows / 4), [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; panel++) {
      const int8_t* ahead = w.panels + (panel + 1 < panels ? panel + 1 : panel) * w.panel_bytes();
      for (int64_t g = 0; g < group_count; g++) {
        const int lines = group_count == 1 ? 2 : g < 2 ? 1 : 0;
        multiplier(groups[size_t(g)])(w, groups[size_t(g)], panel, g == 1 ? ahead + steps * 64 : ahead, lines, y);
      }
    }
#if defined(__SSE2__)
    if (streamed) _mm_sfence();
#endif
    return true;
  });
}

}  // namespace blockrelay
