"""What a gateway that was told to end does, and until when: a signal, a time and two settings decide all of it."""

import signal

import pytest

from blockrelay.errors import UsageError
from blockrelay.settings import GatewaySettings, read_settings
from blockrelay_gateway.draining.course import Course, Phase, course_from
from blockrelay_gateway.draining.drain import Drain
from blockrelay_gateway.policy import LAST_WORDS_S

NOW = 1000.0


def told(
    number: int | None = signal.SIGTERM, *, linger_s: float = 10, drain_s: float = 60, started: bool = True
) -> Course:
    return course_from(number, NOW, linger_s=linger_s, drain_s=drain_s, started=started)


def phases(course: Course) -> list[tuple[float, Phase]]:
    """Every phase that the gateway is in, and since how many seconds behind the signal."""
    found = [(0.0, course.phase(NOW))]
    at: float | None = NOW
    while (at := course.next_change(at)) is not None:
        found.append((at - NOW, course.phase(at)))
    return found


def test_before_it_is_told_it_serves() -> None:
    assert told().phase(NOW - 1) is Phase.SERVING


def test_sigterm_lingers_then_drains_from_the_signal_on() -> None:
    assert phases(told()) == [
        (0, Phase.LINGERING),
        (10, Phase.FINISHING),
        (60, Phase.CUTTING),
        (60 + LAST_WORDS_S, Phase.GONE),
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, None])
def test_ctrl_c_and_what_only_a_restart_mends_break_off(number: int | None) -> None:
    assert phases(told(number)) == [(0, Phase.CUTTING), (LAST_WORDS_S, Phase.GONE)]


def test_before_anybody_could_ask_there_is_nothing_to_drain() -> None:
    assert phases(told(started=False))[0] == (0, Phase.CUTTING)


def test_without_time_it_breaks_off() -> None:
    assert phases(told(linger_s=0, drain_s=0))[0] == (0, Phase.CUTTING)
    assert phases(told(linger_s=0))[:2] == [(0, Phase.FINISHING), (60, Phase.CUTTING)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("after_s", [0, 5, 30, 61])
def test_another_signal_waits_for_nothing(number: int, after_s: float) -> None:
    at = NOW + after_s
    hastened = course_from(number, at, linger_s=10, drain_s=60, under_way=told())
    assert hastened.phase(at) is Phase.GONE and hastened.next_change(at) is None


def test_no_phase_comes_back() -> None:
    drain = Drain()
    assert not drain.has_begun and drain.why_not_ready == ""
    drain.enter(Phase.FINISHING)
    drain.enter(Phase.LINGERING)
    assert drain.phase is Phase.FINISHING and "draining" in drain.why_not_ready
    drain.enter(Phase.GONE)
    assert "shuts down" in drain.why_not_ready


def test_a_socket_leaves_when_the_end_begins_or_nobody_listens() -> None:
    drain = Drain()
    before = drain.time_to_leave()
    drain.enter(Phase.LINGERING)
    since = drain.time_to_leave()
    assert before.is_set() and not since.is_set()
    drain.enter(Phase.FINISHING)
    assert since.is_set()


@pytest.mark.parametrize(
    ("drain", "linger", "part"),
    [
        ("-1", "0", "BLOCKRELAY_GATEWAY_DRAIN_S"),
        ("soon", "0", "BLOCKRELAY_GATEWAY_DRAIN_S"),
        ("inf", "0", "BLOCKRELAY_GATEWAY_DRAIN_S"),
        ("60", "-1", "BLOCKRELAY_GATEWAY_LINGER_S"),
        ("5", "10", "BLOCKRELAY_GATEWAY_LINGER_S: Value error, 10 s are longer than BLOCKRELAY_GATEWAY_DRAIN_S (5)"),
    ],
)
def test_settings_that_make_no_course_are_refused(
    monkeypatch: pytest.MonkeyPatch, drain: str, linger: str, part: str
) -> None:
    monkeypatch.setenv("BLOCKRELAY_GATEWAY_DRAIN_S", drain)
    monkeypatch.setenv("BLOCKRELAY_GATEWAY_LINGER_S", linger)
    with pytest.raises(UsageError, match=part.replace("(", r"\(").replace(")", r"\)")) as raised:
        read_settings(GatewaySettings, [], program="gateway")
    assert "\n" not in str(raised.value)


def test_lingering_for_all_of_the_drain_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKRELAY_GATEWAY_DRAIN_S", "10")
    monkeypatch.setenv("BLOCKRELAY_GATEWAY_LINGER_S", "10")
    found = read_settings(GatewaySettings, [], program="gateway")
    assert (found.gateway_drain_s, found.gateway_linger_s) == (10, 10)
