"""Measured seconds of everything that takes time, which are all that the simulator knows of a machine. Data."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from blockrelay.planning.profile import BASE_CONTEXT, BlockProfile
from blockrelay.protocol.planned_split import equal_parts

#: Fields of `Costs` that are seconds of waiting, in which no process computes.
_WAITS = {"fsync", "cold", "wire", "turn"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCosts:
    """The seconds of one block in a step. A row is a token that the step computes."""

    rows: Mapping[int, float]
    """Seconds without attention, by the number of rows; interpolated linearly between these."""
    attended: float = 0.0
    """Seconds for each token that a decode row attends to."""
    attended_prompt: float = 0.0
    """Seconds for each token that a row of a prompt attends to."""

    def times(self, factor: float) -> "BlockCosts":
        """Returns the costs with all seconds multiplied by `factor`."""
        rows = {rows: factor * seconds for rows, seconds in self.rows.items()}
        return BlockCosts(rows=rows, attended=factor * self.attended, attended_prompt=factor * self.attended_prompt)

    def seconds(self, rows: float) -> float:
        """Returns the seconds of `rows` rows without attention."""
        return BlockProfile(seconds=self.rows).at(rows, BASE_CONTEXT)


@dataclass(frozen=True, slots=True)
class Work:
    """The amount of work in a step."""

    rows: float
    """Tokens that it computes."""
    tokens: float
    """Tokens that it generates."""
    attended: float = 0.0
    """Tokens that all decode rows together attend to."""
    attended_prompt: float = 0.0
    """Tokens that all rows of prompts together attend to."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive blocks that one worker computes."""

    count: int
    """The number of blocks."""
    layers: BlockCosts
    """The sum over all blocks except the head."""
    head: BlockCosts | None
    """The head, if it is one of the blocks."""

    def seconds(self, work: Work) -> float:
        """Returns the seconds of a step. The head computes only the rows that generate tokens."""
        layers = self.layers
        attention = work.attended * layers.attended + work.attended_prompt * layers.attended_prompt
        return (
            layers.seconds(work.rows)
            + attention
            + (self.head.seconds(work.tokens) if self.head and work.tokens else 0.0)
        )


def _summed(blocks: Sequence[BlockCosts]) -> BlockCosts:
    """Returns the sum of the costs of blocks, which were all measured at the same numbers of rows."""
    return BlockCosts(
        rows={rows: sum(block.rows[rows] for block in blocks) for rows in blocks[0].rows} if blocks else {1: 0.0},
        attended=sum(block.attended for block in blocks),
        attended_prompt=sum(block.attended_prompt for block in blocks),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """All costs of a machine, in seconds of CPU unless it says otherwise.

    Control Redis: `call` for any command (socket, reply, append-only file), and besides that `accept`; `claim` and
    `claim_job` for each job; `commit`, `commit_token` for each token in it and `commit_end` for each request that ends;
    `wake` for a blocked read; `read` for a read of logs and `read_stream` for each log in it. `sync` is spent once for
    all commands that wait together, and `fsync[k]` are seconds of waiting for the disk while k processes of the host
    compute.
    Gateway: `gateway_request` from the socket to the end of its stream, `gateway_read` for an answer of Redis,
    `gateway_read_stream` for each log that was read, `gateway_token` for each token.
    Worker: its `blocks`, of which the last is the head; besides these `part` for each request in a batch, `ask` for
    each CLAIM with or without jobs, and `ask_job` for each job; in its other threads `submit` for a commit,
    `submit_token` for each token in it, and `notice` on every worker of a first stage for each accepted request.
    A message between two stages: `hop`, and `hop_row` for each row, `hop_part` for each request with rows in it, or
    `hop_job` for each token that is reported to the first stage. Half of it is spent at each end. The sender waits
    until the payload Redis has the message, which takes a `call` for each command. The receiver spends `hop_late` of
    its half after the delivery.
    `cold` are seconds that a request waits besides all this for its first token, because idle processes must wake up.
    Clients on the same host: `client_request`, `client_token`.
    `wire` are seconds from one process to another that sleeps, without the wait for a core while all compute.
    """

    blocks: tuple[BlockCosts, ...]
    call: float = 0.0
    accept: float = 0.0
    claim: float = 0.0
    claim_job: float = 0.0
    commit: float = 0.0
    commit_token: float = 0.0
    commit_end: float = 0.0
    wake: float = 0.0
    read: float = 0.0
    read_stream: float = 0.0
    sync: float = 0.0
    fsync: tuple[float, ...] = (0.0,)
    gateway_request: float = 0.0
    gateway_read: float = 0.0
    gateway_read_stream: float = 0.0
    gateway_token: float = 0.0
    part: float = 0.0
    ask: float = 0.0
    ask_job: float = 0.0
    submit: float = 0.0
    submit_token: float = 0.0
    notice: float = 0.0
    hop: float = 0.0
    hop_row: float = 0.0
    hop_part: float = 0.0
    hop_job: float = 0.0
    hop_late: float = 0.0
    cold: float = 0.0
    client_request: float = 0.0
    client_token: float = 0.0
    wire: float = 0.0
    #: The speed of k processes of one host together at index k - 1; see `clock.Host`.
    speeds: tuple[float, ...] = (1.0,)
    #: Seconds that a process keeps its core while others wait for one.
    turn: float = 0.0
    #: By the number of decode rows, how many times as long blocks take while another worker of the host computes too.
    neighbour: Mapping[int, float] = field(default_factory=dict[int, float])

    def beside(self, rows: float) -> float:
        """Returns `neighbour` for any number of rows, interpolated linearly."""
        return BlockProfile(seconds=self.neighbour).at(rows, BASE_CONTEXT) if self.neighbour else 1.0

    def times(self, factor: float) -> "Costs":
        """Returns the costs with all seconds of CPU multiplied by `factor`, and seconds of waiting unchanged."""
        computes = {field.name for field in fields(self)} - _WAITS - {"blocks", "neighbour", "speeds"}
        changed = {name: factor * getattr(self, name) for name in computes}
        return replace(self, blocks=tuple(block.times(factor) for block in self.blocks), **changed)

    def stages(self, count: int) -> list[Stage]:
        """Returns the blocks in `count` stages, cut as `blockrelay up --stages` cuts them."""
        parts = equal_parts(len(self.blocks), count).stages
        head, layers = self.blocks[-1], self.blocks[:-1]
        return [
            Stage(
                part.last - part.first + 1,
                _summed(layers[part.first - 1 : part.last]),
                head if part.last == len(self.blocks) else None,
            )
            for part in parts
        ]

    def encode(self) -> dict[str, Any]:
        """Returns the costs as data for JSON."""
        return asdict(self)

    @classmethod
    def decode(cls, fields: Mapping[str, Any]) -> "Costs":
        """Returns the costs from the data of `encode`, after JSON has made its integer keys text."""

        def block(costs: dict[str, Any]) -> BlockCosts:
            rows = {int(rows): seconds for rows, seconds in costs["rows"].items()}
            return BlockCosts(rows=rows, attended=costs["attended"], attended_prompt=costs["attended_prompt"])

        blocks = tuple(block(costs) for costs in fields["blocks"])
        neighbour = {int(rows): ratio for rows, ratio in fields["neighbour"].items()}
        read: dict[str, Any] = {**fields, "blocks": blocks, "neighbour": neighbour}
        return cls(**read | {name: tuple(fields[name]) for name in ("speeds", "fsync")})
