"""All planning strategies by name: the built-in ones, and those that other packages register.

Another package registers a function from a `Problem` to a `Placement` in its pyproject.toml:

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
#: Built-in strategies that take each of these wishes; the others refuse them instead of ignoring them. All built-in
#: strategies take the other wishes.
ONLY_FOR: Mapping[str, tuple[str, ...]] = {
    "parts": ("uniform", "memory", "compute", "mixed"),
    "boundaries": ("custom",),
}


def names() -> list[str]:
    """Returns the names of all strategies, the built-in ones first."""
    return [*OURS, *sorted(point.name for point in entry_points(group=GROUP) if point.name not in OURS)]


def strategy(name: str) -> Strategy:
    """Returns the strategy of this name. Raises UsageError where there is none, or it cannot be loaded."""
    if name in OURS:
        return OURS[name]
    for point in entry_points(group=GROUP, name=name):
        try:
            return point.load()
        except Exception as error:
            raise UsageError(f"strategy {name} cannot be loaded from {point.value}: {error}") from error
    raise UsageError(f"there is no strategy {name}: there are {', '.join(names())}")


def goes_by(name: str, wish: str) -> bool:
    """Returns whether a strategy takes this field of `Wishes`; strategies of other packages take all fields."""
    return name not in OURS or name in ONLY_FOR.get(wish, OURS)


def _only(fleet: Fleet, targets: Sequence[str]) -> Fleet:
    devices = tuple(fleet.device(target) for target in dict.fromkeys(targets))
    hosts = {device.host for device in devices}
    return Fleet(devices=devices, links=tuple(link for link in fleet.links if hosts.issuperset(link.between)))


def place(name: str, problem: Problem) -> Placement:
    """Runs the strategy of this name, checks its placement, and returns it.

    Raises UsageError for an unknown strategy, for wishes that it does not take, and for unknown devices or devices of
    unknown speed. Raises it also for a profile of another model, and for a placement that does not cover the model or
    does not fit (NoPlan). Raises BlockFolderError for stages that the model cannot be cut into. Errors of the strategy,
    such as OutOfTime, pass through.
    """
    chosen = strategy(name)
    for wish in (field.name for field in fields(Wishes)):
        if getattr(problem.wishes, wish) is not None and not goes_by(name, wish):
            raise UsageError(f"strategy {name} does not go by {wish}: {', '.join(ONLY_FOR[wish])} would")
    # Strategies without parts and boundaries choose among all devices they see, so they see only the targets. The
    # others put their parts on the targets one after the other.
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
