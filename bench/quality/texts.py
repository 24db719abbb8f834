"""The texts that are measured on, and the windows in which they are read."""

from collections.abc import Sequence
from pathlib import Path

from blockrelay.errors import UsageError
from blockrelay.text.text_file import read_text_file
from blockrelay.text.tokenizer import Tokenizer

FOLDER = Path(__file__).with_name("texts")
NAMES = ("english", "code", "german", "french")
#: Calibration reads this text alone, and no figure is measured on it.
CALIBRATION = FOLDER / "calibration.txt"
#: Tokens of a window.
WINDOW = 512


def chosen(text: str) -> tuple[str, ...]:
    """Parses names such as `english,code`; an empty text means all. Raises UsageError for an unknown one."""
    names = tuple(text.split(",")) if text else NAMES
    for name in names:
        if name not in NAMES:
            raise UsageError(f"--only {name}: there are {', '.join(NAMES)}")
    return tuple(dict.fromkeys(names))


def read_texts(names: Sequence[str], folder: Path = FOLDER) -> dict[str, str]:
    """Returns the texts by name. Raises UsageError for a file that is missing, empty or not UTF-8 text."""
    return {name: read_text_file(folder / f"{name}.txt") for name in names}


def tokens_of(name: str, text: str, tokenizer: Tokenizer, limit: int | None) -> list[int]:
    """Returns the first `limit` tokens of a text, or all. Raises UsageError if there are fewer than two."""
    tokens = tokenizer.encode(text)[:limit]
    if len(tokens) < 2:
        raise UsageError(f"{name}: {len(tokens)} token(s) of text; at least 2 are needed to predict one")
    return tokens


def windows(tokens: Sequence[int], size: int = WINDOW) -> list[Sequence[int]]:
    """Returns windows of `size` tokens that do not overlap. A last one of one token predicts none, and is left out."""
    cut = [tokens[first : first + size] for first in range(0, len(tokens), size)]
    return [window for window in cut if len(window) > 1]
