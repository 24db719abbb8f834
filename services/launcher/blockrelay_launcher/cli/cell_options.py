"""The options of commands that read a cell: the address of its control Redis, or the data folder of its `up`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from blockrelay.redis.cell_address import CellAddress, find_cell
from blockrelay_launcher.option_groups import OptionGroup, option


@dataclass(frozen=True, slots=True, kw_only=True)
class CellOptions(OptionGroup):
    """The options that name a cell; without them the settings do."""

    redis: Annotated[
        str | None,
        option(
            "URL",
            "URL of the control Redis: redis://HOST:PORT/DB, unix://PATH, or redis+sentinel://, redis+cluster://.",
        ),
    ] = None
    data: Annotated[Path | None, option("DIR", "Data folder of a running `blockrelay up`.")] = None

    def find(self) -> CellAddress:
        """Returns the address of the cell.

        Raises UsageError if both options are given, if no `up` runs on `data`, or if the URL is not that of a Redis.
        """
        return find_cell(self.redis, self.data)
