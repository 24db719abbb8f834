"""The measured figures of a `benchmarks.json`, one record for each unit, and medians of them."""

import json
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The outcome of a unit: reports or figures, or the error that prevented them."""

    part: str
    side: str
    round: int
    """The number of the round, from 0."""
    at: str
    """The time of the measurement, ISO 8601 in UTC."""
    commit: str = ""
    reports: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Reports of `blockrelay bench` or of a scenario."""
    figures: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Figures of a peer, one entry for each size."""
    error: str = ""
    machine: dict[str, Any] = field(default_factory=dict[str, Any])
    """The machine on which it was measured."""
    busy: float | None = None
    """The share of the machine's cores that other work took just before."""

    @property
    def key(self) -> tuple[str, str, int]:
        """Part, side and round, which name the unit."""
        return self.part, self.side, self.round


@dataclass(slots=True)
class Store:
    """All records, saved after each one, so that a stop costs one unit. All records of a part are of one machine."""

    path: Path
    records: list[Record] = field(default_factory=list[Record])

    @classmethod
    def open(cls, path: Path) -> "Store":
        """Returns the store in a file. The file is in git, and so its records may be of several machines."""
        content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"machines": [], "records": []}
        machines: list[dict[str, Any]] = content["machines"]
        records = [Record(**{**record, "machine": machines[record["machine"]]}) for record in content["records"]]
        return cls(path, records)

    def move_to(self, machine: Mapping[str, Any], parts: Collection[str]) -> None:
        """Drops the records of these parts from other machines than `machine`: figures of two are never compared.

        The file stays as it is until the next `put`.
        """
        self.records = [one for one in self.records if one.part not in parts or one.machine == machine]

    def take(self, records: Sequence[Record]) -> None:
        """Stores those of `records` that are newer, and drops records of their parts from other machines."""
        for record in records:
            known = next((one for one in self.records if one.key == record.key), None)
            if known is None or known.at < record.at:
                self.move_to(record.machine, [record.part])
                self.put(record)

    def put(self, record: Record) -> None:
        """Stores a record, in place of an older one of its unit, and writes the file."""
        self.records = [old for old in self.records if old.key != record.key] + [record]
        machines: list[dict[str, Any]] = []
        for one in self.records:
            if one.machine not in machines:
                machines.append(one.machine)
        stored = [{**asdict(one), "machine": machines.index(one.machine)} for one in self.records]
        content = {"machines": machines, "records": stored}
        draft = self.path.with_suffix(".draft")
        draft.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(content, indent=1) + "\n")
        draft.replace(self.path)

    def forget(self, sides: Collection[tuple[str, str]]) -> None:
        """Drops the records of these (part, side), of every round. The file stays as it is until the next `put`."""
        self.records = [record for record in self.records if (record.part, record.side) not in sides]


#: The figures of a size that are times or rates.
MEASURED = ("decode_tok_s", "prefill_ms", "prompt_tok_s", "ttft_ms_p50", "itl_ms_p50", "itl_ms_p99", "tok_s")


def impossible(entry: Mapping[str, Any]) -> str:
    """Says what is wrong with the figures of one size; empty: nothing.

    Times and rates must be above 0 and finite.
    """
    bad = [f"{name} {entry[name]}" for name in MEASURED if name in entry and not 0 < entry[name] < math.inf]
    problem = str(entry.get("error") or (f"impossible: {', '.join(bad)}" if bad else ""))
    return problem and f"{entry['requests']} x {entry['prompt']}: {problem}"


def entries(record: Record) -> list[dict[str, Any]]:
    """Returns the possible figures of each size in a record; those of our side are through the gateway."""
    every = record.figures or [entry for report in record.reports for entry in report["gateway"]]
    return [entry for entry in every if not impossible(entry)]


def faults(record: Record) -> list[str]:
    """Returns a line for each impossible figure of a record, through the gateway and in process."""
    ours = [entry for report in record.reports for way in ("gateway", "in_process") for entry in report.get(way) or ()]
    return [line for line in map(impossible, [*record.figures, *ours]) if line]


def by_round(
    records: Sequence[Record], part: str, side: str, figure: str, *, requests: int, prompt: int
) -> dict[int, float]:
    """Returns a figure of one size of a side in a part, by round; rounds without the figure are left out.

    The size is that of `requests` requests with prompts of `prompt` tokens.
    """
    values: dict[int, float] = {}
    for record in records:
        if (record.part, record.side) == (part, side):
            for entry in entries(record):
                if (entry["requests"], entry["prompt"]) == (requests, prompt) and entry.get(figure) is not None:
                    values[record.round] = float(entry[figure])
    return values


def median(records: Sequence[Record], part: str, side: str, figure: str, *, requests: int, prompt: int) -> float | None:
    """Returns the median over all rounds of the figure that `by_round` returns; None without any."""
    values = by_round(records, part, side, figure, requests=requests, prompt=prompt).values()
    return statistics.median(values) if values else None


def paired_ratio(over: dict[int, float], under: dict[int, float]) -> float | None:
    """Returns the median of `over / under` over the rounds that both have; None without any."""
    ratios = [over[number] / under[number] for number in over.keys() & under.keys()]
    return statistics.median(ratios) if ratios else None


def sides_of(records: Sequence[Record], part: str) -> list[str]:
    """Returns the sides of a part that have figures, in the order in which they were measured first."""
    return list(dict.fromkeys(r.side for r in records if r.part == part and entries(r)))


def reports_of(records: Sequence[Record], part: str, side: str | None = None) -> list[dict[str, Any]]:
    """Returns all reports of a part, or of one of its sides."""
    own = [record for record in records if record.part == part and side in (None, record.side)]
    return [report for record in own for report in record.reports]


def roofline_median(
    records: Sequence[Record], side: str, case: tuple[str, int, int], figure: tuple[str, str]
) -> float | None:
    """Returns the median of a figure of a side's roofline, such as ("step", "ratio"); None without any.

    `case`: `decode` or `prompt`, requests, tokens of each prompt.
    """
    every = [entry for report in reports_of(records, "roofline", side) for entry in report["roofline"]["cases"]]
    own = [entry for entry in every if (entry["case"], entry["requests"], entry["prompt"]) == case]
    return statistics.median(float(entry[figure[0]][figure[1]]) for entry in own) if own else None
