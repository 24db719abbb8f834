"""How good each format has to be on the beginning of the English text: what `make quality ARGS=--short` checks."""

from collections.abc import Mapping
from dataclasses import dataclass

from bench.quality.figures import Figures

#: Tokens of the English text that `--short` measures.
SHORT_TOKENS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The worst figures that a format may have: its cost of perplexity and its share of equal most likely tokens."""

    cost: float
    same_top: float


#: By format. Integer formats give the same bits on every CPU, float32 nearly: figures are close to what is reached.
FLOORS: Mapping[str, Floor] = {
    "w8a8": Floor(cost=0.009, same_top=0.93),
    "w8a8, calibrated": Floor(cost=0.009, same_top=0.95),
    "w4a8, head in w8a8": Floor(cost=0.015, same_top=0.915),
    "w4a8": Floor(cost=0.09, same_top=0.755),
}


def broken(measured: Mapping[str, Figures], floors: Mapping[str, Floor] = FLOORS) -> list[str]:
    """Returns a text for each figure beyond its floor; a format that was not measured is one too."""
    lines: list[str] = []
    for name, floor in floors.items():
        figures = measured.get(name)
        if figures is None:
            lines.append(f"{name} was not measured")
            continue
        if not figures.cost <= floor.cost:
            lines.append(f"{name} costs {figures.cost:+.2%} of perplexity, over {floor.cost:+.2%}")
        if not figures.same_top >= floor.same_top:
            lines.append(f"{name} has {figures.same_top:.2%} equal top tokens, under {floor.same_top:.2%}")
    return lines
