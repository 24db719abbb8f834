"""Runs every side on every window of the texts, and compares it with float32. It holds the logits of one window."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.quality.figures import Figures, Sums, compared, figures_of
from bench.quality.sides import REFERENCE, Side
from bench.quality.texts import windows
from bench.runs import Failed, say
from blockrelay_worker.offline.evaluate import show_progress


@dataclass(slots=True)
class Measured:
    """The figures by side and text, and the errors of sides that failed."""

    figures: dict[str, dict[str, Figures]] = field(default_factory=dict[str, dict[str, Figures]])
    errors: dict[str, str] = field(default_factory=dict[str, str])


def measure(texts: Mapping[str, Sequence[int]], reference: Side, sides: Mapping[str, Side]) -> Measured:
    """Returns the figures of `sides` beside `reference` on the tokens of each text.

    A side that fails is left out from then on. Raises Failed if the reference does.
    """
    result = Measured()
    for text, tokens in texts.items():
        cut = windows(tokens)
        say(f"{text}: {len(tokens)} tokens in {len(cut)} windows")
        sums = dict.fromkeys((REFERENCE, *sides), Sums())
        for number, window in enumerate(cut, 1):
            read, targets = window[:-1], window[1:]
            expected = reference.logits(read)
            sums[REFERENCE] += compared(expected, expected, targets)
            for name, side in sides.items():
                if name in result.errors:
                    continue
                try:
                    sums[name] += compared(expected, side.logits(read), targets)
                except Failed as failure:
                    say(f"{name}: {failure}")
                    result.errors[name] = str(failure)
            show_progress(number, len(cut))
        for name, total in sums.items():
            if name not in result.errors:
                result.figures.setdefault(name, {})[text] = figures_of(total)
    for name in result.errors:
        result.figures.pop(name, None)
    return result
