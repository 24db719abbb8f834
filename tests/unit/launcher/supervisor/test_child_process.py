"""Children: started, noticed when they end, never left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from blockrelay.exit_codes import UNUSABLE
from blockrelay_launcher.drill.system import command_line
from blockrelay_launcher.supervisor import child_process
from blockrelay_launcher.supervisor.child_process import ChildProcess, is_worth_showing, plain, stop_all
from blockrelay_launcher.supervisor.signals import Alarm
from tests.support.waiting import wait_until

FOR_EVER = "import threading; print('started', flush=True); threading.Event().wait()"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + FOR_EVER


def child(tmp_path: Path, program: str, name: str = "child") -> ChildProcess:
    return ChildProcess(
        name=name, argv=[sys.executable, "-c", program], env=dict(os.environ), log=tmp_path / f"{name}.log"
    )


def lines_of(process: ChildProcess) -> list[str]:
    """Run it to its end; the new lines of its log."""
    process.start()
    try:
        wait_until(lambda: process.reap() is not None, "it has ended")
        return list(process.new_lines())
    finally:
        process.close()


def has_started(process: ChildProcess) -> bool:
    return any(line == "started" for line in process.new_lines())


def test_a_child_is_started_ends_and_is_started_again(tmp_path: Path) -> None:
    with Alarm() as alarm:
        one = child(tmp_path, "print('hello'); raise SystemExit(3)")
        one.start()
        assert one.running and one.pid
        alarm.wait(10)  # its end wakes us
        codes: list[int | None] = []
        wait_until(lambda: codes.append(one.reap()) or codes[-1] is not None, "it has ended")
        assert codes[-1] == 3 and not one.running and one.deaths == 1 and one.reap() is None
        assert list(one.new_lines()) == ["hello"] and one.last_log_line == "hello"
        first = one.pid
        one.start()
        assert one.pid != first
        stop_all([one], alarm, patience_s=10)
        one.close()


def test_settings_of_its_own_go_before_the_others_from_the_next_start_on(tmp_path: Path) -> None:
    one = child(tmp_path, "import os; print(os.environ.get('COLOUR'), os.environ.get('SIZE'))")
    one.env, one.settings = {**one.env, "COLOUR": "red", "SIZE": "1"}, tmp_path / "settings"
    said: list[str] = []
    for content in ("", "COLOUR=blue\nnothing\n", "SIZE = 2=2\n"):
        if content:
            one.settings.write_text(content)
        said += lines_of(one)
    assert said == ["red 1", "blue 1", "red 2=2"]


WRITER = """
import pathlib, sys, time
for number in range(10):
    sys.stdout.write("".join(f"line {number * 1000 + line} " + "x" * 100 + chr(10) for line in range(1000)))
    sys.stdout.flush()
    while not pathlib.Path(sys.argv[1], f"go-{number}").exists():
        time.sleep(0.01)
