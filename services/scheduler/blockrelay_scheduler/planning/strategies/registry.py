"""Every strategy by its name: ours, and those that other packages register.

A package of yours registers a function from a `Problem` to a `Placement` in its pyproject.toml:

    [project.entry-points."blockrelay.strategies"]
    my-strategy = "my_package:my_strategy"
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from importlib.metadata import entry_points

from blockrelay.errors import UsageError
from blockrelay.planning.devices import Fleet
from blockrelay.protocol.plan import Stage
from blockrelay_scheduler.planning.memory_check import check_memory
from blockrelay_scheduler.planning.problem import Placement, Problem, Strategy, Wishes
from blockrelay_scheduler.planning.strategies.compute import compute
from blockrelay_scheduler.planning.strategies.custom import custom
from blockrelay_scheduler.planning.strategies.memory import memory
from blockrelay_scheduler.planning.strategies.mixed import mixed
from blockrelay_scheduler.planning.strategies.optimal.auto import auto
from blockrelay_scheduler.planning.strategies.ring import ring, ring_speed
from blockrelay_scheduler.planning.strategies.static_split import static_split
from blockrelay_scheduler.planning.strategies.uniform import uniform

GROUP = "blockrelay.strategies"
OURS: Mapping[str, Strategy] = {
    "auto": auto,
    "uniform": uniform,
    "memory": memory,
    "compute": compute,
    "mixed": mixed,
    "custom": custom,
    "static-split": static_split,
    "ring": ring,
    "ring-speed": ring_speed,
}
#: Which of ours go by these wishes. Others refuse them: nobody shall think that they were heard. All go by the rest.
ONLY_FOR: Mapping[str, tuple[str, ...]] = {
    "parts": ("uniform", "memory", "compute", "mixed"),
    "boundaries": ("custom",),
}


def names() -> list[str]:
    """Of all strategies, ours first."""
    return [*OURS, *sorted(point.name for point in entry_points(group=GROUP) if point.name not in OURS)]


def strategy(name: str) -> Strategy:
    """By its name. UsageError where there is none, or it cannot be loaded."""
    if name in OURS:
        return OURS[name]
    for point in entry_points(group=GROUP, name=name):
        try:
            return point.load()
        except Exception as error:
            raise UsageError(f"strategy {name} cannot be loaded from {point.value}: {error}") from error
    raise UsageError(f"there is no strategy {name}: there are {', '.join(names())}")


def goes_by(name: str, wish: str) -> bool:
    """Whether a strategy goes by this field of `Wishes`; those of other packages get all of them."""
    return name not in OURS or name in ONLY_FOR.get(wish, OURS)


def _only(fleet: Fleet, targets: Sequence[str]) -> Fleet:
    devices = tuple(fleet.device(target) for target in dict.fromkeys(targets))
    hosts = {device.host for device in devices}
    return Fleet(devices=devices, links=tuple(link for link in fleet.links if hosts.issuperset(link.between)))


def place(name: str, problem: Problem) -> Placement:
    """What a strategy answers, checked. UsageError for wishes that it does not go by, devices that are not there, and
    an answer that is no plan of the model; BlockFolderError for one that its blocks cannot be cut into."""
    chosen = strategy(name)
    for wish in (field.name for field in fields(Wishes)):
        if getattr(problem.wishes, wish) is not None and not goes_by(name, wish):
            raise UsageError(f"strategy {name} does not go by {wish}: {', '.join(ONLY_FOR[wish])} would")
    # Who is told neither puts parts on the targets by a rule of its own, the others on one after the other.
    if problem.wishes.targets and name in OURS and not any(goes_by(name, wish) for wish in ONLY_FOR):
        problem = replace(problem, fleet=_only(problem.fleet, problem.wishes.targets))
    problem.costs.check(problem.fleet)
    placement = chosen(problem)
    expected = 1
    for part in placement.parts:
        if part.first != expected or not part.first <= part.last <= problem.blocks or not part.devices:
            raise UsageError(f"strategy {name}: part {part.first}-{part.last} does not continue at block_{expected}")
        for device in part.devices:
            problem.fleet.device(device)
        expected = part.last + 1
    if expected <= problem.blocks:
        raise UsageError(f"strategy {name}: block_{expected} is in no part")
    problem.check_cut([Stage(first=part.first, last=part.last) for part in placement.parts])
    check_memory(problem, placement)
    return placement
