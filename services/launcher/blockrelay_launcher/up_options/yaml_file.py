"""Reads a YAML file strictly, with errors that name the line and the field."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from blockrelay.bounded_file import read_bounded
from blockrelay.errors import UsageError

_MAX_BYTES = 1 << 20

#: The path to a value in the file: names and indexes from the top.
Where = Sequence[str | int]


@dataclass(frozen=True, slots=True)
class YamlFile:
    """A YAML file that holds a mapping, with distinct names and no aliases: its `data`, and the lines of its values."""

    path: Path
    data: dict[str, Any]
    _root: yaml.Node

    @classmethod
    def read(cls, path: Path, what: str) -> "YamlFile":
        """Reads a file of at most 1 MiB; `what` describes a right one.

        Raises UsageError if the file cannot be read, is larger, or is no such mapping.
        """
        content = read_bounded(path, _MAX_BYTES)
        try:
            root = yaml.compose(content, Loader=yaml.SafeLoader)
            _check_nodes(root, path)
            data: Any = yaml.safe_load(content)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            where = f", line {mark.line + 1}" if mark else ""
            problem = getattr(error, "problem", None) or "not YAML"
            raise UsageError(f"{path}{where}: {problem}") from None
        except (ValueError, AttributeError, RecursionError):  # a month 13, a tag that its value does not have
            raise UsageError(f"{path}: not YAML") from None
        if root is None or not isinstance(data, dict):
            raise UsageError(f"{path}: {what}")
        return cls(path, data, root)

    def error(self, where: Where, text: str) -> UsageError:
        """Returns an error with a message of the form `FILE, line 7: a.b: text`."""
        named = f"{'.'.join(map(str, where))}: " if where else ""
        return UsageError(f"{self.path}, line {self._line(where)}: {named}{text}")

    def refusal(self, error: ValidationError) -> UsageError:
        """Returns the first error that pydantic found in `data`."""
        first = error.errors()[0]
        where = tuple(part for part in first["loc"] if part != "[key]")
        if first["type"] != "missing":  # after the path of a value, pydantic adds the types that it tried
            where = where[: len(self._known(where))]
        return self.error(where or ("the file",), first["msg"])

    def _line(self, where: Where) -> int:
        """Returns the line, from 1, of the innermost part of `where` that exists."""
        known = self._known(where)
        return (known[-1] if known else self._root.start_mark.line) + 1

    def _known(self, where: Where) -> list[int]:
        """Returns the lines, from 0, of the parts of `where` that exist."""
        node, lines = self._root, list[int]()
        for part in where:
            child: yaml.Node | None = None
            if isinstance(node, yaml.MappingNode):
                for key, value in node.value:
                    if key.value == str(part):
                        child = value
                        lines.append(key.start_mark.line)
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                child = node.value[part]
                lines.append(child.start_mark.line)
            if child is None:
                break
            node = child
        return lines


def _check_nodes(root: yaml.Node | None, path: Path) -> None:
    """Raises UsageError for a key that occurs twice (the last would win) and for an alias.

    A page of nested aliases can expand to a terabyte.
    """
    seen: set[int] = set()
    for node in _nodes(root):
        if id(node) in seen:
            raise UsageError(f"{path}, line {node.start_mark.line + 1}: aliases (*) are not taken here")
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            keys: set[str] = set()
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    raise UsageError(f"{path}, line {key.start_mark.line + 1}: a name is one word")
                if key.value in keys:
                    raise UsageError(f"{path}, line {key.start_mark.line + 1}: {key.value} is there twice")
                keys.add(str(key.value))


def _nodes(root: yaml.Node | None) -> Iterator[yaml.Node]:
    waiting = [root] if root is not None else []
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, yaml.MappingNode):
            waiting += [value for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value