"""


def test_a_log_stays_bounded_and_every_line_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "LOG_BYTES", 64 << 10)
    one = child(tmp_path, WRITER)
    one.argv.append(str(tmp_path))
    kept, moved = tmp_path / "child.log", tmp_path / "child.log.1"
    seen: list[int] = []
    one.start()
    try:
        for number in range(10):

            def read(most: int = 1000 * (number + 1)) -> bool:
                seen.extend(int(line.split()[1]) for line in one.new_lines())
                return len(seen) == most

            wait_until(read, "its lines are there")
            assert kept.stat().st_size <= 64 << 10 and moved.stat().st_size == 64 << 10
            content = moved.read_bytes() + kept.read_bytes()
            assert content.endswith(b"line %d " % seen[-1] + b"x" * 100 + b"\n")
            (tmp_path / f"go-{number}").touch()
        wait_until(lambda: one.reap() == 0, "it has ended")
    finally:
        one.close()
    assert seen == list(range(10_000))
    assert not (tmp_path / "child.log.new").exists()


def test_a_log_that_was_huge_before_keeps_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "LOG_BYTES", 1000)
    (tmp_path / "child.log").write_text("old\n" * 10_000 + "the end\n")
    assert lines_of(child(tmp_path, "print('hello')")) == ["hello"]
    assert (tmp_path / "child.log").read_text() == ""
    copy = (tmp_path / "child.log.1").read_text()
    assert len(copy) == 1000 and copy.endswith("the end\nhello\n")


def test_where_a_log_cannot_be_copied_it_is_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "LOG_BYTES", 1000)
    (tmp_path / "child.log.1").mkdir()  # in the way, as a full disk would be
    (tmp_path / "child.log").write_text("old\n" * 1000)
    assert lines_of(child(tmp_path, "print('hello')")) == ["hello"]
    assert not (tmp_path / "child.log").stat().st_size and not (tmp_path / "child.log.new").exists()


def test_the_end_of_a_child_wakes_the_parent_at_once(tmp_path: Path) -> None:
    with Alarm() as alarm:
        one = child(tmp_path, FOR_EVER)
        one.start()
        wait_until(lambda: has_started(one), "it runs")
        one.signal(signal.SIGKILL)
        asked = time.monotonic()
        alarm.wait(30)
        assert time.monotonic() - asked < 10
        wait_until(lambda: one.reap() == -signal.SIGKILL, "it is reaped")
        one.close()


def test_quick_deaths_make_the_pauses_longer_up_to_a_limit(tmp_path: Path) -> None:
    one = child(tmp_path, "")
    pauses: list[float] = []
    for _ in range(9):
        one.start()
        died = wait_for_end(one)
        pauses.append(one.start_at - died)
    one.close()
    rough = [round(pause, 1) for pause in pauses]
    assert rough == sorted(rough) and rough[0] < 0.5 and rough[-1] == 5.0


def wait_for_end(process: ChildProcess) -> float:
    """Reap it; the time just before."""
    moments: list[float] = []
    wait_until(lambda: moments.append(time.monotonic()) or process.reap() is not None, "it has ended", poll_s=0.005)
    return moments[-1]


def test_a_child_that_refuses_is_tried_again_slowly_and_its_cause_stands_until_it_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = child(tmp_path, f"raise SystemExit({UNUSABLE})")
    one.start()
    wait_until(lambda: one.reap() is not None, "it has refused")
    assert one.start_at > time.monotonic() + child_process.FIRST_DELAY_S
    one.refused = "block_2.onnx: altered"
    assert not one.refusal_is_over() and one.refused
    one.argv = [sys.executable, "-c", FOR_EVER]
    one.start()
    assert not one.refusal_is_over(), "it has not lived long enough"
    monkeypatch.setattr(child_process, "REFUSAL_STANDS_S", 0.0)
    wait_until(one.refusal_is_over, "it lives")
    assert not one.refused
    one.signal(signal.SIGKILL)
    wait_until(lambda: one.reap() is not None, "it is gone")
    one.close()


def test_a_stubborn_child_is_killed_and_named(tmp_path: Path) -> None:
    with Alarm() as alarm:
        tame, stubborn = child(tmp_path, FOR_EVER, "tame"), child(tmp_path, STUBBORN, "stubborn")
        for each in (tame, stubborn):
            each.start()
            wait_until(lambda c=each: has_started(c), "it runs")
        assert stop_all([tame, stubborn], alarm, patience_s=1) == [stubborn]
        assert not tame.running and not stubborn.running
        for each in (tame, stubborn):
            each.close()


def test_a_second_stop_request_means_at_once(tmp_path: Path) -> None:
    with Alarm() as alarm:
        stubborn = child(tmp_path, STUBBORN)
        stubborn.start()
        wait_until(lambda: has_started(stubborn), "it runs")
        for expected in (1, 2):
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(lambda n=expected: alarm.stop_requests == n, "the signal is counted")
        assert stop_all([stubborn], alarm, patience_s=60) == [stubborn]
        stubborn.close()


PARENT = """
import os, signal, sys
from pathlib import Path
from blockrelay_launcher.supervisor.child_process import ChildProcess
folder = Path(sys.argv[1])
child = ChildProcess(name="c", argv=[sys.executable, "-c", sys.argv[2]], env=dict(os.environ), log=folder / "c.log")
child.start()
print(child.pid, flush=True)
signal.pause()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such signal")
@pytest.mark.parametrize("program", [FOR_EVER, STUBBORN], ids=["tame", "stubborn"])
def test_children_end_when_the_parent_is_killed(tmp_path: Path, program: str) -> None:
    argv = [sys.executable, "-c", PARENT, str(tmp_path), program]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        wait_until(lambda: "started" in (tmp_path / "c.log").read_text(), "the child runs")
        parent.kill()
        parent.wait()
    wait_until(lambda: not command_line(pid), "the child has ended")


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ('{"level": "INFO", "event_type": "NODE_READY"}', False),
        ('{"level": "WARNING", "event_type": "STAGE_NOT_LOADED"}', False),
        ('{"level": "WARNING"}', True),
        ('{"level": "ERROR", "event_type": "DIVERGED"}', True),
        ("Traceback (most recent call last):", True),
        ("", False),
        ("3", True),
    ],
)
def test_people_see_errors_and_tracebacks(line: str, shown: bool) -> None:
    assert is_worth_showing(line) is shown


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("blockrelay: --gpu webgpu:0: no such device", "--gpu webgpu:0: no such device"),
        (
            '{"level": "ERROR", "event_type": "DEVICE_LOST", "node_id": "gpu-worker", "data": '
            '{"device": "webgpu:0", "block": null, "error": "it has ended by signal 9", "requests": ["a", "b"]}}',
            "DEVICE_LOST: it has ended by signal 9 (device=webgpu:0, requests=a b)",
        ),
        ('{"event_type": "DIVERGED", "request_id": "req-1", "step": 0}', "DIVERGED (request_id=req-1, step=0)"),
        ('{"event_type": "NODE_READY", "data": {}}', "NODE_READY"),
        (
            '{"event_type": "BACKGROUND_WORK_FAILED", "data": {"exception": "Traceback:\\n  x\\nKeyError: 5"}}',
            "BACKGROUND_WORK_FAILED: KeyError: 5",
        ),
        ('{"no": "entry"}', '{"no": "entry"}'),
        ('{"event_type": "of somebody else", "data": [1]}', '{"event_type": "of somebody else", "data": [1]}'),
    ],
)
def test_lines_are_shown_as_people_read_them(line: str, shown: str) -> None:
    assert plain(line) == shown
