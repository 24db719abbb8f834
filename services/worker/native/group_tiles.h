// Matmul with int4 weights in groups by AMX tiles, for more rows than multiply_groups() takes at once. The numbers and the
// packed weights are those of group_matmul.h: a group's sum is exact, and its float steps have the same order.
//
// One tile instruction makes the sums of a group for 16 rows and 16 columns, for which VNNI needs 128.
#pragma once

#include "group_matmul.h"
#include "tiles.h"

namespace blockrelay {

constexpr int kAmxRows = 16;
constexpr int kAmxColumns = 16;

// Up to 16 rows of u - 128 as [K/32][16][32]; those that are missing are zero.
struct TileRows {
  int64_t first;
  int rows;
  int8_t* a;
};

inline void arrange_tiles(const uint8_t* u, int64_t depth, const TileRows& to) {
  std::memset(to.a, 0, size_t(depth * kAmxRows));
  for (int r = 0; r < to.rows; r++) {
    const uint8_t* line = u + (to.first + r) * depth;
    for (int64_t k = 0; k < depth; k++)
      to.a[(k / kGroupDepth * kAmxRows + r) * kGroupDepth + k % kGroupDepth] = int8_t(line[k] ^ 0x80u);
  }
}

// The working memory of one group on its way through the tiles. There are two, taken in turns, so that one group's
// weights are unpacked while the other's sums are made.
struct alignas(64) TileMemory {
  int8_t weights[kGroupDepth / 4][64];  // [K/4][16 columns][4 k]
  int32_t sums[kAmxRows][kAmxColumns];
};

inline tile::Shapes group_shapes() {
  tile::Shapes shapes;
  for (int slot = 0; slot < 2; slot++) {
    shapes.rows[slot] = kAmxRows, shapes.bytes[slot] = kAmxColumns * 4;                // sums: tiles 0 and 1
    shapes.rows[2 + slot] = kAmxRows, shapes.bytes[2 + slot] = kGroupDepth;             // rows: tiles 2 and 3
    shapes.rows[4 + slot] = kGroupDepth / 4, shapes.bytes[4 + slot] = kAmxColumns * 4;  // weights: tiles 4 and 5
  }
  return shapes;
}

// Stores the sums of one group. `nibbles` are the 16 columns' part of its packed weights, `a` its part of TileRows.a.
template <int Slot>
inline void sum_group(const uint8_t* nibbles, const int8_t* a, TileMemory& memory) {
  const __m512i low = _mm512_set1_epi8(15), offset = _mm512_set1_epi8(8);
  each<kBlocks>([&](auto block) {
    const __m512i both = _mm512_load_si512(nibbles + block * kBlockBytes);
    const __m512i high = _mm512_srli_epi16(both, 4);
    _mm512_store_si512(memory.weights[2 * block], _mm512_sub_epi8(_mm512_and_si512(both, low), offset));
    _mm512_store_si512(memory.weights[2 * block + 1], _mm512_sub_epi8(_mm512_and_si512(high, low), offset));
  });
  tile::zero<Slot>();
  tile::load<2 + Slot>(a, kGroupDepth);
  tile::load<4 + Slot>(memory.weights, sizeof memory.weights[0]);
  tile::add_products<Slot, 2 + Slot, 4 + Slot>();
  tile::store<Slot>(memory.sums, sizeof memory.sums[0]);
}

// Multiplies the rows by the 16 columns from column `column` on, which is a multiple of 16.
inline void multiply_group_tiles(const GroupWeights& w, const TileRows& rows, int64_t column, float* y) {
  const uint8_t* weights = w.panels + column / kColumns * w.panel_bytes();
  const int64_t half = column % kColumns;
  TileMemory memory[2];
  __m512 acc[kAmxRows];
  each<kAmxRows>([&](auto r) { acc[r] = _mm512_setzero_ps(); });
  const auto add = [&](int64_t g, const TileMemory& made) {
    const Half* gs = reinterpret_cast<const Half*>(weights + g * kGroupBytes + kNibbleBytes);
    const __m512 group_scale = Register::load(gs + half).v;
    each<kAmxRows>([&](auto r) {
      const __m512 sum = _mm512_cvtepi32_ps(_mm512_load_si512(made.sums[r]));
      acc[r] = _mm512_fmadd_ps(sum, group_scale, acc[r]);
    });
  };
  const auto nibbles = [&](int64_t g) { return weights + g * kGroupBytes + half * 4; };
  const auto part = [&](int64_t g) { return rows.a + g * kAmxRows * kGroupDepth; };
  int64_t g = 0;
  for (; g + 1 < w.groups(); g += 2) {
    sum_group<0>(nibbles(g), part(g), memory[0]);
    sum_group<1>(nibbles(g + 1), part(g + 1), memory[1]);
    add(g, memory[0]);
    add(g + 1, memory[1]);
  }
  if (g < w.groups()) {
    sum_group<0>(nibbles(g), part(g), memory[0]);
    add(g, memory[0]);
  }
  const int left = lanes_left(column, w.columns);
  const V16 scale = load_some(w.scale + column, left);
  each<kAmxRows>([&](auto r) {
    if (r < rows.rows) store_some(y + (rows.first + r) * w.columns + column, Register{acc[r]} * scale, left);
  });
}

// Does what multiply_groups() does, with the same arguments and result.
inline bool multiply_groups_by_tiles(Pool& pool, const uint8_t* u, int64_t rows, const GroupWeights& w, float* y) {
  const int64_t calls = (rows + kAmxRows - 1) / kAmxRows;
  int8_t* a = reinterpret_cast<int8_t*>(scratch(size_t(calls * kAmxRows * w.depth / 4)));
  if (!a) return false;
  std::vector<TileRows> parts;
  for (int64_t i = 0; i < calls; i++) {
    const int64_t first = rows * i / calls, end = rows * (i + 1) / calls;
    parts.push_back({first, int(end - first), a + i * kAmxRows * w.depth});
  }
  pool.run(calls, 1, rows * w.depth / 2, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) arrange_tiles(u, w.depth, parts[size_t(i)]);
    return true;
  });
  const tile::Shapes shapes = group_shapes();
  const int64_t panels = w.panel_count(), grain = panels < 32 ? 1 : panels / 32;
  return pool.run(panels, grain, w.depth * w.columns * (2 + rows / 8), [&](int64_t begin, int64_t end) {
    tile::configure(shapes);
    const int64_t end_column = end * kColumns < w.columns ? end * kColumns : w.columns;
    for (int64_t column = begin * kColumns; column < end_column; column += kAmxColumns)
      for (const TileRows& part : parts) multiply_group_tiles(w, part, column, y);
    tile::release();
    return true;
  });
}

