// The functions that Python calls, built once per instruction set. They return a status: 0, 1 for an index out of
// range, 2 for no memory, 3 for a rank that is gone; unless it is 0, nothing valid was written. The caller
// (kernels/interface.py) has checked shapes, dtypes and layouts. `epsilon` is rounded to float here, where the rounding
// mode is known.
#pragma once

#include <new>
#include <system_error>

#include "attention.h"
#include "group_matmul.h"
#include "matmul.h"
#include "meeting.h"
#include "peaks.h"
#include "program.h"
#include "rotary.h"
#include "sampling.h"

#define BLOCKRELAY_EXPORT extern "C" __attribute__((visibility("default")))

using namespace blockrelay;

namespace {

enum Status : int32_t { kOk = 0, kIndexOutOfRange = 1, kNoMemory = 2, kRankGone = 3 };

bool in_range(const int32_t* index, int64_t count, int64_t end) {
  for (int64_t i = 0; i < count; i++)
    if (index[i] < 0 || index[i] >= end) return false;
  return true;
}

bool segments_valid(const int64_t* segments, int64_t count, const int32_t* table, int64_t max_pages, int64_t rows,
                    int64_t pages) {
  int64_t next_row = 0;
  for (int64_t s = 0; s < count; s++) {
    const int64_t first = segments[s * 3], length = segments[s * 3 + 1], position = segments[s * 3 + 2];
    if (first != next_row || length < 0 || length > rows - first || position < 0) return false;
    next_row += length;
    if (length == 0) continue;
    if (position > max_pages * kPage - length) return false;
    if (!in_range(table + s * max_pages, (position + length + kPage - 1) / kPage, pages)) return false;
  }
  return next_row == rows;
}

template <class E>
int32_t rotary_of(Pool& pool, RotaryCall<E> call, int64_t positions, int64_t pages) {
  if (!in_range(call.positions, call.rows, positions) || !in_range(call.page, call.rows, pages) ||
      !in_range(call.slot, call.rows, kPage))
    return kIndexOutOfRange;
  return rotary_append(pool, call) ? kOk : kNoMemory;
}

template <class E>
int32_t attention_of(Pool& pool, const AttentionCall<E>& call, int64_t pages) {
  if (!segments_valid(call.segments, call.segment_count, call.page_table, call.max_pages, call.rows, pages))
    return kIndexOutOfRange;
  try {
    return attention(pool, call) ? kOk : kNoMemory;
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
}

// Writes swiglu of a row of gate_up [R,2M], times row_scale [R] unless that is null, to `out` [M] and returns `out`.
float* swiglu_row(const float* gate_up, const float* row_scale, int64_t row, int64_t columns, float* out) {
  const float* gate = gate_up + row * 2 * columns;
  const float* up = gate + columns;
  for (int64_t i = 0; i < columns; i += kLanes) {
    const int lanes = lanes_left(i, columns);
    V16 g = load_some(gate + i, lanes), u = load_some(up + i, lanes);
    if (row_scale) {
      g = g * V16::broadcast(row_scale[row]);
      u = u * V16::broadcast(row_scale[row]);
    }
    store_some(out + i, swiglu(g, u), lanes);
  }
  return out;
}

// Adds `count` values of y, times *scale unless that is null, to those of x.
void add_scaled_values(float* x, const float* y, int64_t count, const float* scale) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const int lanes = lanes_left(i, count);
    V16 more = load_some(y + i, lanes);
    if (scale) more = more * V16::broadcast(*scale);
    store_some(x + i, load_some(x + i, lanes) + more, lanes);
  }
}

}  // namespace

// Must equal LIBRARY_VERSION in kernels/libraries.py, so that a library left over from an older install is not used.
BLOCKRELAY_EXPORT int32_t blockrelay_version() { return 15; }

// Makes the pool of threads that every other function takes; null if it cannot be made.
BLOCKRELAY_EXPORT void* blockrelay_open(int32_t threads) {
  try {
    return new Pool(threads);
  } catch (const std::bad_alloc&) {
    return nullptr;
  } catch (const std::system_error&) {
    return nullptr;
  }
}

