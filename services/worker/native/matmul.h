// Integer matmul with AVX512-VNNI: y[r][n] = float(sum over k of (u[r][k] - 128) * q[k][n]) * scale[n].
//
// The sum is exact in int32 for K <= 65536, so tiling, threads and row count do not change a bit; one float
// multiplication follows. Weights are packed once into panels of 32 columns, [N/32][K/4][32 columns][4 k] with zeros
// beyond N and K, so that a panel is one sequential stream: reading the weights limits decode.
#pragma once

#include <utility>
#include <vector>

#include "lanes.h"
#include "pool.h"

namespace blockrelay {

constexpr int kPanel = 32;    // columns of a panel
constexpr int kDepth = 4;     // k per int32 lane
constexpr int kGroup = 14;    // rows whose sums fit into the registers: 28 sums, 2 weights, 1 broadcast
constexpr int kInPlace = 4;   // most rows for which arranging them costs more than it saves
constexpr int kZeroPoint = 128;
constexpr int64_t kStreamed = 3 << 20;  // bytes of y above which no cache near a core keeps it until it is read

struct PackedWeights {
  const int8_t* panels;  // 64-byte aligned
  const int32_t* start;  // [N/32 * 32]: start of the sum of u * q, -128 times the column's sum of q
  const float* scale;    // [N]
  int64_t depth, columns;

  int64_t steps() const { return (depth + kDepth - 1) / kDepth; }
  int64_t panel_count() const { return (columns + kPanel - 1) / kPanel; }
  int64_t panel_bytes() const { return steps() * kPanel * kDepth; }
};

// Packs q [K,N] into `panels` and `start`, as PackedWeights describes them.
inline void pack_weights(Pool& pool, const int8_t* q, int64_t depth, int64_t columns, int8_t* panels, int32_t* start) {
  const PackedWeights shape{panels, start, nullptr, depth, columns};
  pool.run(shape.panel_count(), 1, depth * columns, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; panel++) {
      const int64_t first = panel * kPanel;
      const int width = int(columns - first < kPanel ? columns - first : kPanel);
      int8_t* to = panels + panel * shape.panel_bytes();
      int32_t sums[kPanel] = {};
      std::memset(to, 0, size_t(shape.panel_bytes()));
      for (int64_t k = 0; k < depth; k++) {
        const int8_t* line = q + k * columns + first;
        int8_t* at = to + k / kDepth * kPanel * kDepth + k % kDepth;
        for (int n = 0; n < width; n++) {
          at[n * kDepth] = line[n];
          sums[n] += line[n];
        }
      }
      for (int n = 0; n < kPanel; n++) start[first + n] = -kZeroPoint * sums[n];
    }
    return true;
  });
}

struct RowGroup {
  int64_t first;      // first row
  int rows;
  const uint32_t* u;  // arranged: [K/4][rows]; in place: row r at u + r * stride
  int64_t stride;     // 0 unless in place
  bool streamed;      // y bypasses the caches, which would read each of its lines before it is overwritten
};

// Copies u [rows,K] to [K/4][rows][4], with zeros beyond K. In place, the rows of a group would map to the same few
// sets of the cache, since K is often a power of two.
inline void arrange_rows(const uint8_t* u, int64_t depth, int rows, uint32_t* to) {
  const int64_t whole = depth / kDepth;
  for (int r = 0; r < rows; r++) {
    const uint8_t* line = u + r * depth;
    for (int64_t i = 0; i < whole; i++) std::memcpy(to + i * rows + r, line + i * kDepth, kDepth);
    if (depth % kDepth) {
      to[whole * rows + r] = 0;
      std::memcpy(to + whole * rows + r, line + whole * kDepth, size_t(depth % kDepth));
    }
  }
}

// Returns sum plus the products of four bytes per lane. With the intrinsic, or with a reference to the sum, GCC 12
// keeps all sums in memory (half the speed).
inline __m512i dot(__m512i sum, __m512i u, __m512i q) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(u), "v"(q));
  return sum;
}

