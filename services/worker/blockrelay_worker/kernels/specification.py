"""Specification of the float operations between matmuls, which every kernel implementation must follow bit for bit.

Two implementations that follow it give equal bits, whatever the register width, the thread count, the batch around a
row and the chunks of a prompt. `KERNEL_NUMERICS_VERSION` is its version. Any change that can change a bit of a finite
row raises it, because it is part of the numerics id (keys of KV pages, records of requests).

Rules
- Every step is rounded to float32, to nearest even; subnormals are kept. `fma(a, b, c)` is a*b + c rounded once and
  is used only where it is written here. Division and square root are the correctly rounded ones. No library
  function (exp, cos, pow, ...) is used.
- lane_sum(t): 64 accumulators a start at +0; element i goes to accumulator i % 64, in order of i; then
  b[j] = (a[j] + a[j+16]) + (a[j+32] + a[j+48]) for j in 0..15, and b[0..15] are added in order.
- maximum of |x|: of the absolute values, NaN counting as larger than infinity (order has no effect).
- Payload and sign of a NaN are not defined, except where a canonical NaN (0x7fc00000, float16 0x7e00) is named.

norm(x[H], weight[H], eps), root mean square norm (Zhang and Sennrich 2019):
    mean = lane_sum(fma(x, x, .)) / float32(H)       each accumulator: acc = fma(x[i], x[i], acc)
    inv  = 1 / sqrt(mean + eps)                      NaN when mean + eps is not finite: overflow must show
    y[i] = (x[i] * inv) * weight[i]

quantise(x[n]), per row to uint8 with zero point 128:
    scale = max|x| * float32(1/127) + float32(1e-12)
    u[i]  = round_half_even(x[i] / scale) + 128      in 1..255 by construction
    a row with an infinity or a NaN: scale = canonical NaN, all u = 128

quantise in groups (x[n], n a multiple of 32): each 32 values as above, with a scale of their own
    a row with an infinity or a NaN anywhere: all its scales = canonical NaN, all u = 128

group matmul of rows in groups, u[R,K] with scales rs[R,K/32], and weights of 4 bits, nibble[K,N] in 0..15 with float16
factors gs and minima gm [K/32,N], widened to float32; the weight is nibble * gs + gm:
    acc = +0
    for g = 0..K/32-1, with sums over the 32 k of group g:
        acc = fma(float32(sum of (u[r][k] - 128)) * rs[r][g], gm[g][n], acc)
        acc = fma(float32(sum of (u[r][k] - 128) * nibble[k][n]), gs[g][n] * rs[r][g], acc)
    y[r][n] = acc                                    both sums are whole numbers, which float32 holds

exp(x), relative error below 2e-7 on the clamped range, Cephes' expf polynomial:
    x = -87 if x < -87; 88 if x > 88                 (NaN stays)
    k = round_half_even(x * 1.44269504)
    y = fma(k, 2.12194440e-4, fma(k, -0.693359375, x))
    p = 1.9875691500e-4, then p = fma(p, y, c) for c in 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2,
        1.6666665459e-1, 5.0000001201e-1
    exp = (fma(p, y*y, y) + 1) * 2^k                 2^k made from exponent bits, always a normal number

swiglu(g[M], u[M]):   y = (g / (1 + exp(-g))) * u    g and u first multiplied by the row scale where there is one

hadamard(x[n], B), B a power of two from 16 to 512 that divides n, in each block of B values:
    for h in 1, 2, 4, ..., B/2, for each i of the block whose bit h is 0:
        (x[i], x[i+h]) = (x[i] + x[i+h], x[i] - x[i+h])
    There is no factor: the length of a row grows by sqrt(B), and the weights behind are divided by it.

rotary (rotate half, pairs (d, d + D/2)) of a q or k head:
    x = qkv * row_scale (where given); x = x + bias (where given); x = norm(x, norm_q or norm_k, eps) (where given)
    first  = fma(x[d], cos, -(x[d+D/2] * sin))       second = fma(x[d+D/2], cos, x[d] * sin)
v heads: scaled and biased only.

pages: keys and values are stored as float16, to nearest even, finite values beyond the range saturated to +-65504,
infinities and NaN stored as canonical NaN (a row that overflowed must not look finite); or as they are (float32).
Attention reads them back from the page, also for the rows of the same chunk.

attention of one query head at position T (it sees keys 0..T), keys in pages of 16 slots, pages in spans of 16:
    q[d] = q[d] * (1 / sqrt(float32(D)))
    in each span that begins at or before T, over its visible keys t = 256*span .. min(256*span + 255, T):
        s[t]   = fma(q[d], k[t][d], s[t]) over d = 0..D-1 in order, starting at +0
        m      = max(-1e30, s[t]), NaN ignored
        p[t]   = exp(s[t] - m)
        a[j]   = sum of p[t] with t % 16 = j, in order of t, starting at +0;   l = a[0] + ... + a[15] in order
        acc[d] = fma(p[t], v[t][d], acc[d]) in order of t, starting at +0
    M, L, A[d] are m, l, acc[d] of the first span; then for each later span in order
        M'   = max(M, m);   c = exp(M - M');   e = exp(m - M')
        L    = fma(l, e, L * c);   A[d] = fma(acc[d], e, A[d] * c);   M = M'
    out[d] = A[d] * (1 / L)
The contents of slots of positions above T have no effect. Spans do not depend on each other, so that many cores can
compute one row.

add_scaled:  x = x + (y * row_scale), or x + y where there is no scale.
scale_rows:  x = x * row_scale.
"""

from typing import Final

from blockrelay.protocol.constants import PAGE_TOKENS

#: Version of the specification above; raised with every change that can change a bit of a finite row.
KERNEL_NUMERICS_VERSION: Final = 4
#: Tokens of a KV page: 16, since 16 float32 keys are one 512-bit register.
PAGE: Final = PAGE_TOKENS
#: Number of pages whose keys share a softmax, before spans are combined.
SPAN_PAGES: Final = 16
#: Number of accumulators of a sum (`lane_sum`).
LANES: Final = 64
#: uint8 value that stands for 0 in a quantised row.
ZERO_POINT: Final = 128
#: Largest finite float16; keys and values in float16 pages saturate there.
FLOAT16_MAX: Final = 65504.0
