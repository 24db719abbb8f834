// V16: sixteen float32 lanes in every build, so that sums do not depend on the register width (specification.py).
#pragma once

#include <utility>

#include "registers.h"

namespace blockrelay {

inline int lower(int n, int width) { return n < width ? n : width; }
inline int upper(int n, int width) { return n > width ? n - width : 0; }

template <class Part>
struct Pair {
  static constexpr int width = 2 * Part::width;
  Part lo, hi;
  template <class E>
  static Pair load(const E* p) {
    return {Part::load(p), Part::load(p + Part::width)};
  }
  template <class E>
  static Pair load(const E* p, int n) {
    int above = upper(n, Part::width);
    return {Part::load(p, lower(n, Part::width)), above ? Part::load(p + Part::width, above) : Part::broadcast(0.0f)};
  }
  static Pair broadcast(float x) {
    Part part = Part::broadcast(x);
    return {part, part};
  }
  void store(float* p) const {
    lo.store(p);
    hi.store(p + Part::width);
  }
  template <class E>
  void store(E* p, int n) const {
    lo.store(p, lower(n, Part::width));
    if (n > Part::width) hi.store(p + Part::width, n - Part::width);
  }
  void store_zero_128(uint8_t* p, int n) const {
    lo.store_zero_128(p, lower(n, Part::width));
    if (n > Part::width) hi.store_zero_128(p + Part::width, n - Part::width);
  }
};
template <class P>
inline Pair<P> operator+(Pair<P> a, Pair<P> b) { return {a.lo + b.lo, a.hi + b.hi}; }
template <class P>
inline Pair<P> operator-(Pair<P> a, Pair<P> b) { return {a.lo - b.lo, a.hi - b.hi}; }
template <class P>
inline Pair<P> operator*(Pair<P> a, Pair<P> b) { return {a.lo * b.lo, a.hi * b.hi}; }
template <class P>
inline Pair<P> operator/(Pair<P> a, Pair<P> b) { return {a.lo / b.lo, a.hi / b.hi}; }
template <class P>
inline Pair<P> fma(Pair<P> a, Pair<P> b, Pair<P> c) { return {fma(a.lo, b.lo, c.lo), fma(a.hi, b.hi, c.hi)}; }
template <class P>
inline Pair<P> negate(Pair<P> a) { return {negate(a.lo), negate(a.hi)}; }
template <class P>
inline Pair<P> pick_max(Pair<P> a, Pair<P> b) { return {pick_max(a.lo, b.lo), pick_max(a.hi, b.hi)}; }
template <class P>
inline Pair<P> pick_min(Pair<P> a, Pair<P> b) { return {pick_min(a.lo, b.lo), pick_min(a.hi, b.hi)}; }
template <class P>
inline Pair<P> first(int n, Pair<P> a, Pair<P> b) {
  return {first(lower(n, P::width), a.lo, b.lo), first(upper(n, P::width), a.hi, b.hi)};
}
template <class P>
inline float highest_lane(Pair<P> a) { return highest_lane(pick_max(a.lo, a.hi)); }
template <class P>
inline Pair<P> max_magnitude(Pair<P> m, Pair<P> x) {
  return {max_magnitude(m.lo, x.lo), max_magnitude(m.hi, x.hi)};
}
// Lanes whose number has bit `step` become (lane - step) - lane, the others lane + (lane + step).
template <int step, class P>
inline Pair<P> butterfly(Pair<P> a) {
  if constexpr (step == P::width)
    return {a.lo + a.hi, a.lo - a.hi};
  else
    return {butterfly<step>(a.lo), butterfly<step>(a.hi)};
}
template <class P>
inline Pair<P> power_of_two(Pair<P> shifted) { return {power_of_two(shifted.lo), power_of_two(shifted.hi)}; }

#if defined(__AVX512F__)
using V16 = Register;
constexpr int kScoreRows = 8;  // independent chains of fused multiply-adds: two units with four cycles each
constexpr int kValueVectors = 2;
constexpr int kStripVectors = 2;  // times kStripKeys sums: one load serves several, and all stay in registers
constexpr int kStripKeys = 8;
#else
#if defined(__AVX2__)
using V16 = Pair<Register>;
#else
using V16 = Pair<Pair<Register>>;
#endif
constexpr int kScoreRows = 4;
constexpr int kValueVectors = 1;
constexpr int kStripVectors = 1;
constexpr int kStripKeys = Register::width == 8 ? 4 : 2;
#endif

// Calls f(0), f(1), ... f(N - 1) with constant arguments, so that arrays of registers stay in registers.
template <class F, int... I>
__attribute__((always_inline)) inline void each(std::integer_sequence<int, I...>, const F& f) {
  (f(std::integral_constant<int, I>{}), ...);
}
template <int N, class F>
__attribute__((always_inline)) inline void each(const F& f) {
  each(std::make_integer_sequence<int, N>{}, f);
}

constexpr int kLanes = 16;
static_assert(V16::width == kLanes, "a V16 is one page of keys");

}  // namespace blockrelay
