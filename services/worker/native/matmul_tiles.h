// The matmul of matmul.h with AMX, for many rows: two tiles of rows by two tiles of columns, 64 k at a time. The packed
// weights are those of VNNI: 16 steps of half a panel are a tile. Rows are read where they are.
#pragma once

#include <algorithm>
#include <atomic>

#include "packed_weights.h"
#include "tiles.h"

#if defined(BLOCKRELAY_TILES)

namespace blockrelay {

constexpr int kTiledRows = 2 * kAmxRows;      // rows of a group
constexpr int kTiledDepth = kAmxBytes;        // k of a step
constexpr int64_t kTiledWeights = 512 << 10;  // most bytes of panels that a thread takes at once: they stay in its L2

// The least number of rows for which tiles serve; kernels/native.py measures it at start.
inline std::atomic<int64_t> tiles_from{kAmxRows};

inline bool by_tiles(int64_t rows, const PackedWeights& w) {
  return w.depth % kTiledDepth == 0 && rows >= tiles_from.load(std::memory_order_relaxed);
}

// Writes rows of `sums` (of 16 columns each), plus `start`, times `scale`, to y; only `width` of the columns.
inline void scale_sums(const int32_t (*sums)[16], int rows, const int32_t* start, const float* scale, int width,
                       float* y, int64_t stride, bool streamed) {
  if (width <= 0) return;
  const __mmask16 mask = __mmask16(width >= 16 ? 0xFFFF : (1u << width) - 1);
  const __m512i begin = _mm512_maskz_loadu_epi32(mask, start);
  const __m512 factor = _mm512_maskz_loadu_ps(mask, scale);
  for (int r = 0; r < rows; r++) {
    const __m512i sum = _mm512_add_epi32(_mm512_load_si512(sums[r]), begin);
    const __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), factor);
    if (streamed)
      _mm512_stream_ps(y + r * stride, value);
    else
      _mm512_mask_storeu_ps(y + r * stride, mask, value);
  }
}

// Multiplies a group of rows by a panel. Tiles 0 to 3 have the sums, 4 and 5 rows, 6 and 7 the halves of the panel; without
// `both`, the group has at most 16 rows, and tiles 2, 3 and 5 are not configured.
template <bool both>
void multiply_tiles(const PackedWeights& w, const uint8_t* u, int64_t panel) {
  const int8_t* weights = w.panels + panel * w.panel_bytes();
  constexpr int64_t line = kPanel * kDepth;  // bytes from one step of a panel to the next
  tiles::zero<0>();
  tiles::zero<1>();
  if constexpr (both) {
    tiles::zero<2>();
    tiles::zero<3>();
  }
  for (int64_t k = 0; k < w.depth; k += kTiledDepth, weights += kAmxRows * line) {
    tiles::load<6>(weights, line);
    tiles::load<4>(u + k, w.depth);
    tiles::dot_bytes<0, 4, 6>();
    tiles::load<7>(weights + line / 2, line);
    tiles::dot_bytes<1, 4, 7>();
    if constexpr (both) {
      tiles::load<5>(u + kAmxRows * w.depth + k, w.depth);
      tiles::dot_bytes<2, 5, 6>();
      tiles::dot_bytes<3, 5, 7>();
    }
  }
}

inline TileShapes shapes_for(int first, int second) {
  TileShapes shapes;
  for (const int tile : {0, 1, 4}) shapes.set(tile, first);
  for (const int tile : {2, 3, 5}) shapes.set(tile, second);
  for (const int tile : {6, 7}) shapes.set(tile, kAmxRows);
  return shapes;
}

// As multiply(), for weights and rows that by_tiles() allows.
inline bool multiply_by_tiles(Pool& pool, const uint8_t* u, int64_t rows, const PackedWeights& w, float* y,
                              bool streamed) {
  const int64_t panels = w.panel_count();
  const int64_t grain = std::max<int64_t>(1, std::min(panels / 32, kTiledWeights / w.panel_bytes()));
  return pool.run(panels, grain, w.depth * w.columns * (2 + rows / 4), [&](int64_t begin, int64_t end) {
    alignas(64) int32_t sums[4][kAmxRows][16];
    for (int64_t top = 0; top < rows; top += kTiledRows) {
      const int first = int(std::min<int64_t>(kAmxRows, rows - top));
      const int second = int(std::min<int64_t>(kAmxRows, rows - top - first));
      tiles::configure(shapes_for(first, second));
      for (int64_t panel = begin; panel < end; panel++) {
        const uint8_t* from = u + top * w.depth;
        if (second) {
          multiply_tiles<true>(w, from, panel);
          tiles::store<2>(sums[2], kAmxBytes);
          tiles::store<3>(sums[3], kAmxBytes);
        } else {
          multiply_tiles<false>(w, from, panel);
        }
        tiles::store<0>(sums[0], kAmxBytes);
        tiles::store<1>(sums[1], kAmxBytes);
        for (int tile = 0; tile < (second ? 4 : 2); tile++) {
          const int64_t column = panel * kPanel + tile % 2 * 16, row = top + tile / 2 * kAmxRows;
          const int width = int(std::min<int64_t>(16, w.columns - column));
          scale_sums(sums[tile], tile < 2 ? first : second, w.start + column, w.scale + column, width,
                     y + row * w.columns + column, w.columns, streamed);
        }
      }
    }
    tiles::release();
    if (streamed) _mm_sfence();
    return true;
  });
}

// Makes `steps` products of tiles on every thread, several times over; returns how many multiply-adds that was.
inline double tile_multiply_adds(Pool& pool, int64_t steps) {
  const int64_t parts = 8 * int64_t(pool.threads());
  pool.run(parts, 1, INT64_MAX, [&](int64_t begin, int64_t end) {
    tiles::configure(shapes_for(kAmxRows, kAmxRows));
    for (int64_t i = 0; i < steps * (end - begin); i++) {
      tiles::dot_bytes<0, 4, 6>();
      tiles::dot_bytes<1, 4, 7>();
      tiles::dot_bytes<2, 5, 6>();
      tiles::dot_bytes<3, 5, 7>();
    }
    tiles::release();
    return true;
  });
  return double(parts) * double(steps) * 4 * kAmxRows * kAmxRows * kAmxBytes;
}

}  // namespace blockrelay
#endif
