// Ranks for smoke.cpp: threads that share the memory of one process.
#pragma once

#include <array>
#include <thread>

#include "smoke_values.h"

namespace {

constexpr int kRanks = 3;

// Memory for the meeting of kRanks ranks.
struct Shared {
  alignas(64) uint8_t bytes[64 * (kRanks + 1)] = {};
};

// Has threads with a pool each compute as ranks, again and again: each gets what one pool gets of the whole matrix.
bool ranks_agree() {
  constexpr int64_t kRows = 9, kSteps = 200;
  constexpr std::array<int64_t, kRanks> widths = {16, 40, 8};
  constexpr int64_t n = 64;
  const auto x = tame(kRows * n), scale = tame(kRows);
  void* const alone = blockrelay_open(1);
  Buffer<uint8_t> u(x.size());
  Buffer<float> scales(kRows), sum(x.size(), 1.0f);
  blockrelay_quantise(alone, x.data(), u.data(), scales.data(), kRows, n, 16, 0);
  blockrelay_add_scaled(alone, sum.data(), x.data(), scale.data(), kRows, n);
  blockrelay_close(alone);
  Shared shared;
  Buffer<float> parts[2][kRanks];
  const float* addresses[2][kRanks];
  for (int turn = 0; turn < 2; turn++)
    for (int rank = 0; rank < kRanks; rank++) {
      parts[turn][rank].resize(size_t(kRows * widths[size_t(rank)]));
      addresses[turn][rank] = parts[turn][rank].data();
    }
  std::atomic<bool> ok{true};
  auto run = [&](int rank) {
    void* const pool = blockrelay_open(1 + rank % 2);
    int64_t first = 0;
    for (int other = 0; other < rank; other++) first += widths[size_t(other)];
    Buffer<uint8_t> own_u(x.size());
    Buffer<float> own_scales(kRows), own_sum(x.size()), whole(x.size());
    for (int64_t step = 0; step < kSteps; step++) {
      const int turn = int(step % 2);
      for (int64_t row = 0; row < kRows; row++)
        std::copy_n(x.data() + row * n + first, widths[size_t(rank)],
                    parts[turn][rank].data() + row * widths[size_t(rank)]);
      int32_t status = 0;
      if (step % 3 == 0) {
        status = blockrelay_gather(pool, shared.bytes, rank, kRanks, addresses[turn], widths.data(), whole.data(), kRows, n);
        if (whole != x) ok = false;
      } else if (step % 3 == 1) {
        status = blockrelay_gather_quantise(pool, shared.bytes, rank, kRanks, addresses[turn], widths.data(), own_u.data(),
                                            own_scales.data(), kRows, n, 16, 0);
        if (own_u != u || own_scales != scales) ok = false;
      } else {
        own_sum.assign(own_sum.size(), 1.0f);
        status = blockrelay_gather_add_scaled(pool, shared.bytes, rank, kRanks, addresses[turn], widths.data(),
                                              own_sum.data(), scale.data(), kRows, n);
        if (own_sum != sum) ok = false;
      }
      if (status != kOk) ok = false;
    }
    blockrelay_close(pool);
  };
  std::thread others[] = {std::thread(run, 1), std::thread(run, 2)};
  run(0);
  for (auto& other : others) other.join();
  return ok;
}

// A rank that waits for one that never comes goes on when the meeting is broken, and so does every later wait.
bool ranks_part() {
  Shared shared;
  void* const pool = blockrelay_open(1);
  int32_t status[2] = {kOk, kOk};
  std::thread waits([&] {
    for (auto& each : status) each = blockrelay_gather(pool, shared.bytes, 1, kRanks, nullptr, nullptr, nullptr, 0, 0);
  });
  blockrelay_set_event(pool, shared.bytes, 1);
  waits.join();
  blockrelay_close(pool);
  return status[0] == kRankGone && status[1] == kRankGone;
}

}  // namespace
