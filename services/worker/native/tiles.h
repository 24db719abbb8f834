// The instructions of AMX that matmuls need, or what stands in for them in tests on a CPU without.
//
// BLOCKRELAY_TILES is defined where they are. A thread has eight tiles of at most 16 rows of 64 bytes; each use lies between
// configure() and release(). The statements are ours, because those of GCC 12's header do not say that they read memory.
#pragma once

#if defined(__AMX_INT8__) || defined(BLOCKRELAY_TILES_STAND_IN)
#define BLOCKRELAY_TILES 1

#include <cstdint>
#include <cstring>

namespace blockrelay {

constexpr int kAmxRows = 16;
constexpr int kAmxBytes = 64;  // of a row
constexpr int kAmxTiles = 8;

// What LDTILECFG reads.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int count) {
    rows[tile] = uint8_t(count);
    bytes[tile] = uint16_t(count ? kAmxBytes : 0);
  }
};
static_assert(sizeof(TileShapes) == 64, "as the instruction reads it");

#if defined(__AMX_INT8__)

namespace tiles {

inline void configure(const TileShapes& shapes) { __asm__ volatile("ldtilecfg %0" ::"m"(shapes) : "memory"); }
inline void release() { __asm__ volatile("tilerelease" ::: "memory"); }

template <int tile>
inline void zero() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(tile) : "memory");
}

// Loads the rows of a tile, `stride` bytes apart.
template <int tile>
inline void load(const void* from, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(tile) : "memory");
}

template <int tile>
inline void store(void* to, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(tile) : "memory");
}

// sum[m][n] += for each k: unsigned bytes u[m][4k..] times signed bytes q[k][4n..].
template <int sum, int u, int q>
inline void dot_bytes() {
  __asm__ volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sum), "i"(u), "i"(q) : "memory");
}

}  // namespace tiles

#else

namespace tiles {

struct State {
  TileShapes shapes;
  uint8_t data[kAmxTiles][kAmxRows][kAmxBytes];
};

inline State& state() {
  static thread_local State all = {};
  return all;
}

inline void configure(const TileShapes& shapes) {
  std::memset(state().data, 0, sizeof state().data);
  state().shapes = shapes;
}

inline void release() { configure({}); }

template <int tile>
inline void zero() {
  std::memset(state().data[tile], 0, sizeof state().data[tile]);
}

template <int tile>
inline void load(const void* from, int64_t stride) {
  zero<tile>();
  for (int row = 0; row < state().shapes.rows[tile]; row++)
    std::memcpy(state().data[tile][row], static_cast<const uint8_t*>(from) + row * stride, kAmxBytes);
}

template <int tile>
inline void store(void* to, int64_t stride) {
  for (int row = 0; row < state().shapes.rows[tile]; row++)
    std::memcpy(static_cast<uint8_t*>(to) + row * stride, state().data[tile][row], kAmxBytes);
}

template <int sum, int u, int q>
inline void dot_bytes() {
  for (int m = 0; m < state().shapes.rows[sum]; m++)
    for (int n = 0; n < kAmxBytes / 4; n++) {
      int32_t total;
      std::memcpy(&total, state().data[sum][m] + 4 * n, sizeof total);
      for (int k = 0; k < state().shapes.rows[q]; k++)
        for (int j = 0; j < 4; j++)
          total += int32_t(state().data[u][m][4 * k + j]) * int8_t(state().data[q][k][4 * n + j]);
      std::memcpy(state().data[sum][m] + 4 * n, &total, sizeof total);
    }
}

}  // namespace tiles

#endif

}  // namespace blockrelay
#endif
