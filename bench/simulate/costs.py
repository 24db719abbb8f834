"""What things cost: measured seconds, the only facts that the simulator has of a machine. Data."""

from dataclasses import dataclass


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
    #: What k processes of one host get done together, as `clock.Host` has it.
    speeds: tuple[float, ...] = (1.0,)
