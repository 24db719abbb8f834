"""From what was counted on a real system to costs. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.simulate.costs import BlockCosts, Costs, Stage, Work
from bench.simulate.measured.counting import Counted
from bench.simulate.measured.hops import HopCosts
from bench.simulate.measured.least_squares import least


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """What was measured without a system. `idle`: seconds of CPU per second of a system without requests, by kind."""

    blocks: tuple[BlockCosts, ...]
    hop: HopCosts
    sync: float
    fsync: float
    wire: float
    speeds: tuple[float, ...]
    neighbour: Mapping[int, float]
    read_stream: float
    gateway_read_stream: float
    idle: Mapping[str, float]


def fitted(counted: Sequence[Counted], staged: Counted, alone: Alone) -> Costs:
    """Of one worker under several loads of clients: each kind of process is fitted by itself, its seconds of CPU, less
    those of an idle system, over what it did. And of two stages with one client (`staged`): there engines sleep between
    messages, and what that costs is more than what a message costs in a loop."""

    def cpu(one: Counted, kind: str) -> float:
        return one.cpu[kind] - alone.idle.get(kind, 0.0) * one.seconds

    def calls(name: str) -> list[int]:
        return [one.scripts[name] for one in counted]

    requests, tokens = [one.requests for one in counted], [one.tokens for one in counted]
    commits, claims = calls("commit"), calls("claim")
    script_s = {name: [one.script_s[name] for one in counted] for name in ("accept", "claim", "commit")}
    commit, commit_token, commit_end = least(list(zip(commits, tokens, requests, strict=True)), script_s["commit"])
    claim, claim_job = least(list(zip(claims, requests, strict=True)), script_s["claim"])

    # What Redis computes beside its commands: one more or less for each that a client sends, and one for each sync.
    commands = [sum(one.scripts.values()) + one.reads + 2 * one.requests for one in counted]
    syncs = [n + 2 * r for n, r in zip(commits, requests, strict=True)]
    beside = [
        cpu(one, "control Redis") - sum(one.script_s.values()) - one.reads_s - one.requests * one.wake_s
        for one in counted
    ]
    left = [max(0.0, s - n * alone.sync) for s, n in zip(beside, syncs, strict=True)]

    request, read, token = least(
        [(one.requests, one.reads, one.tokens) for one in counted],
        [cpu(one, "gateway") - one.reads * one.clients * alone.gateway_read_stream for one in counted],
    )
    whole = Costs(blocks=alone.blocks).stages(1)[0]
    step, part, ask = least(
        [(one.steps, one.tokens, one.scripts["claim"]) for one in counted],
        [max(1e-6, cpu(one, "engine") - one.steps * _block_s(one, whole)) for one in counted],
    )
    submit, submit_token, notice = least(
        list(zip(commits, tokens, requests, strict=True)), [cpu(one, "beside") for one in counted]
    )
    client_request, client_token = least(
        [(one.requests, one.tokens) for one in counted], [one.cpu["client"] for one in counted]
    )
    reads = sum(one.reads for one in counted)
    followed = sum(one.reads * one.clients for one in counted)
    blocks_s = sum(stage.seconds(_mean_step(staged, 2)) for stage in Costs(blocks=alone.blocks).stages(2)) / 2
    each = cpu(staged, "engine") / staged.steps - blocks_s - step - part
    message = max(alone.hop.message, 2 * (each - ask * staged.scripts["claim"] / staged.steps))
    return Costs(
        blocks=alone.blocks,
        call=sum(left) / sum(commands),
        accept=sum(script_s["accept"]) / sum(calls("accept")),
        claim=claim,
        claim_job=claim_job,
        commit=commit,
        commit_token=commit_token,
        commit_end=commit_end,
        wake=sum(one.wake_s for one in counted) / len(counted),
        read=max(0.0, sum(one.reads_s for one in counted) - followed * alone.read_stream) / reads,
        read_stream=alone.read_stream,
        sync=alone.sync,
        fsync=alone.fsync,
        gateway_request=request,
        gateway_read=read,
        gateway_read_stream=alone.gateway_read_stream,
        gateway_token=token,
        step=step,
        part=part,
        ask=ask,
        submit=submit,
        submit_token=submit_token,
        notice=notice,
        hop=message,
        hop_row=alone.hop.row,
        hop_part=alone.hop.part,
        hop_job=alone.hop.job,
        client_request=client_request,
        client_token=client_token,
        wire=alone.wire,
        speeds=alone.speeds,
        neighbour=alone.neighbour,
    )


def _block_s(one: Counted, whole: Stage) -> float:
    """Of the mean step."""
    return whole.seconds(_mean_step(one))


def _mean_step(one: Counted, stages: int = 1) -> Work:
    """What a batch has, where each passes so many stages."""
    decoded, prompt, batches = one.tokens - one.requests, one.prompt_rows / one.requests, one.steps / stages
    attended = decoded * (prompt + one.tokens / one.requests / 2)
    work = (decoded + one.prompt_rows, one.tokens, attended, one.prompt_rows * prompt / 2)
    return Work(*(each / batches for each in work))