// Frees the pool. No call may be running, and none may follow.
BLOCKRELAY_EXPORT void blockrelay_close(void* pool) { delete static_cast<Pool*>(pool); }

BLOCKRELAY_EXPORT int32_t blockrelay_norm(void* pool, const float* x, const float* weight, double epsilon, float* out,
                                          int64_t rows, int64_t n) {
  StandardRounding rounding;
  const float eps = float(epsilon);
  static_cast<Pool*>(pool)->run(rows, 4, rows * n * 4, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const float* in = x + row * n;
      const V16 inverse = V16::broadcast(inverse_root_mean_square(in, n, eps));
      for (int64_t i = 0; i < n; i += kLanes) {
        const int lanes = lanes_left(i, n);
        store_some(out + row * n + i, load_some(in + i, lanes) * inverse * load_some(weight + i, lanes), lanes);
      }
    }
    return true;
  });
  return kOk;
}

BLOCKRELAY_EXPORT int32_t blockrelay_norm_quantise(void* pool, const float* x, const float* weight, double epsilon,
                                                   uint8_t* u, float* scale, int64_t rows, int64_t n, int64_t group) {
  StandardRounding rounding;
  const float eps = float(epsilon);
  static_cast<Pool*>(pool)->run(rows, 4, rows * n * 8, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const float* in = x + row * n;
      const V16 inverse = V16::broadcast(inverse_root_mean_square(in, n, eps));
      auto value = [&](int64_t i, int lanes) {
        return load_some(in + i, lanes) * inverse * load_some(weight + i, lanes);
      };
      quantise_values(value, row, n, group, u, scale);
    }
    return true;
  });
  return kOk;
}

BLOCKRELAY_EXPORT int32_t blockrelay_quantise(void* pool, const float* x, uint8_t* u, float* scale, int64_t rows,
                                              int64_t n, int64_t hadamard_size, int64_t group) {
  StandardRounding rounding;
  bool ok = static_cast<Pool*>(pool)->run(rows, 4, rows * n * 4, [&](int64_t begin, int64_t end) {
    float* const turned = hadamard_size ? scratch(size_t(n)) : nullptr;
    if (hadamard_size && !turned) return false;
    for (int64_t row = begin; row < end; row++) {
      const float* from = x + row * n;
      if (hadamard_size) {
        std::copy(from, from + n, turned);
        hadamard(turned, n, hadamard_size);
        from = turned;
      }
      auto value = [&](int64_t i, int lanes) { return load_some(from + i, lanes); };
      quantise_values(value, row, n, group, u, scale);
    }
    return true;
  });
  return ok ? kOk : kNoMemory;
}

BLOCKRELAY_EXPORT int32_t blockrelay_add_scaled(void* pool, float* x, const float* y, const float* row_scale,
                                                int64_t rows, int64_t n) {
  StandardRounding rounding;
  static_cast<Pool*>(pool)->run(rows, 4, rows * n * 2, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++)
      add_scaled_values(x + row * n, y + row * n, n, row_scale ? row_scale + row : nullptr);
    return true;
  });
  return kOk;
}

BLOCKRELAY_EXPORT int32_t blockrelay_scale_rows(void* pool, float* x, const float* row_scale, int64_t rows, int64_t n) {
  StandardRounding rounding;
  static_cast<Pool*>(pool)->run(rows, 1, rows * n, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      float* to = x + row * n;
      for (int64_t i = 0; i < n; i += kLanes) {
        const int lanes = lanes_left(i, n);
        store_some(to + i, load_some(to + i, lanes) * V16::broadcast(row_scale[row]), lanes);
      }
    }
    return true;
  });
  return kOk;
}

BLOCKRELAY_EXPORT int32_t blockrelay_swiglu(void* pool, const float* gate_up, const float* row_scale, float* out,
                                            int64_t rows, int64_t n) {
  StandardRounding rounding;
  static_cast<Pool*>(pool)->run(rows, 2, rows * n * 20, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) swiglu_row(gate_up, row_scale, row, n, out + row * n);
    return true;
  });
  return kOk;
}

