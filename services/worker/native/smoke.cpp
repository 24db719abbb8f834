// Calls every kernel on random shapes with buffers of exactly their size: for the sanitizers (sanitize.sh).
// Prints a digest of all results, which is the same on every machine; exit status 1 when one and three threads give
// different bytes, or bad indices are not refused.
#include <cstdio>

#include "smoke_ranks.h"
#include "smoke_values.h"

namespace {

bool rows_agree(const Pools& pools) {
  const int64_t step = between(0, 1) ? 1 : 64;
  const int64_t rows = between(0, 60), n = step * between(1, (between(0, 1) ? 70 : 3000) / step);
  const int64_t groups = n % kGroupDepth ? 0 : n / kGroupDepth;
  const int64_t two_power = n & -n, size = two_power < 16 || between(0, 3) == 0 ? 0 : two_power;
  const auto x = floats(rows * n), weight = floats(n), scale = floats(rows), gate_up = floats(rows * 2 * n);
  struct Result {
    Buffer<float> normed, swiglu, added, scaled, scale[6];
    Buffer<uint8_t> u[6];
  } result[2];
  void* const pool[] = {pools.one, pools.three};
  for (int i = 0; i < 2; i++) {
    Result& r = result[i];
    r.normed.resize(x.size());
    r.swiglu.resize(x.size());
    r.added = r.scaled = x;
    for (int k = 0; k < 6; k++) {
      r.u[k].resize(x.size());
      r.scale[k].resize(k < 3 ? scale.size() : size_t(rows * groups));
    }
    blockrelay_norm(pool[i], x.data(), weight.data(), 1e-5, r.normed.data(), rows, n);
    blockrelay_swiglu(pool[i], gate_up.data(), nullptr, r.swiglu.data(), rows, n);
    blockrelay_add_scaled(pool[i], r.added.data(), x.data(), between(0, 1) ? scale.data() : nullptr, 0, n);
    blockrelay_add_scaled(pool[i], r.added.data(), x.data(), scale.data(), rows, n);
    blockrelay_scale_rows(pool[i], r.scaled.data(), scale.data(), rows, n);
    for (int k = 0; k < (groups ? 6 : 3); k += 3) {
      const int64_t group = k ? kGroupDepth : 0;
      Buffer<uint8_t>* u = r.u + k;
      Buffer<float>* s = r.scale + k;
      blockrelay_norm_quantise(pool[i], x.data(), weight.data(), 1e-5, u[0].data(), s[0].data(), rows, n, group);
      blockrelay_quantise(pool[i], x.data(), u[1].data(), s[1].data(), rows, n, k ? 0 : size, group);
      blockrelay_swiglu_quantise(pool[i], gate_up.data(), k ? nullptr : scale.data(), u[2].data(), s[2].data(), rows, n,
                                 size, group);
    }
  }
  bool ok = same(result[0].normed, result[1].normed) && same(result[0].swiglu, result[1].swiglu) &&
            same(result[0].added, result[1].added) && same(result[0].scaled, result[1].scaled);
  for (int k = 0; k < 6; k++)
    ok = ok && same(result[0].u[k], result[1].u[k]) && same(result[0].scale[k], result[1].scale[k]);
  return ok;
}

// Runs a program of two calls, of which the second reads the result of the first, twice; a bad index stops a program.
bool program_agrees(const Pools& pools) {
  const int64_t rows = between(1, 20), n = between(1, 300);
  const auto x = floats(rows * n), weight = floats(n);
  Buffer<float> normed(x.size()), scale[2];
  Buffer<uint8_t> u[2];
  for (int i = 0; i < 2; i++) {
    u[i].resize(x.size());
    scale[i].resize(size_t(rows));
  }
  blockrelay_norm(pools.three, x.data(), weight.data(), 1e-5, normed.data(), rows, n);
  blockrelay_quantise(pools.three, normed.data(), u[0].data(), scale[0].data(), rows, n, 0, 0);
  normed.assign(normed.size(), 0.0f);
  const auto word = [](const auto* p) { return uint64_t(reinterpret_cast<uintptr_t>(p)); };
  const uint64_t norm[] = {word(x.data()), word(weight.data()), bit_cast<uint64_t>(1e-5), word(normed.data()),
                           uint64_t(rows), uint64_t(n)};
  const uint64_t quantise[] = {word(normed.data()), word(u[1].data()), word(scale[1].data()), uint64_t(rows),
                               uint64_t(n), 0, 0};
  const auto invoker = [](const char* name) { return reinterpret_cast<Invoke>(blockrelay_invoker(name)); };
  Step steps[] = {{invoker("norm"), norm, 0}, {invoker("quantise"), quantise, 0}};
  bool ok = blockrelay_invoker("nothing") == nullptr;
  for (int i = 0; i < 2; i++) {
    u[1].assign(u[1].size(), 0);
    ok = ok && blockrelay_run(pools.three, steps, 2) == kOk && steps[0].ended <= steps[1].ended;
    ok = ok && u[0] == u[1] && std::memcmp(scale[0].data(), scale[1].data(), scale[0].size() * sizeof(float)) == 0;
  }
  const int64_t segment[] = {0, 1, 0};
  const int32_t table[] = {7};
  const uint64_t attention[] = {word(x.data()), word(x.data()), word(x.data()), word(table), word(segment),
                                word(normed.data()), 0, 1, 1, 1, 1, 1, 1, 8};
  Step refused[] = {steps[0], {invoker("attention"), attention, 0}, steps[1]};
  return ok && blockrelay_run(pools.three, refused, 3) == 256 + kIndexOutOfRange;
}

void assign(float& to, float x) { to = x; }
void assign(Half& to, float x) { to = narrow(x); }

template <class E>
bool attention_agrees(const Pools& pools, E unused) {
  const int kv_heads = int(between(1, 4)), group = int(between(1, 9)), dim = 8 * int(between(1, 32));
  const int query_heads = kv_heads * group, width = (query_heads + 2 * kv_heads) * dim;
  const bool spans = between(0, 3) == 0;  // a few rows with several spans of keys, rather than many rows
  const int64_t count = between(1, 4), max_pages = spans ? between(kSpanPages, 3 * kSpanPages) : between(1, 8);
  Buffer<int64_t> segments;
  Buffer<int32_t> table, positions, page, slot;
  int64_t rows = 0;
  for (int64_t s = 0; s < count; s++) {
    const int64_t first = between(0, max_pages * kPage - 1), rest = max_pages * kPage - first;
    const int64_t some = between(0, spans ? std::min<int64_t>(rest, 20) : rest);
    const int64_t to_page_end = (first + some + kPage - 1) / kPage * kPage - first;
    const int64_t length = between(0, 1) ? some : to_page_end;
    segments.insert(segments.end(), {rows, length, first});
    // Entries behind the pages that the segment needs are invalid.
    for (int64_t i = 0; i < max_pages; i++)
      table.push_back(i * kPage < first + length ? int32_t(s * max_pages + i) : 0x3FFFFFFF);
    for (int64_t i = 0; i < length; i++) {
      positions.push_back(int32_t(first + i));
      page.push_back(int32_t(s * max_pages + (first + i) / kPage));
      slot.push_back(int32_t((first + i) % kPage));
    }
    rows += length;
  }
  const int64_t pages = count * max_pages, page_size = int64_t(kv_heads) * dim * kPage;
  // Pages hold keys and values of the positions before each segment; nothing that counts is in the slots behind it.
  Buffer<E> k_before(size_t(pages * page_size), unused), v_before(k_before);
  const auto some_keys = floats(page_size), some_values = floats(page_size);
  for (int64_t s = 0; s < count; s++)
    for (int64_t position = 0; position < segments[size_t(s * 3 + 2)]; position++)
      for (int64_t head_d = 0; head_d < kv_heads * dim; head_d++) {
        const int64_t at = (s * max_pages + position / kPage) * page_size, t = position % kPage;
        const int64_t head = head_d / dim, d = head_d % dim, from = (head_d + position * 7) % page_size;
        assign(k_before[size_t(at + (head * dim + d) * kPage + t)], some_keys[size_t(from)]);
        assign(v_before[size_t(at + (head * kPage + t) * dim + d)], some_values[size_t(from)]);
      }
  const auto qkv = floats(rows * width), scale = floats(rows), bias = floats(width), norm = floats(dim);
  const auto cos = floats(max_pages * kPage * dim / 2), sin = floats(max_pages * kPage * dim / 2);
  const bool plain = between(0, 1);
  struct Result {
    Buffer<float> q, out;
    Buffer<E> k, v;
  } result[2];
  void* const pool[] = {pools.one, pools.three};
  bool ok = true;
  for (int i = 0; i < 2; i++) {
    Result& r = result[i];
    r.q.resize(size_t(rows * query_heads * dim));
    r.out.resize(r.q.size());
    r.k = k_before;
    r.v = v_before;
    ok = ok && blockrelay_rotary_append(pool[i], qkv.data(), plain ? nullptr : scale.data(),
                                        plain ? nullptr : bias.data(), plain ? nullptr : norm.data(),
                                        plain ? nullptr : norm.data(), 1e-6, cos.data(), sin.data(), positions.data(),
                                        page.data(), slot.data(), r.k.data(), r.v.data(), r.q.data(),
                                        sizeof(E) == sizeof(Half), rows, max_pages * kPage, pages, query_heads,
                                        kv_heads, dim) == kOk;
    ok = ok && blockrelay_attention(pool[i], r.q.data(), r.k.data(), r.v.data(), table.data(), segments.data(),
                                    r.out.data(), sizeof(E) == sizeof(Half), count, max_pages, rows, pages,
                                    query_heads, kv_heads, dim) == kOk;
    auto wrong = segments;
    wrong[2] = max_pages * kPage + 1 - wrong[1];
    if (wrong[1])
      ok = ok && blockrelay_attention(pool[i], r.q.data(), r.k.data(), r.v.data(), table.data(), wrong.data(),
                                      r.out.data(), sizeof(E) == sizeof(Half), count, max_pages, rows, pages,
                                      query_heads, kv_heads, dim) == kIndexOutOfRange;
  }
  return ok && same(result[0].q, result[1].q) && same(result[0].out, result[1].out) &&
         same(result[0].k, result[1].k) && same(result[0].v, result[1].v);
}

// One long request of a model with one key/value head, which threads share, beside another one.
template <class E>
bool shared_attention_agrees(const Pools& pools) {
  constexpr int group = 4, dim = 64;
  constexpr int64_t max_pages = 130, page_size = dim * kPage;
  const Buffer<int64_t> segments = {0, 1, 2000, 1, 2, 1500};
  Buffer<int32_t> table(2 * max_pages);
  for (size_t i = 0; i < table.size(); i++) table[i] = int32_t(i);
  const auto q = tame(3 * group * dim);
  const auto keys = tame(2 * max_pages * page_size), values = tame(2 * max_pages * page_size);
  Buffer<E> k(keys.size()), v(values.size());
  for (size_t i = 0; i < keys.size(); i++) {
    assign(k[i], keys[i]);
    assign(v[i], values[i]);
  }
  Buffer<float> out[2];
  void* const pool[] = {pools.one, pools.three};
  bool ok = true;
  for (int i = 0; i < 2; i++) {
    out[i].resize(q.size());
    ok = ok && blockrelay_attention(pool[i], q.data(), k.data(), v.data(), table.data(), segments.data(), out[i].data(),
                                    sizeof(E) == sizeof(Half), 2, max_pages, 3, 2 * max_pages, group, 1, dim) == kOk;
  }
  return ok && same(out[0], out[1]);
}

// Compares matmuls of random sizes with their definition. `whole`: the depth is one that tiles take.
bool products_agree(const Pools& pools, bool whole) {
  const int64_t rows = between(1, whole ? 100 : 40), columns = between(1, 150);
  const int64_t depth = whole ? 64 * between(1, 5) : between(1, between(0, 1) ? 70 : 700);
  blockrelay_tiles_from(pools.one, between(1, 20));
  Buffer<uint8_t> u(static_cast<size_t>(rows * depth));
  Buffer<int8_t> q(static_cast<size_t>(depth * columns));
  const bool extreme = between(0, 2) == 0;
  for (auto& x : u) x = uint8_t(extreme ? 1 + 254 * between(0, 1) : between(0, 255));
  for (auto& x : q) x = int8_t(extreme ? between(0, 1) * 255 - 128 : between(-128, 127));
  const auto scale = floats(columns);
  Buffer<float> expected(static_cast<size_t>(rows * columns));
  for (int64_t r = 0; r < rows; r++)
    for (int64_t n = 0; n < columns; n++) {
      int64_t sum = 0;  // GCC 12 gets sums of 32 bits wrong for aarch64
      for (int64_t k = 0; k < depth; k++) sum += (int64_t(u[size_t(r * depth + k)]) - 128) * q[size_t(k * columns + n)];
      expected[size_t(r * columns + n)] = float(sum) * scale[size_t(n)];
    }
  bool ok = true;
  const int64_t padded = (columns + kPanel - 1) / kPanel * kPanel;
  for (void* pool : {pools.one, pools.three}) {
    struct alignas(64) Line {
      int8_t bytes[64];
    };
    std::vector<Line> panels(static_cast<size_t>(padded * ((depth + kDepth - 1) / kDepth * kDepth) / 64));
    Buffer<int32_t> start(static_cast<size_t>(padded));
    Buffer<float> y(expected.size());
    blockrelay_pack_weights(pool, q.data(), depth, columns, panels.data()->bytes, start.data());
    ok = ok && blockrelay_multiply(pool, u.data(), panels.data()->bytes, start.data(), scale.data(), y.data(), rows,
                                   depth, columns) == kOk;
    for (size_t i = 0; i < y.size(); i++) ok = ok && equal(y[i], expected[i]);
  }
  for (const float x : expected) digest_value(x);
  return ok;
}

// Compares matmuls with int4 weights in groups, which every build has, with their definition.
bool group_products_agree(const Pools& pools) {
  const int64_t rows = between(1, 20), groups = between(1, 6), depth = groups * kGroupDepth, columns = between(1, 100);
  const bool extreme = between(0, 2) == 0;
  Buffer<uint8_t> u(static_cast<size_t>(rows * depth)), q4(static_cast<size_t>(depth / 2 * columns));
  for (auto& x : u) x = uint8_t(extreme ? 255 * between(0, 1) : between(0, 255));
  for (auto& x : q4) x = uint8_t(extreme ? 255 * between(0, 1) : between(0, 255));
  Buffer<Half> gs, gm;
  for (const float x : floats(groups * columns)) gs.push_back(narrow(x));
  for (const float x : floats(groups * columns)) gm.push_back(narrow(x));
  const auto scale = floats(rows * groups);
  const int64_t panels = (columns + kColumns - 1) / kColumns;
  struct alignas(64) Line {
    uint8_t bytes[64];
  };
  std::vector<Line> packed(static_cast<size_t>(panels * groups * kGroupBytes / 64));
  Buffer<float> result[2];
  void* const pool[] = {pools.one, pools.three};
  bool ok = true;
  for (int i = 0; i < 2; i++) {
    result[i].resize(static_cast<size_t>(rows * columns));
    blockrelay_pack_groups(pool[i], q4.data(), gs.data(), gm.data(), depth, columns, packed.data()->bytes);
    ok = ok && blockrelay_multiply_groups(pool[i], u.data(), scale.data(), packed.data()->bytes, result[i].data(), rows,
                                          depth, columns) == kOk;
  }
  for (int64_t r = 0; r < rows; r++)
    for (int64_t n = 0; n < columns; n++) {
      float acc = 0.0f;
      for (int64_t g = 0; g < groups; g++) {
        int32_t total = 0, dot = 0;
        for (int64_t k = g * kGroupDepth; k < (g + 1) * kGroupDepth; k++) {
          const int both = q4[size_t(k / 2 * columns + n)], x = int(u[size_t(r * depth + k)]) - 128;
          total += x;
          dot += x * (k % 2 ? both >> 4 : both & 15);
        }
        const float factor = scale[size_t(r * groups + g)];
        const float factors = widen(gs[size_t(g * columns + n)]) * factor;
        acc = __builtin_fmaf(float(total) * factor, widen(gm[size_t(g * columns + n)]), acc);
        acc = __builtin_fmaf(float(dot), factors, acc);
      }
      ok = ok && equal(result[0][size_t(r * columns + n)], acc);
    }
  return same(result[0], result[1]) && ok;
}

// Draws from rows of one kind each: with and without limits, changes, a mask and log probabilities.
bool sampling_agrees(const Pools& pools) {
  const int64_t rows = between(1, 9), n = between(1, between(0, 1) ? 70 : 4000), width = 20;
  Buffer<float> logits = tame(rows * n);
  for (float& x : logits) x *= between(0, 1) ? 8.0f : 0.5f;
  Buffer<uint32_t> allowed(size_t((n + 31) / 32));
  for (auto& word : allowed) word = uint32_t(generator()) | 1;
  const int64_t last = n - 1;
  const double replacement = 3.5;
  auto change = [&](SampledRow& r) { r.changed = &last, r.replacement = &replacement, r.changes = 1; };
  std::vector<SampledRow> before;
  for (int64_t i = 0; i < rows; i++) {
    SampledRow r{};
    r.logits = logits.data() + i * n;
    r.count = n;
    r.seed = generator();
    r.position = uint64_t(i);
    r.temperature = between(0, 3) / 2.0;
    r.top_p = between(0, 1) ? 1.0 : 0.97;
    r.min_p = between(0, 2) ? 0.0 : 0.01;
    r.total = std::numeric_limits<double>::quiet_NaN();
    r.top_k = between(0, 1) ? 0 : between(1, n + 1);
    r.logprobs = between(0, 1) ? -1 : between(0, width);
    r.allowed = between(0, 2) ? nullptr : allowed.data();
    if (between(0, 2) == 0) change(r);
    before.push_back(r);
  }
  std::vector<SampledRow> result[2] = {before, before};
  Buffer<int64_t> ids[2] = {Buffer<int64_t>(size_t(rows * width)), Buffer<int64_t>(size_t(rows * width))};
  Buffer<double> logprobs[2] = {Buffer<double>(ids[0].size()), Buffer<double>(ids[0].size())};
  void* const pool[] = {pools.one, pools.three};
  for (int i = 0; i < 2; i++)
    if (blockrelay_sample(pool[i], result[i].data(), rows, ids[i].data(), logprobs[i].data(), width)) return false;
  bool ok = ids[0] == ids[1] && logprobs[0] == logprobs[1];
  for (size_t i = 0; i < before.size(); i++) {
    ok = ok && result[0][i].token == result[1][i].token && result[0][i].logprob == result[1][i].logprob;
    for (const double x : {double(result[0][i].token), result[0][i].logprob}) digest_value(float(x));
  }
  change(before[0]);
  before[0].count = n - 1;  // the change is out of range then
  const auto refused = blockrelay_sample(pools.three, before.data(), rows, ids[0].data(), logprobs[0].data(), width);
  return ok && refused == kIndexOutOfRange;
}

}  // namespace

