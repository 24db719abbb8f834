"""Looks after the ranks of a stage between the steps of its worker."""

from blockrelay_worker.execution.ranks.group import RankGroup


class RankCare:
    """Notices that a rank has ended while nothing was computed. Implements `engine.care.Care`."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    @property
    def renews(self) -> bool:
        """Never: a group that has lost a rank is loaded again at once."""
        return False

    @property
    def leaves_now(self) -> bool:
        """Never."""
        return False

    def doubt(self) -> None:
        """Does nothing: the bits of ranks are checked when they are loaded."""

    def between_steps(self) -> None:
        """Raises DeviceLost if a rank has ended."""
        if self._group.lost is not None:
            raise self._group.lost