BLOCKRELAY_EXPORT int32_t blockrelay_swiglu_quantise(void* pool, const float* gate_up, const float* row_scale,
                                                     uint8_t* u, float* scale, int64_t rows, int64_t n,
                                                     int64_t hadamard_size, int64_t group) {
  StandardRounding rounding;
  bool ok = static_cast<Pool*>(pool)->run(rows, 2, rows * n * 24, [&](int64_t begin, int64_t end) {
    float* y = scratch(size_t(n));
    if (!y) return false;
    for (int64_t row = begin; row < end; row++) {
      swiglu_row(gate_up, row_scale, row, n, y);
      if (hadamard_size) hadamard(y, n, hadamard_size);
      auto value = [&](int64_t i, int lanes) { return load_some(y + i, lanes); };
      quantise_values(value, row, n, group, u, scale);
    }
    return true;
  });
  return ok ? kOk : kNoMemory;
}

BLOCKRELAY_EXPORT int32_t blockrelay_rotary_append(
    void* pool, const float* qkv, const float* row_scale, const float* bias, const float* norm_q, const float* norm_k,
    double epsilon, const float* cos, const float* sin, const int32_t* positions, const int32_t* page, const int32_t* slot,
    void* k_pages, void* v_pages, float* q, int32_t half_pages, int64_t rows, int64_t table_rows, int64_t pages,
    int32_t query_heads, int32_t kv_heads, int32_t head_dim) {
  StandardRounding rounding;
  const float eps = float(epsilon);
  Pool& p = *static_cast<Pool*>(pool);
  if (half_pages)
    return rotary_of(p,
                     RotaryCall<Half>{qkv, row_scale, bias, norm_q, norm_k, cos, sin, positions, page, slot,
                                      static_cast<Half*>(k_pages), static_cast<Half*>(v_pages), q, rows, eps,
                                      query_heads, kv_heads, head_dim},
                     table_rows, pages);
  return rotary_of(p,
                   RotaryCall<float>{qkv, row_scale, bias, norm_q, norm_k, cos, sin, positions, page, slot,
                                     static_cast<float*>(k_pages), static_cast<float*>(v_pages), q, rows, eps,
                                     query_heads, kv_heads, head_dim},
                   table_rows, pages);
}

BLOCKRELAY_EXPORT int32_t blockrelay_attention(void* pool, const float* q, const void* k_pages, const void* v_pages,
                                               const int32_t* page_table, const int64_t* segments, float* out,
                                               int32_t half_pages, int64_t segment_count, int64_t max_pages,
                                               int64_t rows, int64_t pages, int32_t query_heads, int32_t kv_heads,
                                               int32_t head_dim) {
  StandardRounding rounding;
  Pool& p = *static_cast<Pool*>(pool);
  if (half_pages)
    return attention_of(p,
                        AttentionCall<Half>{q, static_cast<const Half*>(k_pages), static_cast<const Half*>(v_pages),
                                            page_table, segments, out, segment_count, max_pages, rows, query_heads,
                                            kv_heads, head_dim},
                        pages);
  return attention_of(p,
                      AttentionCall<float>{q, static_cast<const float*>(k_pages), static_cast<const float*>(v_pages),
                                           page_table, segments, out, segment_count, max_pages, rows, query_heads,
                                           kv_heads, head_dim},
                      pages);
}

BLOCKRELAY_EXPORT void blockrelay_pack_groups(void* pool, const uint8_t* q4, const void* gs, const void* gm,
                                              int64_t depth, int64_t columns, uint8_t* panels) {
  pack_groups(*static_cast<Pool*>(pool), q4, static_cast<const Half*>(gs), static_cast<const Half*>(gm), depth, columns,
              panels);
}

