"""One key under several lists of cells: which cell accepts it, whenever each gateway reads the file of lists.

Each gateway knows the lists up to one version, and may read the next one at any time. It asks the cells of earlier
lists by MOVE, then sends ACCEPT to the cell of its own; it may be killed between any two, and a client that got no
answer asks again, at any gateway. `broken`: the key has begun in two cells. `done`: every gateway has answered.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from tests.protocol_model.explorer import Step

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CellRules:
    """What may be left out, to see that it is needed."""

    asks_former_cells: bool = True
    writes_that_it_moved: bool = True
    knows_its_version: bool = True  # else whatever has moved is refused
    replaces_older_marks: bool = True  # ACCEPT by a newer list than the mark's


@dataclass(frozen=True, slots=True)
class Attempt:
    """By the list `version`; `ahead` are cells of earlier lists that are still to be asked."""

    version: int
    ahead: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelGateway:
    knows: int
    attempt: Attempt | None = None
    answered: int | None = None  # the cell that has the request


@dataclass(frozen=True, slots=True)
class CellsState:
    """Of each cell: whether the request began there, and the version by which it moved elsewhere, 0 for none."""

    began: tuple[bool, ...]
    moved: tuple[int, ...]
    gateways: tuple[ModelGateway, ...]
    kills: int


class KeyInCells:
    """`winners[v]` is the cell of the key by list v + 1."""

    def __init__(
        self, winners: tuple[int, ...], *, gateways: int = 2, kills: int = 1, rules: CellRules | None = None
    ) -> None:
        self._winners, self._kills, self._rules = winners, kills, rules or CellRules()
        self._gateways = gateways

    def initial(self) -> CellsState:
        cells = max(self._winners) + 1
        return CellsState((False,) * cells, (0,) * cells, (ModelGateway(1),) * self._gateways, self._kills)

    def steps(self, state: CellsState) -> Iterable[Step[CellsState]]:
        for index, gateway in enumerate(state.gateways):
            for name, after, now, fault in self._of_one(state, gateway):
                others = (*state.gateways[:index], now, *state.gateways[index + 1 :])
                yield f"gateway {index} {name}", replace(after, gateways=tuple(others)), fault

    def canonical(self, state: CellsState) -> CellsState:
        return replace(state, gateways=tuple(sorted(state.gateways, key=repr)))

    def broken(self, state: CellsState) -> str | None:
        if sum(state.began) > 1:
            return "I9: one key has begun in two cells"
        for gateway in state.gateways:
            if gateway.answered is not None and not state.began[gateway.answered]:
                return "a client was answered from a cell that has nothing"
        return None

    def done(self, state: CellsState) -> bool:
        return all(gateway.answered is not None for gateway in state.gateways)

    def _of_one(self, state: CellsState, gateway: ModelGateway) -> Iterator[tuple[str, CellsState, ModelGateway, bool]]:
        if gateway.knows < len(self._winners):
            yield "reads the next list", state, replace(gateway, knows=gateway.knows + 1), False
        attempt = gateway.attempt
        if attempt is None:
            yield "is asked", state, replace(gateway, attempt=self._begun(gateway.knows)), False
            return
        if state.kills:
            fresh = replace(gateway, attempt=None, answered=None)
            yield "is killed", replace(state, kills=state.kills - 1), fresh, True
        own = self._winners[attempt.version - 1]
        if attempt.ahead and state.began[own]:
            found = replace(gateway, attempt=None, answered=own)
            yield f"finds it in cell {own}, for another one is away", state, found, False
        if attempt.ahead:
            cell, *ahead = attempt.ahead
            if state.began[cell]:
                yield f"finds it in cell {cell}", state, replace(gateway, attempt=None, answered=cell), False
            else:
                moved = max(state.moved[cell], attempt.version) if self._rules.writes_that_it_moved else 0
                on = replace(gateway, attempt=replace(attempt, ahead=tuple(ahead)))
                yield f"moves it from cell {cell}", replace(state, moved=_put(state.moved, cell, moved)), on, False
            return
        cell, answered = own, replace(gateway, attempt=None, answered=own)
        known = attempt.version if self._rules.knows_its_version else 0
        if state.began[cell]:
            yield f"finds it in cell {cell}", state, answered, False
        elif state.moved[cell] > known or (state.moved[cell] and not self._rules.replaces_older_marks):
            yield f"is refused by cell {cell}", state, replace(gateway, attempt=None), False
        else:
            began = replace(state, began=_put(state.began, cell, True), moved=_put(state.moved, cell, 0))
            yield f"begins it in cell {cell}", began, answered, False

    def _begun(self, version: int) -> Attempt:
        own = self._winners[version - 1]
        former = dict.fromkeys(cell for cell in reversed(self._winners[: version - 1]) if cell != own)
        return Attempt(version, tuple(former) if self._rules.asks_former_cells else ())


def _put(values: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    return (*values[:index], value, *values[index + 1 :])
