"""Decides how many tokens a draft model guesses at one level of load, by measured paces of tokens. Pure.

Without guesses is the normal state. Trials are short, and the seconds that they may lose are saved up beforehand: a
small share of the time without guesses, which halves with each trial that did not pay. After a trial that paid there
are guesses for a window of steps, then none for a few, and so on while the pace with them stays the better one. An
expectation (`gain`) only chooses the number of guesses and forbids trials without hope; measured paces decide the rest.
"""

from dataclasses import dataclass, replace
from typing import Literal

from blockrelay.protocol.constants import MAX_DRAFTS
from blockrelay_worker.scheduling.smoothing import smoothed
from blockrelay_worker.speculation.gain import Prices, best_count, expected_gain

Phase = Literal["without", "probe", "trial", "with", "check"]

#: Share of the time without guesses that trials may lose, seconds that they may lose at first, and most seconds saved.
LOSS_SHARE, FIRST_BUDGET_S, MOST_BUDGET_S = 0.004, 0.01, 1.0
#: Number of failed trials in a row behind which their share halves no further.
MOST_HALVINGS = 6
#: Gain of a trial, or expected one, from which on guesses pay; and the gain below which they end.
PAYS, STAYS = 1.06, 1.03
#: Seconds per token in a window, as a multiple of those in checks, above which the window ends early.
SLOWER = 1.05
#: Share of right guesses that a trial may hope for.
HOPE = 0.95
#: Steps of a part of the time without guesses that gives one pace; of a probe, which measures the share of right
#: guesses, and their number in it; and of a trial, which measures the pace.
BASE_STEPS, PROBE_STEPS, PROBE_GUESSES, TRIAL_STEPS = 24, 6, 2, 12
#: Steps of the first window with guesses and of the longest, and of the shortest check without guesses between two; a
#: check has at least this share of the steps of its window.
FIRST_WINDOW, LONGEST_WINDOW, CHECK_STEPS, CHECK_SHARE = 16, 256, 12, 1 / 8
#: Steps without a guess after which a probe or a trial is given up: no run had a place or the worth for guesses.
PATIENCE = 48
#: Weight that guesses judged before keep when others are.
MEMORY = 0.97


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """What was measured from one step to the next, or without guesses over several, for all runs together."""

    tokens: int
    """New tokens."""
    seconds: float
    steps: int = 1
    guessed: int = 0
    """Tokens that were guessed for the step."""
    catch_up_s: float = 0.0
    """Seconds of these in which the draft model computed prompts and tokens of before."""
    right: int = 0
    """Guesses that turned out to be right."""
    judged: int = 0
    """Guesses that were looked at: the right ones and the first wrong one of each run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Sums of intervals."""

    tokens: float = 0.0
    seconds: float = 0.0
    steps: int = 0

    def plus(self, interval: Interval) -> "Window":
        """Returns the sums with another interval."""
        return Window(
            tokens=self.tokens + interval.tokens,
            seconds=self.seconds + interval.seconds,
            steps=self.steps + interval.steps,
        )

    def behind(self, before: "Window") -> "Window":
        """Returns these sums with half the weight of sums from before."""
        return Window(
            tokens=self.tokens + before.tokens / 2, seconds=self.seconds + before.seconds / 2, steps=self.steps
        )

    @property
    def token_s(self) -> float:
        """Seconds per token; infinite without tokens, as before the first check."""
        return self.seconds / self.tokens if self.tokens else float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The course of guesses at one level of load: what was measured there, and the phase that it is in."""

    phase: Phase = "without"
    guesses: int = 0
    """Number of guesses for each run in this phase."""
    now: Window = Window()
    """Sums of this phase, or of this part of the time without guesses."""
    base_s: float | None = None
    """Seconds per token without guesses, smoothed over parts of that time; None: not measured since it came here."""
    with_: Window = Window()
    """Sums of the windows with guesses since the trial, older ones with less weight."""
    checks: Window = Window()
    """Sums of the checks between these windows, likewise."""
    window: int = FIRST_WINDOW
    """Steps of the next window with guesses."""
    right: float = 0.0
    judged: float = 0.0
    """Right guesses and judged ones, older ones with less weight."""
    budget_s: float = FIRST_BUDGET_S
    """Seconds that trials may lose now."""
    failures: int = 0
    """Trials, and times with guesses, that did not pay since guesses last paid for a long time."""
    idle: int = 0
    """Steps of this probe or trial without a guess."""
    tried: frozenset[int] = frozenset()
    """Numbers of guesses that trials since the last probe had."""
    hopeless: int = 0
    """Calls of the draft model that only measured again whether a trial has hope, since it had some."""

    @property
    def share(self) -> float:
        """Share of guesses that were right of late; HOPE before any was judged."""
        return self.right / self.judged if self.judged else HOPE


def begun(course: Course, prices: Prices, *, step_s: float, catch_up_s: float) -> Course:
    """Returns the course with a probe begun, if it is time for one; else unchanged.

    `step_s` is the time of a step without guesses, and `catch_up_s` the seconds in which the draft model would compute
    what it lacks of the runs.
    """
    if course.phase != "without" or course.base_s is None:
        return course
    if not has_hope(prices):
        return course
    above = prices.steps.get(PROBE_GUESSES, 1.0) - 1 + PROBE_GUESSES * prices.call
    if course.budget_s < PROBE_STEPS * max(0.0, above) * step_s + catch_up_s:
        return course
    return replace(
        course,
        phase="probe",
        guesses=PROBE_GUESSES,
        now=Window(),
        right=0.0,
        judged=0.0,
        idle=0,
        hopeless=0,
        tried=frozenset(),
    )


def has_hope(prices: Prices) -> bool:
    """Returns whether guesses would pay at these prices, if as many were right as a trial may hope for."""
    return expected_gain(HOPE, best_count(HOPE, prices), prices) >= PAYS


def is_due(course: Course, call_s: float) -> bool:
    """Returns whether a call of the draft model, which takes about `call_s` seconds, may measure its price again.

    To be asked where there is no hope: the price may be that of a moment in which the machine had other work.
    """
    return course.phase == "without" and course.base_s is not None and course.budget_s >= call_s


def remeasured(course: Course, call_s: float) -> Course:
    """Returns the course after a call that measured the price again, in `call_s` seconds; the next one comes later."""
    return replace(_charged(course, call_s), hopeless=course.hopeless + 1)


def observed(course: Course, interval: Interval, prices: Prices) -> Course:
    """Returns the course after an interval at its level. `interval` is that of a step with decode tokens alone."""
    if interval.judged:
        right, judged = MEMORY * course.right + interval.right, MEMORY * course.judged + interval.judged
        course = replace(course, right=right, judged=judged)
    match course.phase:
        case "without":
            return _after_base(course, interval)
        case "probe" | "trial":
            return _after_trial(course, interval, prices)
        case "with":
            now = course.now.plus(interval)
            if now.steps >= FIRST_WINDOW and now.token_s > SLOWER * course.checks.token_s:  # what was before is past
                return replace(course, phase="check", guesses=0, now=Window(), with_=now, window=FIRST_WINDOW)
            if now.steps < course.window:
                return replace(course, now=now)
            return replace(course, phase="check", guesses=0, now=Window(), with_=now.behind(course.with_))
        case "check":
            now = course.now.plus(interval)
            if now.steps < max(CHECK_STEPS, CHECK_SHARE * course.window):
                return replace(course, now=now)
            return _after_check(replace(course, now=Window(), checks=now.behind(course.checks)), prices)


def left(course: Course) -> Course:
    """Returns the course when the load leaves its level: a trial is void, and paces are measured again on return."""
    if course.phase in ("with", "check"):
        return replace(course, now=Window())
    return replace(course, phase="without", guesses=0, now=Window(), base_s=None)


def _after_base(course: Course, interval: Interval) -> Course:
    saved = course.budget_s + LOSS_SHARE * interval.seconds / 2 ** min(
        course.failures + course.hopeless // 2, MOST_HALVINGS
    )
    course = replace(course, budget_s=min(MOST_BUDGET_S, saved), now=course.now.plus(interval))
    if course.now.steps < BASE_STEPS or not course.now.tokens:
        return course
    return replace(course, base_s=smoothed(course.base_s, course.now.token_s), now=Window())


def _after_trial(course: Course, interval: Interval, prices: Prices) -> Course:
    if not interval.guessed or interval.catch_up_s:
        course = replace(course, budget_s=course.budget_s - interval.catch_up_s, idle=course.idle + 1)
        return course if course.idle < PATIENCE else replace(course, phase="without", guesses=0, now=Window())
    course = replace(course, now=course.now.plus(interval))
    if course.now.steps < (PROBE_STEPS if course.phase == "probe" else TRIAL_STEPS):
        return course
    assert course.base_s is not None, "a trial begins behind a pace without guesses"
    now, base_s = course.now, course.base_s
    course = _charged(replace(course, now=Window(), idle=0), now.seconds - now.tokens * base_s)
    if course.phase == "probe" or now.token_s * PAYS > base_s:
        return _tried_next(course, prices)
    return replace(course, phase="with", window=FIRST_WINDOW, with_=Window(), checks=Window())


def _tried_next(course: Course, prices: Prices) -> Course:
    """Returns the course with a trial of the number of guesses that is the best one by now; failed without hope in it.

    Larger steps may have taken longer than was expected before the first ones were measured.
    """
    guesses = best_count(course.share, prices)
    if guesses in course.tried or expected_gain(course.share, guesses, prices) < PAYS:
        return _failed(course)
    return replace(course, phase="trial", guesses=guesses, now=Window(), tried=course.tried | {guesses})


def _after_check(course: Course, prices: Prices) -> Course:
    if course.with_.token_s * STAYS > course.checks.token_s:
        lost = course.with_.seconds - course.with_.tokens * course.checks.token_s
        return _tried_next(_charged(replace(course, base_s=course.checks.token_s), lost), prices)
    window = min(LONGEST_WINDOW, 2 * course.window)
    failures = 0 if window == LONGEST_WINDOW else course.failures
    return replace(
        course, phase="with", guesses=best_count(course.share, prices, MAX_DRAFTS), window=window, failures=failures
    )


def _charged(course: Course, lost_s: float) -> Course:
    return replace(course, budget_s=course.budget_s - max(0.0, lost_s))


def _failed(course: Course) -> Course:
    return replace(course, phase="without", guesses=0, now=Window(), failures=course.failures + 1, idle=0)
