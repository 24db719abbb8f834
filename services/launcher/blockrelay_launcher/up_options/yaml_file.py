"""A YAML file read strictly, whose every error names the line and the field."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from blockrelay.bounded_file import read_bounded
from blockrelay.errors import UsageError

_MAX_BYTES = 1 << 20

#: Names and indices from the top of the file to a value.
Where = Sequence[str | int]


@dataclass(frozen=True, slots=True)
class YamlFile:
    """A mapping with distinct names and without aliases: `data`, and where each part of it stands."""

    path: Path
    data: dict[str, Any]
    _root: yaml.Node

    @classmethod
    def read(cls, path: Path, what: str) -> "YamlFile":
        """UsageError, one line, for a file that is none; `what` it should have been, for people."""
        content = read_bounded(path, _MAX_BYTES)
        try:
            root = yaml.compose(content, Loader=yaml.SafeLoader)
            _check_nodes(root, path)
            data: Any = yaml.safe_load(content)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            where = f", line {mark.line + 1}" if mark else ""
            said = getattr(error, "problem", None) or "not YAML"
            raise UsageError(f"{path}{where}: {said}") from None
        except (ValueError, AttributeError, RecursionError):  # a month 13, a tag that its value does not have
            raise UsageError(f"{path}: not YAML") from None
        if root is None or not isinstance(data, dict):
            raise UsageError(f"{path}: {what}")
        return cls(path, data, root)

    def error(self, where: Where, text: str) -> UsageError:
        """`FILE, line 7: a.b: text`."""
        named = f"{'.'.join(map(str, where))}: " if where else ""
        return UsageError(f"{self.path}, line {self._line(where)}: {named}{text}")

    def refusal(self, error: ValidationError) -> UsageError:
        """The first of the errors that pydantic found in `data`."""
        first = error.errors()[0]
        where = tuple(part for part in first["loc"] if part != "[key]")
        if first["type"] != "missing":  # behind the name of a value come those of the types that it might have had
            where = where[: len(self._known(where))]
        return self.error(where or ("the file",), first["msg"])

    def _line(self, where: Where) -> int:
        """Of the innermost part of `where` that is there."""
        known = self._known(where)
        return (known[-1] if known else self._root.start_mark.line) + 1

    def _known(self, where: Where) -> list[int]:
        """The lines of those parts of `where` that are there, from 0."""
        node, lines = self._root, list[int]()
        for part in where:
            found: yaml.Node | None = None
            if isinstance(node, yaml.MappingNode):
                for key, value in node.value:
                    if key.value == str(part):
                        found = value
                        lines.append(key.start_mark.line)
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                found = node.value[part]
                lines.append(found.start_mark.line)
            if found is None:
                break
            node = found
        return lines


def _check_nodes(root: yaml.Node | None, path: Path) -> None:
    """No key twice (the last would count), no alias (a page of them is a terabyte)."""
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