int main() {
  const Pools pools;
  for (int round = 0; round < 15; round++) {
    const bool ok = rows_agree(pools) && program_agrees(pools) && attention_agrees<Half>(pools, Half{kHalfNan}) &&
                    attention_agrees<float>(pools, nan()) && products_agree(pools, false) &&
                    products_agree(pools, true) && group_products_agree(pools) && sampling_agrees(pools);
    if (!ok) {
      std::printf("round %d differs\n", round);
      return 1;
    }
  }
  if (!ranks_agree() || !ranks_part()) {
    std::printf("ranks differ, or wait for one that is gone\n");
    return 1;
  }
  if (!shared_attention_agrees<Half>(pools) || !shared_attention_agrees<float>(pools)) {
    std::printf("attention that threads share differs\n");
    return 1;
  }
  // Two callers share one pool at once: the second one works alone.
  const auto x = floats(200 * 2000);
  auto call = [&] {
    Buffer<uint8_t> u(x.size());
    Buffer<float> scale(200);
    for (int i = 0; i < 50; i++) blockrelay_quantise(pools.three, x.data(), u.data(), scale.data(), 200, 2000, 0, 0);
  };
  std::thread other(call);
  call();
  other.join();
  std::printf("%016llx\n", static_cast<unsigned long long>(digest));
  return 0;
}