// Multiplies the R rows of a group by one panel. On the way it prefetches the bytes at `ahead` into L2, `lines` (0 to
// 2) cache lines per step: with two groups per panel, the second finds its weights in cache and would leave memory
// idle.
template <int R, bool in_place>
void multiply_panel(const PackedWeights& w, const RowGroup& group, int64_t panel, const int8_t* ahead, int lines,
                    float* y) {
  const int64_t steps = w.steps(), first = panel * kPanel;
  const int64_t step = in_place ? 1 : R, stride = in_place ? group.stride : 1;
  const int8_t* weights = w.panels + panel * w.panel_bytes();
  const uint32_t* u = group.u;
  __m512i sum[R][2];
  const __m512i start0 = _mm512_loadu_si512(w.start + first), start1 = _mm512_loadu_si512(w.start + first + 16);
  each<R>([&](auto r) {
    sum[r][0] = start0;
    sum[r][1] = start1;
  });
  for (int64_t i = 0; i < steps; i++) {
    const __m512i q0 = _mm512_load_si512(weights), q1 = _mm512_load_si512(weights + 64);
    weights += kPanel * kDepth;
    if (lines > 0) {
      _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T1);
      if (lines > 1) _mm_prefetch(reinterpret_cast<const char*>(ahead + 64), _MM_HINT_T1);
      ahead += 64 * lines;
    }
    each<R>([&](auto r) {
      const __m512i bytes = _mm512_set1_epi32(int(u[r * stride]));
      sum[r][0] = dot(sum[r][0], bytes, q0);
      sum[r][1] = dot(sum[r][1], bytes, q1);
    });
    u += step;
  }
  const int width = int(w.columns - first < kPanel ? w.columns - first : kPanel);
  const __mmask16 mask0 = __mmask16(width >= 16 ? 0xFFFF : (1u << width) - 1);
  const __mmask16 mask1 = __mmask16(width >= 32 ? 0xFFFF : width > 16 ? (1u << (width - 16)) - 1 : 0);
  const __m512 scale0 = _mm512_maskz_loadu_ps(mask0, w.scale + first);
  const __m512 scale1 = _mm512_maskz_loadu_ps(mask1, w.scale + first + 16);
  float* to = y + group.first * w.columns + first;
  each<R>([&](auto r) {
    const __m512 y0 = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[r][0]), scale0);
    const __m512 y1 = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[r][1]), scale1);
    if (group.streamed) {
      _mm512_stream_ps(to + r * w.columns, y0);
      _mm512_stream_ps(to + r * w.columns + 16, y1);
    } else {
      _mm512_mask_storeu_ps(to + r * w.columns, mask0, y0);
      _mm512_mask_storeu_ps(to + r * w.columns + 16, mask1, y1);
    }
  });
}

using MultiplyPanel = void (*)(const PackedWeights&, const RowGroup&, int64_t, const int8_t*, int, float*);

template <bool in_place, int... I>
inline MultiplyPanel multiplier(int rows, std::integer_sequence<int, I...>) {
  static constexpr MultiplyPanel all[] = {multiply_panel<I + 1, in_place>...};
  return all[rows - 1];
}

inline MultiplyPanel multiplier(const RowGroup& group) {
  return group.stride ? multiplier<true>(group.rows, std::make_integer_sequence<int, kInPlace>())
                      : multiplier<false>(group.rows, std::make_integer_sequence<int, kGroup>());
}

// Multiplies u [R,K] uint8 by w into y [R,N], R >= 1. Returns false when there is no memory. Throws std::bad_alloc.
inline bool multiply(Pool& pool, const uint8_t* u, int64_t rows, const PackedWeights& w, float* y) {
  const int64_t steps = w.steps(), group_count = (rows + kGroup - 1) / kGroup;
  const bool in_place = rows <= kInPlace && w.depth % kDepth == 0;
  uint32_t* arranged = nullptr;
  if (!in_place) {
    arranged = reinterpret_cast<uint32_t*>(scratch(size_t(rows * steps)));
    if (!arranged) return false;
  }
  const bool streamed = rows * w.columns * int64_t(sizeof(float)) > kStreamed && w.columns % kPanel == 0 &&
                        reinterpret_cast<uintptr_t>(y) % 64 == 0;
  std::vector<RowGroup> groups;
  for (int64_t g = 0; g < group_count; g++) {
    const int64_t first = rows * g / group_count, end = rows * (g + 1) / group_count;
    if (in_place)
      groups.push_back({first, int(end - first), reinterpret_cast<const uint32_t*>(u), steps, streamed});
    else
      groups.push_back({first, int(end - first), arranged + first * steps, 0, streamed});
  }
  if (!in_place)
    pool.run(group_count, 1, rows * w.depth / 2, [&](int64_t begin, int64_t end) {
      for (int64_t g = begin; g < end; g++) {
        const int64_t first = groups[size_t(g)].first;
        arrange_rows(u + first * w.depth, w.depth, groups[size_t(g)].rows, arranged + first * steps);
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
    if (streamed) _mm_sfence();
    return true;
  });
}

}  // namespace blockrelay
