"""What an engine asks of those who look after the device of its stage, between two steps."""

from typing import Protocol


class Care(Protocol):
    """Looks after a device. Used by the engine's thread."""

    @property
    def renews(self) -> bool:
        """True while the worker takes nothing new and leaves when nothing is left, to load its stage again."""
        ...

    @property
    def leaves_now(self) -> bool:
        """True once the time for that is over: what is left continues on other workers."""
        ...

    def doubt(self) -> None:
        """Has the device checked soon: a step gave numbers that cannot be right."""
        ...

    def between_steps(self) -> None:
        """Does what is due, and takes no longer than a step may. Raises DeviceLost if the device is gone."""
        ...
