// Programs: calls of exported functions that are recorded once and replayed. A call from Python takes as long as a
// small kernel, and a decode step makes two hundred. Arguments are 8-byte words: addresses, doubles, signed integers.
#pragma once

#include <chrono>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "registers.h"

namespace blockrelay {

using Invoke = int32_t (*)(void* pool, const uint64_t* words);

template <class T>
inline T argument(uint64_t word) {
  if constexpr (std::is_pointer_v<T>)
    return reinterpret_cast<T>(static_cast<uintptr_t>(word));
  else if constexpr (std::is_floating_point_v<T>)
    return bit_cast<T>(word);
  else
    return static_cast<T>(static_cast<int64_t>(word));
}

// Invoker<&function>::invoke(pool, words) calls function(pool, ...) with the words as its other arguments.
template <auto function>
struct Invoker;

template <class... A, int32_t (*function)(void*, A...)>
struct Invoker<function> {
  static int32_t invoke(void* pool, const uint64_t* words) { return spread(pool, words, std::index_sequence_for<A...>()); }

 private:
  template <size_t... I>
  static int32_t spread(void* pool, const uint64_t* words, std::index_sequence<I...>) {
    return function(pool, argument<A>(words[I])...);
  }
};

struct Step {
  Invoke invoke;
  const uint64_t* words;
  int64_t ended;  // written by run_steps: end of the call in nanoseconds of the steady clock
};
static_assert(sizeof(Step) == 24, "as kernels/recorded.py lays it out");

// Makes the calls until one returns a status other than 0. Returns 0, or that status + 256 * the call's index.
inline int64_t run_steps(void* pool, Step* steps, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    if (const int32_t status = steps[i].invoke(pool, steps[i].words)) return i * 256 + status;
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    steps[i].ended = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
  }
  return 0;
}

}  // namespace blockrelay
