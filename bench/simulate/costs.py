"""What things cost: measured seconds and bytes, the only facts that the simulator has of a machine. Data."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from blockrelay.planning.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Seconds of a step of all blocks: `alone` for any, more for each row that decodes, each of a prompt, and each
    token that these attend to. A straight line through what was measured."""

    alone: float
    decode_row: float
    prompt_row: float
    attended: float = 0.0

    def seconds(self, decode_rows: int, prompt_rows: int, attended: float) -> float:
        """Of a step with so many rows, which attend to `attended` tokens, all together."""
        rows = decode_rows * self.decode_row + prompt_rows * self.prompt_row
        return self.alone + rows + attended * self.attended


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds of CPU where nothing else is said.

    Control Redis, for each call: `accept`, `claim` (an idle look) and `claim_job` for each job, `commit` and
    `commit_token` for each token in it. `fsync` is the disk's, once for all that is waiting when it begins.
    Gateway: `gateway_request` from the socket to ACCEPT and back, `gateway_token` for each token of a stream.
    Worker, beside its blocks: `step` for a batch and `row` for each row of it. `hop` is what a message between two
    workers takes on its way, `hop_row` more for each row. `wire` is one way between two processes of a host.
    Bytes: `kv_token` of all blocks; `record` of a request in the control Redis, `log_token`,
    and `stream_token` to a client.
    """

    blocks: StepCosts
    accept: float
    claim: float
    claim_job: float
    commit: float
    commit_token: float
    fsync: float
    gateway_request: float
    gateway_token: float
    step: float
    row: float
    hop: float
    hop_row: float
    wire: float
    kv_token: int
    record: int
    log_token: int
    stream_token: int
    #: What k processes of one host get done together, as `clock.Host` has it.
    speeds: tuple[float, ...] = (1.0,)
    measured: dict[str, Any] = field(default_factory=dict[str, Any])

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, path: Path) -> "Costs":
        content: dict[str, Any] = json.loads(path.read_text())
        content["blocks"], content["speeds"] = StepCosts(**content["blocks"]), tuple(content["speeds"])
        return cls(**content)


def of_profile(profile: Profile, device: str = "CPU") -> StepCosts:
    """The straight line through a profile of all blocks: one row, sixteen, and sixteen that attend to more."""

    def model(rows: int, context: float) -> float:
        return sum(classes[device].at(rows, context) for classes in profile.blocks.values())

    row = (model(16, 128) - model(1, 128)) / 15
    attended = max(0.0, (model(16, 1024) - model(16, 128)) / (16 * (1024 - 128)))
    alone = model(1, 128) - row
    return StepCosts(alone=alone, decode_row=row - 128 * attended, prompt_row=row - 128 * attended, attended=attended)
