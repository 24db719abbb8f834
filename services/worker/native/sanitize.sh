#!/bin/sh
# Builds smoke.cpp with AddressSanitizer + UBSan and with ThreadSanitizer, for each instruction set this CPU has, and
# runs it. Usage: sanitize.sh [folder for the programs]. Any finding or difference ends it with a non-zero status.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-$(mktemp -d)}
compiler=${CXX:-g++}
flags="-O1 -g -std=c++17 -pthread -fno-fast-math -ffp-contract=off -fno-math-errno -fno-omit-frame-pointer"
address="-fsanitize=address,undefined -fno-sanitize=float-divide-by-zero -fno-sanitize-recover=all"

run() { # name, sanitizer flags, variant flags
  # shellcheck disable=SC2086
  "$compiler" $flags $2 $3 "$here/smoke.cpp" -o "$out/$1"
  echo "$1: $("$out/$1")"
}

has() { grep -qw "$1" /proc/cpuinfo; }

run baseline-address "$address" ""
run baseline-thread "-fsanitize=thread" ""
if has avx2 && has fma && has f16c; then
  run avx2-address "$address" "-mavx2 -mfma -mf16c"
fi
if has avx512f && has avx512bw && has avx512vl && has avx512dq; then
  run avx512-address "$address" "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c"
  run avx512-thread "-fsanitize=thread" "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c"
fi
