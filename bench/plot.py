"""Draws bars as SVG. Pure."""

from collections.abc import Mapping, Sequence
from html import escape

LEFT, BAR, GAP, GROUP_GAP, FULL, RIGHT = 200, 15, 4, 26, 520, 70
COLOURS = {True: "#0b6e4f", False: "#9aa5b1"}


def bars(title: str, groups: Mapping[str, Mapping[str, float]], *, ours: Sequence[str]) -> str:
    """Returns an SVG with one group of bars for each entry of `groups`, each group on its own scale.

    `groups` has values of 0 or more by group and side; bars of the sides in `ours` have another colour.
    """
    shapes = [f'<text x="8" y="24" font-size="15" font-weight="bold">{escape(title)}</text>']
    y = 50
    for group, values in groups.items():
        shapes.append(f'<text x="8" y="{y}" font-size="13" font-weight="bold">{escape(group)}</text>')
        y += 8
        most = max(values.values(), default=0) or 1
        for side, value in sorted(values.items(), key=lambda item: -item[1]):
            middle = y + BAR - 4
            shapes += [
                f'<text x="{LEFT - 8}" y="{middle}" font-size="12" text-anchor="end">{escape(side)}</text>',
                f'<rect x="{LEFT}" y="{y}" width="{FULL * value / most:.1f}" height="{BAR}" '
                f'fill="{COLOURS[side in ours]}"/>',
                f'<text x="{LEFT + FULL * value / most + 6:.1f}" y="{middle}" font-size="12">{value:.0f}</text>',
            ]
            y += BAR + GAP
        y += GROUP_GAP
    width, height = LEFT + FULL + RIGHT, y - GROUP_GAP + 12
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="#ffffff"/>', *shapes, "</svg>"]) + "\n"
