"""`make bench` and a command that fails: what the table says about it."""

import platform
import sys
from pathlib import Path

import pytest

from bench.runs import ROOT, Failed, run

#: Calls an instruction that no CPU has: UD2 of x86-64, UDF of ARM.
DYING = """
import ctypes, mmap, platform, sys
sys.path.insert(0, sys.argv[1])
import protocol
protocol.report_deaths()
page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex("0f0bc3" if platform.machine() == "x86_64" else "00000000"))
ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
"""


def test_a_command_that_ends_with_an_error_is_its_last_line(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise ValueError('seven')"]
    with pytest.raises(Failed, match=r"^ValueError: seven$"):
        run(command, log=tmp_path / "log")


def test_a_command_that_is_killed_is_its_signal(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    with pytest.raises(Failed, match=r"^died of SIGKILL$"):
        run(command, log=tmp_path / "log")


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"), reason="needs 64-bit Linux"
)
def test_a_peer_that_is_built_for_another_cpu_is_the_instruction_that_it_died_of(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DYING, str(ROOT / "bench/peers")]
    bytes_there = "0f 0b c3" if platform.machine() == "x86_64" else "00 00 00 00"
    with pytest.raises(Failed, match=rf"^died of SIGILL: error: SIGILL at .*\+0x[0-9a-f]+: {bytes_there}"):
        run(command, log=tmp_path / "log")
