"""Search for the quickest stages by an integer program, for fleets with too many devices and kinds for `count_search`.

Stages are arcs from block to block, and a plan is a path that uses of each kind at most the devices that it has:

    y[o, i, j] in {0, 1}    the stage of blocks i+1 to j runs by option o
    w[i, a, b] >= 0         behind block i a stage on kind b follows one on kind a; one for all kinds if links are alike
    sum of the y that end at i = sum of the y that begin at i;     sum of y = stages
    sum over y of kind k of its replicas <= devices of kind k

HiGHS finds the least sum of seconds and hops, exactly.
"""

import time
from collections.abc import Mapping
from itertools import pairwise, product

import highspy
import numpy as np

from blockrelay_scheduler.planning.problem import OutOfTime
from blockrelay_scheduler.planning.strategies.optimal.count_search import StageChoice
from blockrelay_scheduler.planning.strategies.optimal.search_space import Space, Tables

#: The name of a row of the program: a word, then the block and the kind of device that it is about, if any.
Row = tuple[str | int, ...]


class PathSearch:
    """Finds the quickest ways through all blocks of one space, for one number of groups, like `CountSearch`."""

    def __init__(self, space: Space, tables: Tables, until: float) -> None:
        """`until` is the time (monotonic seconds) at which the search gives up."""
        self.space, self._tables, self._until = space, tables, until
        self._blocks = space.problem.blocks
        self._known: dict[tuple[int, float], tuple[float, tuple[StageChoice, ...]] | None] = {}

    def is_possible(self, stages: int, limit_s: float) -> bool:
        """Returns whether `stages` stages can cover all blocks, each with at most `limit_s` seconds for a group.

        Raises OutOfTime when that is not known at `until`, because it finds the quickest way.
        """
        return self.quickest(stages, limit_s) is not None

    def quickest(self, stages: int, limit_s: float) -> tuple[float, tuple[StageChoice, ...]] | None:
        """Returns the way of `stages` stages with the least seconds in all, and these seconds, which come first.

        They include the hops and the tokens' way back. Each stage has at most `limit_s` seconds for a group. None when
        there is no such way. Raises OutOfTime when the answer is not known at `until`.
        """
        if (stages, limit_s) not in self._known:
            self._known[stages, limit_s] = self._solve(stages, limit_s)
        return self._known[stages, limit_s]

    def _solve(self, stages: int, limit_s: float) -> tuple[float, tuple[StageChoice, ...]] | None:
        ways = [way for start in self._tables.starts if (way := self._solve_from(start, stages, limit_s)) is not None]
        return min(ways, key=lambda way: way[0], default=None)

    def _solve_from(
        self, start: int | None, stages: int, limit_s: float
    ) -> tuple[float, tuple[StageChoice, ...]] | None:
        """Returns the quickest of the ways that begin on this kind (None: any kind)."""
        arcs = [
            StageChoice(option, int(first), int(last))
            for option, table in zip(self.space.options, self._tables.seconds, strict=True)
            for first, last in np.argwhere(table <= limit_s)
            if first or start in (None, option.kind)
        ]
        if not arcs:
            return None
        chosen = self._program(arcs, start, stages).solve(self._until)
        if chosen is None:
            return None
        way = tuple(sorted((arcs[at] for at in chosen if at < len(arcs)), key=lambda stage: stage.first))
        total = sum(map(self._seconds, way)) + sum(self._hop(a, b) for a, b in pairwise(way))
        return total + self._back(way[-1], way[0], stages), way

    def _program(self, arcs: list[StageChoice], start: int | None, stages: int) -> "_Program":
        """Writes down the integer program of the module's docstring; its first columns are `arcs`, in their order."""
        program = _Program()
        program.row(("stages",), stages, stages)
        for kind, devices in enumerate(self.space.kinds):
            program.row(("devices", kind), 0, len(devices))
        program.row(("begin",), 1, 1)
        program.row(("end",), 1, 1)
        by_kind = bool(np.any(self._tables.hops != self._tables.hops[:, :1, :1]))
        for arc in arcs:
            kind = arc.option.kind
            node = kind if by_kind else 0
            column: dict[Row, float] = {("stages",): 1.0, ("devices", kind): float(arc.option.replicas)}
            column |= {("before", arc.first, node): -1.0} if arc.first else {("begin",): 1.0}
            column |= {("behind", arc.last, node): 1.0} if arc.last < self._blocks else {("end",): 1.0}
            back = self._back(arc, start, stages) if arc.last == self._blocks else 0.0
            program.column(self._seconds(arc) + back, column, whole=True)
        for at in range(1, self._blocks):
            for a, b in product(range(len(self.space.kinds) if by_kind else 1), repeat=2):
                program.column(
                    float(self._tables.hops[at, a, b]), {("behind", at, a): -1.0, ("before", at, b): 1.0}, whole=False
                )
        return program

    def _hop(self, a: StageChoice, b: StageChoice) -> float:
        return float(self._tables.hops[a.last, a.option.kind, b.option.kind])

    def _back(self, last: StageChoice, first: StageChoice | int | None, stages: int) -> float:
        """Seconds of the tokens' way back from the last stage to the first, which is given as a stage or a kind."""
        kind = first.option.kind if isinstance(first, StageChoice) else first or 0
        return float(self._tables.backs[last.option.kind, kind]) if stages > 1 else 0.0

    def _seconds(self, stage: StageChoice) -> float:
        at = self.space.options.index(stage.option)
        return float(self._tables.seconds[at][stage.first, stage.last])


