// Ranks, processes that compute one stage together, meet in memory that they share: each writes its columns of a matrix,
// waits for the others, and reads the columns of all.
#pragma once

#include <algorithm>
#include <atomic>
#include <climits>
#include <ctime>

#include "pool.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace blockrelay {

static_assert(std::atomic<uint32_t>::is_always_lock_free, "processes share these numbers");

// A number that other processes wait for, in a cache line of its own.
struct alignas(64) Event {
  std::atomic<uint32_t> number;
  std::atomic<uint32_t> sleeping;  // processes that have to be woken

  // Sleeps until the number is not `seen`, for 50 ms at most. It may wake too early.
  void sleep(uint32_t seen) {
    sleeping.fetch_add(1);
#if defined(__linux__)
    const timespec limit = {0, 50000000};
    syscall(SYS_futex, &number, FUTEX_WAIT, seen, &limit, nullptr, 0);
#else
    const timespec pause = {0, 50000};
    if (number.load() == seen) nanosleep(&pause, nullptr);
#endif
    sleeping.fetch_sub(1);
  }

  // Sets the number and wakes those that wait for it.
  void set(uint32_t value) {
    number.store(value);
    if (sleeping.load() == 0) return;
#if defined(__linux__)
    syscall(SYS_futex, &number, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
  }
};
static_assert(sizeof(Event) == 64, "as execution/ranks/memory.py lays it out");

// The beginning of the memory that ranks share; all zeros at first.
struct Meeting {
  Event broken;  // not 0 once a rank is gone

  // The event of a rank: how often it has come to a meeting.
  Event& arrived(int64_t rank) { return (&broken)[rank + 1]; }
};

// Waits until the number of `event` is at least `wanted` (they may wrap), or has slept `sleeps` times. Returns false when
// the meeting is broken.
inline bool wait_for(const Meeting& meeting, Event& event, uint32_t wanted, int64_t sleeps = INT64_MAX) {
  const auto there = [&] { return int32_t(event.number.load(std::memory_order_acquire) - wanted) >= 0; };
  while (!spin_until(there) && sleeps-- > 0) {
    if (meeting.broken.number.load()) return false;
    const uint32_t seen = event.number.load();
    if (int32_t(seen - wanted) < 0) event.sleep(seen);
  }
  return true;
}

// Waits for all ranks, of which this process is `rank`: what they wrote before can be read. Returns false when the
// meeting is broken.
inline bool meet(Meeting& meeting, int64_t rank, int64_t ranks) {
  const uint32_t number = meeting.arrived(rank).number.load(std::memory_order_relaxed) + 1;
  meeting.arrived(rank).set(number);
  for (int64_t other = 0; other < ranks; other++)
    if (other != rank && !wait_for(meeting, meeting.arrived(other), number)) return false;
  return true;
}

// A matrix whose columns ranks have computed: those of rank i are parts[i] [rows, widths[i]].
struct Gathered {
  const float* const* parts;
  const int64_t* widths;
  int64_t ranks;

  // Calls work(values of the row, number of values, their first column) for each rank.
  template <class Work>
  void each_part(int64_t row, const Work& work) const {
    for (int64_t rank = 0, column = 0; rank < ranks; column += widths[rank++])
      work(parts[rank] + row * widths[rank], widths[rank], column);
  }

  void copy_row(int64_t row, float* to) const {
    each_part(row, [&](const float* from, int64_t count, int64_t column) { std::copy(from, from + count, to + column); });
  }
};

}  // namespace blockrelay