BLOCKRELAY_EXPORT int32_t blockrelay_multiply_groups(void* pool, const uint8_t* u, const float* scale,
                                                     const uint8_t* panels, float* y, int64_t rows, int64_t depth,
                                                     int64_t columns) {
  StandardRounding rounding;
  try {
    const GroupWeights weights{panels, depth, columns};
    return multiply_groups(*static_cast<Pool*>(pool), u, scale, rows, weights, y) ? kOk : kNoMemory;
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
}

BLOCKRELAY_EXPORT void blockrelay_pack_weights(void* pool, const int8_t* q, int64_t depth, int64_t columns,
                                               int8_t* panels, int32_t* start) {
  pack_weights(*static_cast<Pool*>(pool), q, depth, columns, panels, start);
}

BLOCKRELAY_EXPORT int32_t blockrelay_multiply(void* pool, const uint8_t* u, const int8_t* panels, const int32_t* start,
                                              const float* scale, float* y, int64_t rows, int64_t depth,
                                              int64_t columns) {
  StandardRounding rounding;
  try {
    return multiply(*static_cast<Pool*>(pool), u, rows, {panels, start, scale, depth, columns}, y) ? kOk : kNoMemory;
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
}

// Sets the least number of rows for which int8 matmuls use tiles; does nothing in builds without them.
BLOCKRELAY_EXPORT void blockrelay_tiles_from([[maybe_unused]] void* pool, [[maybe_unused]] int64_t rows) {
#if defined(BLOCKRELAY_TILES)
  tiles_from.store(rows, std::memory_order_relaxed);
#endif
}

BLOCKRELAY_EXPORT int32_t blockrelay_sample(void* pool, void* rows, int64_t count, int64_t* ids, double* logprobs,
                                            int64_t width) {
  StandardRounding rounding;
  try {
    SampledRow* const sampled = static_cast<SampledRow*>(rows);
    return sample_rows(*static_cast<Pool*>(pool), sampled, count, ids, logprobs, width) ? kOk : kIndexOutOfRange;
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
}

// Has all ranks meet, then writes the columns of all to `out` [rows,n], unless that is null. `parts` are the addresses of
// the columns of each rank, and `widths` their numbers (meeting.h).
BLOCKRELAY_EXPORT int32_t blockrelay_gather(void* pool, void* meeting, int64_t rank, int64_t ranks, const void* parts,
                                            const int64_t* widths, float* out, int64_t rows, int64_t n) {
  if (!meet(*static_cast<Meeting*>(meeting), rank, ranks)) return kRankGone;
  const Gathered gathered{static_cast<const float* const*>(parts), widths, ranks};
  if (out)
    static_cast<Pool*>(pool)->run(rows, 4, rows * n, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row++) gathered.copy_row(row, out + row * n);
      return true;
    });
  return kOk;
}

// quantise of what `gather` would write.
BLOCKRELAY_EXPORT int32_t blockrelay_gather_quantise(void* pool, void* meeting, int64_t rank, int64_t ranks,
                                                     const void* parts, const int64_t* widths, uint8_t* u, float* scale,
                                                     int64_t rows, int64_t n, int64_t hadamard_size, int64_t group) {
  StandardRounding rounding;
  if (!meet(*static_cast<Meeting*>(meeting), rank, ranks)) return kRankGone;
  const Gathered gathered{static_cast<const float* const*>(parts), widths, ranks};
  bool ok = static_cast<Pool*>(pool)->run(rows, 4, rows * n * 4, [&](int64_t begin, int64_t end) {
    float* const x = scratch(size_t(n));
    if (!x) return false;
    for (int64_t row = begin; row < end; row++) {
      gathered.copy_row(row, x);
      if (hadamard_size) hadamard(x, n, hadamard_size);
      auto value = [&](int64_t i, int lanes) { return load_some(x + i, lanes); };
      quantise_values(value, row, n, group, u, scale);
    }
    return true;
  });
  return ok ? kOk : kNoMemory;
}

// add_scaled of what `gather` would write.
BLOCKRELAY_EXPORT int32_t blockrelay_gather_add_scaled(void* pool, void* meeting, int64_t rank, int64_t ranks,
                                                       const void* parts, const int64_t* widths, float* x,
                                                       const float* row_scale, int64_t rows, int64_t n) {
  StandardRounding rounding;
  if (!meet(*static_cast<Meeting*>(meeting), rank, ranks)) return kRankGone;
  const Gathered gathered{static_cast<const float* const*>(parts), widths, ranks};
  static_cast<Pool*>(pool)->run(rows, 4, rows * n * 2, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++)
      gathered.each_part(row, [&](const float* y, int64_t count, int64_t column) {
        add_scaled_values(x + row * n + column, y, count, row_scale ? row_scale + row : nullptr);
      });
    return true;
  });
  return kOk;
}

