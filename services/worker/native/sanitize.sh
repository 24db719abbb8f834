#!/bin/sh
# Builds smoke.cpp with AddressSanitizer + UBSan and with ThreadSanitizer, for each instruction set this CPU has, and
# without them for CPUs that can be emulated here (qemu-user, an aarch64 compiler). Runs all of it, a program per core.
# Usage: sanitize.sh [folder for the programs]. Any finding, and any result that differs from the one below, ends it
# with a non-zero status.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-$(mktemp -d)}
expected=03f9b6e44b4717f5 # of kernel numerics version 4 and of sampling; also of older CPUs and of ARM
compiler=${CXX:-g++}
common="-std=c++17 -pthread -fno-fast-math -ffp-contract=off -fno-math-errno"
sanitized="$common -O1 -g -fno-omit-frame-pointer"
address="$sanitized -fsanitize=address,undefined -fno-sanitize-recover=all"
thread="$sanitized -fsanitize=thread"
avx2="-mavx2 -mfma -mf16c"
avx512="-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c"
avx512vnni="$avx512 -mavx512vnni"

run() { # name, compiler, flags, emulator: adds a program to those that are built and run at the end
  printf '%s\0%s\0%s\0%s\0' "$1" "$2" "$3" "$4" >>"$out/programs"
}

one='# shell program of $0 = source, $1 = expected digest, $2 = folder, then the arguments of run
  "$4" $5 "$0" -o "$2/$3" && digest=$($6 "$2/$3") || exit 1
  echo "$3: $digest"
  [ "$1" = "$digest" ]'

has() { for flag in "$@"; do grep -qw "$flag" /proc/cpuinfo || return 1; done; }

there() { for program in "$@"; do command -v "$program" >/dev/null || return 1; done; }

rm -f "$out/programs"
run baseline-address "$compiler" "$address" ""
run baseline-thread "$compiler" "$thread" ""
run generic-address "$compiler" "$address -DBLOCKRELAY_GENERIC" ""
if has avx2 fma f16c; then
  run avx2-address "$compiler" "$address $avx2" ""
  run avxvnni-stand-in "$compiler" "$address $avx2 -DBLOCKRELAY_VNNI_STAND_IN" ""
fi
if has avx512f avx512bw avx512vl avx512dq; then
  run avx512-address "$compiler" "$address $avx512" ""
  run avx512-thread "$compiler" "$thread $avx512" ""
  if has avx512_vnni; then
    run avx512vnni-address "$compiler" "$address $avx512vnni" ""
    run avxvnni-by-avx512 "$compiler" "$address $avx2 -D__AVXVNNI__ -DBLOCKRELAY_VNNI_BY_AVX512" ""
    run amx-stand-in "$compiler" "$address $avx512vnni -DBLOCKRELAY_TILES_STAND_IN" ""
    run amx-stand-in-thread "$compiler" "$thread $avx512vnni -DBLOCKRELAY_TILES_STAND_IN" ""
    run avx512vnni-thread "$compiler" "$thread $avx512vnni" ""
  fi
fi
if there qemu-x86_64; then
  run haswell-emulated "$compiler" "$common -O3 -static $avx2" "qemu-x86_64 -cpu Haswell"
  run nehalem-emulated "$compiler" "$common -O3 -static" "qemu-x86_64 -cpu Nehalem"
fi
if there qemu-aarch64 aarch64-linux-gnu-g++; then
  arm="$common -O3 -static -march=armv8"
  run neon-emulated aarch64-linux-gnu-g++ "$arm-a" "qemu-aarch64 -cpu cortex-a72"
  run dotprod-emulated aarch64-linux-gnu-g++ "$arm.2-a+dotprod" "qemu-aarch64 -cpu cortex-a76"
  run i8mm-emulated aarch64-linux-gnu-g++ "$arm.2-a+dotprod+i8mm" "qemu-aarch64 -cpu max"
fi
xargs -0 -n 4 -P "$(nproc 2>/dev/null || echo 2)" sh -c "$one" "$here/smoke.cpp" "$expected" "$out" <"$out/programs"
