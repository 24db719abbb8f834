"""Reads from the record of a request which workers computed which of its tokens. The script CLAIM writes it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from blockrelay.protocol.encoding.checks import reading

_RUN = re.compile(r"(\d+)@(\d+)(?:=(\S+) ([^;]+))?;")


@dataclass(frozen=True, slots=True)
class Stage:
    """A worker that computed some blocks of a run."""

    blocks: str
    """The first and the last block, as `5-8`."""
    worker: str
    device: str
    """Name of the device in plans, such as `gpu:0`, or `cpu`; a worker that lost it may compute on another one."""
    epoch: int
    """Number of the plan that gave the worker these blocks; 0: unknown."""
    numerics: str
    """The numerics id of the worker."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A run of a request, and the new tokens that it computed: from `begin` on, before `end`."""

    begin: int
    end: int
    attempt: int
    """1 for the first run of the request."""
    stages: tuple[Stage, ...]


def provenance(record: Mapping[bytes, bytes], tokens: int) -> list[Ran]:
    """Returns the runs of a request that has `tokens` new tokens, in the order of their tokens.

    `record` must be whole (`records.ended.whole_record`). Runs that computed no token are missing, but for the last
    one. Beyond 1500 characters the oldest are missing too, so the first may begin behind token 0. Raises WireError.
    """
    with reading("the runs of a request"):
        return _runs(record, tokens)


def _runs(record: Mapping[bytes, bytes], tokens: int) -> list[Ran]:
    found = _RUN.findall(record.get(b"ran", b"").decode())
    history = record.get(b"numerics", b"").decode()
    begins = [int(begin) for begin, *_ in found] + [tokens]
    runs: list[Ran] = []
    stages: tuple[Stage, ...] = ()
    for (_, before, split, route), (begin, end) in zip(found, pairwise(begins), strict=True):
        stages = tuple(_stages(split, route, _numerics_at(history, begin))) if split else stages
        runs.append(Ran(begin, end, int(before) + 1, stages))
    return runs


def _stages(split: str, route: str, numerics: str) -> list[Stage]:
    read: list[Stage] = []
    before = ["", "cpu", "", numerics]
    for blocks, text in zip(split.split(","), route.split(","), strict=True):
        told = [*text.split("/"), "", "", ""]
        before = [part or earlier for part, earlier in zip(told, before, strict=False)]
        worker, device, epoch, id_of_stage = before
        read.append(Stage(blocks, worker, device, int(epoch or 0), id_of_stage))
    return read


def _numerics_at(history: str, token: int) -> str:
    """Returns the numerics id under which a new token was computed: `b` in `a+b@17` from token 17 on."""
    ids = (one.partition("@") for one in history.split("+"))
    return [name for name, _, begin in ids if int(begin or 0) <= token][-1]