class _Program:
    """An integer program, written down row by row and column by column; a row that only columns name is `= 0`."""

    def __init__(self) -> None:
        self._rows: dict[Row, int] = {}
        self._bounds: list[tuple[float, float]] = []
        self._costs: list[float] = []
        self._whole: list[bool] = []
        self._starts, self._indices, self._values = [0], list[int](), list[float]()

    def row(self, name: Row, lower: float, upper: float) -> int:
        """Declares a row and its bounds, unless it is there already, and returns its index."""
        if name not in self._rows:
            self._rows[name] = len(self._bounds)
            self._bounds.append((lower, upper))
        return self._rows[name]

    def column(self, cost: float, entries: Mapping[Row, float], *, whole: bool) -> None:
        """Adds a variable in [0, 1] with its coefficients by row; `whole`: it is 0 or 1."""
        self._costs.append(cost)
        self._whole.append(whole)
        for name, value in entries.items():
            self._indices.append(self.row(name, 0.0, 0.0))
            self._values.append(value)
        self._starts.append(len(self._indices))

    def solve(self, until: float) -> list[int] | None:
        """Returns the indices of the columns that are 1 in the solution of least cost; None when there is no solution.

        Raises OutOfTime when the solution is not proved best at `until` (monotonic seconds).
        """
        model = highspy.HighsModel()
        lp = model.lp_
        lp.num_col_, lp.num_row_ = len(self._costs), len(self._bounds)
        lp.col_cost_ = np.array(self._costs)
        lp.col_lower_, lp.col_upper_ = np.zeros(len(self._costs)), np.ones(len(self._costs))
        lp.row_lower_, lp.row_upper_ = (np.array([bound[at] for bound in self._bounds]) for at in (0, 1))
        lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        lp.a_matrix_.start_, lp.a_matrix_.index_ = np.array(self._starts), np.array(self._indices)
        lp.a_matrix_.value_ = np.array(self._values)
        lp.integrality_ = [
            highspy.HighsVarType.kInteger if w else highspy.HighsVarType.kContinuous for w in self._whole
        ]
        solver = highspy.Highs()
        solver.silent()
        solver.setOptionValue("mip_rel_gap", 0.0)
        solver.setOptionValue("mip_abs_gap", 0.0)
        solver.setOptionValue("time_limit", max(until - time.monotonic(), 0.0))
        solver.passModel(model)
        solver.run()
        status = solver.getModelStatus()
        if status == highspy.HighsModelStatus.kInfeasible:
            return None
        if status != highspy.HighsModelStatus.kOptimal:
            raise OutOfTime(
                "no plan was proved best in time: too many devices with links that differ for strategy auto; leave "
                "out links, name fewer devices, or take another strategy"
            )
        return [at for at, value in enumerate(solver.getSolution().col_value) if value > 0.5]
