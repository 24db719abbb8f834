"""The measured figures as they lie in a `benchmarks.json`, and medians of them. Raw: a record per unit."""

import json
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A unit's outcome: reports of what measured us, or a peer's figures, or the error that kept it from any.

    `machine` is where it was measured, and `busy` the share of its cores that other work took just before.
    """

    part: str
    side: str
    round: int
    at: str
    commit: str = ""
    reports: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    figures: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    error: str = ""
    machine: dict[str, Any] = field(default_factory=dict[str, Any])
    busy: float | None = None

    @property
    def key(self) -> tuple[str, str, int]:
        return self.part, self.side, self.round


@dataclass(slots=True)
class Store:
    """All records, saved after each, so that a stop costs one unit. All figures of a part are of one machine."""

    path: Path
    records: list[Record] = field(default_factory=list[Record])

    @classmethod
    def open(cls, path: Path) -> "Store":
        """What is stored: the file lies in git, so that its records may be of several machines."""
        content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"machines": [], "records": []}
        machines: list[dict[str, Any]] = content["machines"]
        records = [Record(**{**record, "machine": machines[record["machine"]]}) for record in content["records"]]
        return cls(path, records)

    def move_to(self, machine: Mapping[str, Any], parts: Collection[str]) -> None:
        """Drop the records of these parts that another machine has measured: figures of two are never compared. Until
        the next `put` in memory only."""
        self.records = [one for one in self.records if one.part not in parts or one.machine == machine]

    def take(self, records: Sequence[Record]) -> None:
        """Store those that are newer. What another machine has measured of their parts goes."""
        for record in records:
            known = next((one for one in self.records if one.key == record.key), None)
            if known is None or known.at < record.at:
                self.move_to(record.machine, [record.part])
                self.put(record)

    def put(self, record: Record) -> None:
        """Store a record in place of an older one of its unit."""
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
        """Drop the records of these (part, side), of every round; until the next `put` in memory only."""
        self.records = [record for record in self.records if (record.part, record.side) not in sides]


#: Figures of a size that are times or rates.
MEASURED = ("decode_tok_s", "prefill_ms", "prompt_tok_s", "ttft_ms_p50", "itl_ms_p50", "itl_ms_p99", "tok_s")


def impossible(entry: Mapping[str, Any]) -> str:
    """What is wrong with the figures of one size, by name: a time or a rate is above 0 and finite. Empty: nothing."""
    bad = [f"{name} {entry[name]}" for name in MEASURED if name in entry and not 0 < entry[name] < math.inf]
    said = str(entry.get("error") or (f"impossible: {', '.join(bad)}" if bad else ""))
    return said and f"{entry['requests']} x {entry['prompt']}: {said}"


def entries(record: Record) -> list[dict[str, Any]]:
    """What a record says of sizes: through the gateway, for our side. Without what cannot be."""
    found = record.figures or [entry for report in record.reports for entry in report["gateway"]]
    return [entry for entry in found if not impossible(entry)]


def faults(record: Record) -> list[str]:
    """What in it cannot be, a line for each size and way."""
    told = [entry for report in record.reports for way in ("gateway", "in_process") for entry in report.get(way) or ()]
    return [line for line in map(impossible, [*record.figures, *told]) if line]


def by_round(
    records: Sequence[Record], part: str, side: str, figure: str, *, requests: int, prompt: int
) -> dict[int, float]:
    """round -> a figure of one size of a side; rounds that have none are left out."""
    found: dict[int, float] = {}
    for record in records:
        if (record.part, record.side) == (part, side):
            for entry in entries(record):
                if (entry["requests"], entry["prompt"]) == (requests, prompt) and entry.get(figure) is not None:
                    found[record.round] = float(entry[figure])
    return found


def median(records: Sequence[Record], part: str, side: str, figure: str, *, requests: int, prompt: int) -> float | None:
    """The median of a figure over rounds."""
    values = by_round(records, part, side, figure, requests=requests, prompt=prompt).values()
    return statistics.median(values) if values else None


def paired_ratio(over: dict[int, float], under: dict[int, float]) -> float | None:
    """The median over common rounds of `over / under`."""
    ratios = [over[number] / under[number] for number in over.keys() & under.keys()]
    return statistics.median(ratios) if ratios else None


def sides_of(records: Sequence[Record], part: str) -> list[str]:
    """Sides with figures, in the order in which they were measured first."""
    return list(dict.fromkeys(r.side for r in records if r.part == part and entries(r)))


def reports_of(records: Sequence[Record], part: str) -> list[dict[str, Any]]:
    """All reports of `blockrelay bench` of a part."""
    return [report for record in records if record.part == part for report in record.reports]