// Sets the number of an event (meeting.h).
BLOCKRELAY_EXPORT int32_t blockrelay_set_event(void*, void* event, int64_t number) {
  static_cast<Event*>(event)->set(uint32_t(number));
  return kOk;
}

// Waits until the number of an event is at least `number`, but not much longer than 50 ms.
BLOCKRELAY_EXPORT int32_t blockrelay_wait_for_event(void*, void* meeting, void* event, int64_t number) {
  const bool whole = wait_for(*static_cast<const Meeting*>(meeting), *static_cast<Event*>(event), uint32_t(number), 1);
  return whole ? kOk : kRankGone;
}

// Reads `bytes` (a multiple of 128) at p on all threads and writes a sum of them to `sum`.
BLOCKRELAY_EXPORT int32_t blockrelay_read_all(void* pool, const uint8_t* p, int64_t bytes, uint64_t* sum) {
  *sum = read_all(*static_cast<Pool*>(pool), p, bytes);
  return kOk;
}

// Makes multiply-adds of bytes, or of float32 if `floats`, in the registers of all threads; writes their number to `made`.
BLOCKRELAY_EXPORT int32_t blockrelay_multiply_adds(void* pool, int64_t steps, int32_t floats, double* made) {
  Pool& threads = *static_cast<Pool*>(pool);
#if defined(BLOCKRELAY_TILES)
  *made = floats ? multiply_adds<FloatUnit>(threads, steps) : tile_multiply_adds(threads, steps);
#else
  *made = floats ? multiply_adds<FloatUnit>(threads, steps) : multiply_adds<ByteUnit>(threads, steps);
#endif
  return kOk;
}

// Returns the invoker with which a program calls a function, by name without prefix; null for other names.
BLOCKRELAY_EXPORT void* blockrelay_invoker(const char* name) {
  static constexpr struct {
    const char* name;
    Invoke invoke;
  } all[] = {
      {"norm", Invoker<&blockrelay_norm>::invoke},
      {"norm_quantise", Invoker<&blockrelay_norm_quantise>::invoke},
      {"quantise", Invoker<&blockrelay_quantise>::invoke},
      {"add_scaled", Invoker<&blockrelay_add_scaled>::invoke},
      {"scale_rows", Invoker<&blockrelay_scale_rows>::invoke},
      {"swiglu", Invoker<&blockrelay_swiglu>::invoke},
      {"swiglu_quantise", Invoker<&blockrelay_swiglu_quantise>::invoke},
      {"rotary_append", Invoker<&blockrelay_rotary_append>::invoke},
      {"attention", Invoker<&blockrelay_attention>::invoke},
      {"multiply_groups", Invoker<&blockrelay_multiply_groups>::invoke},
      {"multiply", Invoker<&blockrelay_multiply>::invoke},
      {"gather", Invoker<&blockrelay_gather>::invoke},
      {"gather_quantise", Invoker<&blockrelay_gather_quantise>::invoke},
      {"gather_add_scaled", Invoker<&blockrelay_gather_add_scaled>::invoke},
  };
  for (const auto& one : all)
    if (std::strcmp(one.name, name) == 0) return reinterpret_cast<void*>(one.invoke);
  return nullptr;
}

// Makes the calls of a program (kernels/recorded.py). Returns 0, or 256 * the index of the failed call + its status.
BLOCKRELAY_EXPORT int64_t blockrelay_run(void* pool, void* steps, int64_t count) {
  return run_steps(pool, static_cast<Step*>(steps), count);
}
