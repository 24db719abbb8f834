"""What things cost: measured seconds, the only facts that the simulator has of a machine. Data."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from blockrelay.planning.profile import BASE_CONTEXT, BlockProfile
from blockrelay.protocol.planned_split import equal_parts

#: Seconds of `Costs` in which nobody computes.
_WAITS = {"fsync", "cold", "wire", "turn"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCosts:
    """Seconds of one block by the `rows` of a step, on straight lines between what is there; and for each token that a
    row attends to, `attended` of one that decodes and `attended_prompt` of a prompt."""

    rows: Mapping[int, float]
    attended: float = 0.0
    attended_prompt: float = 0.0

    def times(self, factor: float) -> "BlockCosts":
        """All of it so many times."""
        rows = {rows: factor * seconds for rows, seconds in self.rows.items()}
        return BlockCosts(rows=rows, attended=factor * self.attended, attended_prompt=factor * self.attended_prompt)

    def seconds(self, rows: float) -> float:
        """Without attention."""
        return BlockProfile(seconds=self.rows).at(rows, BASE_CONTEXT)


@dataclass(frozen=True, slots=True)
class Work:
    """A step: its rows, tokens that it gives, and tokens attended to by rows that decode and by rows of prompts, all
    together."""

    rows: float
    tokens: float
    attended: float = 0.0
    attended_prompt: float = 0.0


@dataclass(frozen=True, slots=True)
class Stage:
    """So many blocks that are computed one after the other, as one: layers, and the head if it is among them."""

    count: int
    layers: BlockCosts
    head: BlockCosts | None

    def seconds(self, work: Work) -> float:
        """The head computes no rows but those that give tokens."""
        layers = self.layers
        attention = work.attended * layers.attended + work.attended_prompt * layers.attended_prompt
        return (
            layers.seconds(work.rows)
            + attention
            + (self.head.seconds(work.tokens) if self.head and work.tokens else 0.0)
        )


def _summed(blocks: Sequence[BlockCosts]) -> BlockCosts:
    """All were measured at the same rows."""
    return BlockCosts(
        rows={rows: sum(block.rows[rows] for block in blocks) for rows in blocks[0].rows} if blocks else {1: 0.0},
        attended=sum(block.attended for block in blocks),
        attended_prompt=sum(block.attended_prompt for block in blocks),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds of CPU where nothing else is said.

    Control Redis: `call` for any command (socket, reply, append-only file), and beside it `accept`; `claim` and
    `claim_job` for each job; `commit`, `commit_token` for each token in it and `commit_end` for each request that ends;
    `wake` of a blocked read; `read` of logs, `read_stream` for each that is asked about. `sync` are seconds of CPU,
    once for all that is there when it begins, and `fsync[k]` those of waiting for the disk while k processes of the
    host compute.
    Gateway: `gateway_request` from the socket to the end of its stream, `gateway_read` for an answer of Redis,
    `gateway_read_stream` for each log that it asked about, `gateway_token` for each token.
    Worker: its `blocks`, of which the last is the head, and beside them `part` for each request in a batch, `ask` for
    each CLAIM, whether it brings jobs or none, and `ask_job` for each job; in its other threads `submit` for a commit,
    `submit_token` for each token in it, and `notice` for each request that is accepted: every first worker hears of it.
    A message between two stages: `hop`, and `hop_row` for each row, `hop_part` for each request with rows in it, or
    `hop_job` for each token that the first stage is told; half at each end, and the sender waits until the payload
    Redis has it, which takes a `call` for each command. Of the receiver's half `hop_late` is done behind the delivery.
    `cold` are seconds that a request waits beyond all that before its first token: who works for it has slept.
    The clients, where they are on the same host: `client_request`, `client_token`.
    `wire` are seconds from one process to another that sleeps, beside what that waits while all cores compute.
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
    #: What k processes of one host get done together, as `clock.Host` has it.
    speeds: tuple[float, ...] = (1.0,)
    #: How long a process keeps its core while others wait for one, as `clock.Host` has it.
    turn: float = 0.0
    #: By decode rows, how much longer blocks take while another worker of the host computes the same ones.
    neighbour: Mapping[int, float] = field(default_factory=dict[int, float])

    def beside(self, rows: float) -> float:
        """As `neighbour`, on straight lines between what is there."""
        return BlockProfile(seconds=self.neighbour).at(rows, BASE_CONTEXT) if self.neighbour else 1.0

    def times(self, factor: float) -> "Costs":
        """All that computes so many times; nobody waits longer."""
        computes = {field.name for field in fields(self)} - _WAITS - {"blocks", "neighbour", "speeds"}
        changed = {name: factor * getattr(self, name) for name in computes}
        return replace(self, blocks=tuple(block.times(factor) for block in self.blocks), **changed)

    def stages(self, count: int) -> list[Stage]:
        """The blocks, cut as `blockrelay up --stages` cuts them."""
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
        """For JSON."""
        return asdict(self)

    @classmethod
    def decode(cls, fields: Mapping[str, Any]) -> "Costs":
        """Of what `encode` gave, behind JSON."""

        def block(of: dict[str, Any]) -> BlockCosts:
            rows = {int(rows): seconds for rows, seconds in of["rows"].items()}
            return BlockCosts(rows=rows, attended=of["attended"], attended_prompt=of["attended_prompt"])

        blocks = tuple(block(of) for of in fields["blocks"])
        neighbour = {int(rows): ratio for rows, ratio in fields["neighbour"].items()}
        read: dict[str, Any] = {**fields, "blocks": blocks, "neighbour": neighbour}
        return cls(**read | {name: tuple(fields[name]) for name in ("speeds", "fsync")})