// Returns whether this CPU's tiles give the bits of multiply_groups(), on a product with all of a tile's parts. Asked
// once by each process, before it uses them. Throws std::bad_alloc, std::system_error.
inline bool tiles_agree() {
  constexpr int64_t rows = 21, depth = 5 * kGroupDepth, columns = 40;
  Pool pool(1);
  uint32_t state = 1;
  const auto next = [&] { return (state = state * 1664525u + 1013904223u) >> 16; };
  std::vector<uint8_t> u(rows * depth), q4(depth / 2 * columns);
  std::vector<Half> gs(depth / kGroupDepth * columns);
  std::vector<float> scale(columns), y[2];
  for (uint8_t& x : u) x = uint8_t(next());
  for (uint8_t& x : q4) x = uint8_t(next());
  for (Half& x : gs) x = narrow(float(next()) * 0x1p-16f);
  for (float& x : scale) x = float(next()) * 0x1p-8f;
  GroupWeights w{nullptr, scale.data(), depth, columns};
  struct alignas(64) Line {
    uint8_t bytes[64];
  };
  std::vector<Line> panels(size_t(w.panel_count() * w.panel_bytes() / 64));
  w.panels = panels.data()->bytes;
  pack_groups(pool, q4.data(), gs.data(), depth, columns, panels.data()->bytes);
  for (std::vector<float>& one : y) one.resize(rows * columns);
  return multiply_groups(pool, u.data(), rows, w, y[0].data()) &&
         multiply_groups_by_tiles(pool, u.data(), rows, w, y[1].data()) &&
         std::memcmp(y[0].data(), y[1].data(), y[0].size() * sizeof(float)) == 0;
}

}  // namespace blockrelay
