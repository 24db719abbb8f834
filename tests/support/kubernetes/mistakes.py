"""Mistakes planted in rendered objects: something is put where it does not belong, or left out."""

from collections.abc import Callable
from typing import Any

from tests.support.kubernetes.contracts.objects import containers, kinds, pod_of
from tests.support.kubernetes.rendering import Manifest

#: Something done to the objects of an overlay.
Change = Callable[[list[Manifest]], None]


def put(where: str, path: str, value: Any) -> Change:
    """Write `value` at the end of a path (`_walk`); behind a list for `+`."""

    def change(objects: list[Manifest]) -> None:
        inside, last = _walk(_object(objects, where), path)
        if last == "+":
            inside.append(value)
        else:
            inside[last] = value

    return change


def drop(where: str, path: str = "") -> Change:
    """Take away what is at the end of a path, or the whole object."""

    def change(objects: list[Manifest]) -> None:
        found = _object(objects, where)
        if not path:
            return objects.remove(found)
        inside, last = _walk(found, path)
        del inside[last]

    return change


def _object(objects: list[Manifest], where: str) -> Manifest:
    """`Deployment gateway` is the one that is called blockrelay-gateway, `Ingress` the one that is called blockrelay. A
    Secret may have a hash behind its name."""
    kind, *names = where.split()
    called = "-".join(("blockrelay", *names))
    (found,) = [
        each
        for each in kinds(objects, kind)
        if (name := each["metadata"]["name"]) == called or (kind == "Secret" and name.startswith(f"{called}-"))
    ]
    return found


def _walk(at: Any, path: str) -> tuple[Any, Any]:
    """Follow a path of words but for the last; what is there, and the key or index that the last one means in it.

    `pod` is that of a workload, `container` its first. An element of a list is its number, or what it is or has, as a
    name or a topology key.
    """
    first, *words = path.split()
    shortcuts: dict[str, Callable[[Manifest], Any]] = {"pod": pod_of, "container": lambda one: containers(one)[0]}
    if first in shortcuts:
        at = shortcuts[first](at)
    else:
        words.insert(0, first)
    for word in words[:-1]:
        at = at[_key(at, word)]
    return at, _key(at, words[-1])


def _key(at: Any, word: str) -> str | int:
    if isinstance(at, dict) or word == "+":
        return word
    if word.lstrip("-").isdigit():
        return int(word)
    (found,) = [i for i, each in enumerate(at) if each == word or (isinstance(each, dict) and word in each.values())]
    return found
