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
    fsync: tuple[float, ...]
    turn: float
    speeds: tuple[float, ...]
    neighbour: Mapping[int, float]
    read_stream: float
    gateway_read_stream: float
    idle: Mapping[str, float]


def fitted(counted: Sequence[Counted], staged: Sequence[Counted], alone: Alone) -> Costs:
    """Of one worker under several loads of clients: each kind of process is fitted by itself, its seconds of CPU, less
    those of an idle system, over what it did. And of two stages with one client and with several (`staged`): there
    engines sleep between messages, and what that costs is more than what a message costs in a loop."""

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
        [cpu(one, "gateway") - one.reads * one.load.clients * alone.gateway_read_stream for one in counted],
    )
    # Blocks in a system take a share more or less than alone: other code has been in the caches, and clocks drift.
    whole = Costs(blocks=alone.blocks).stages(1)
    pace, part, ask, ask_job = least(
        [(_blocks_s(one, whole), one.tokens, one.scripts["claim"], one.requests) for one in counted],
        [cpu(one, "engine") for one in counted],
    )
    blocks = tuple(block.times(pace) for block in alone.blocks)
    submit, submit_token, notice = least(
        list(zip(commits, tokens, requests, strict=True)), [cpu(one, "beside") for one in counted]
    )
    client_request, client_token = least(
        [(one.requests, one.tokens) for one in counted], [one.cpu["client"] for one in counted]
    )
    reads = sum(one.reads for one in counted)
    followed = sum(one.reads * one.load.clients for one in counted)

    def left_of(one: Counted) -> float:
        """Seconds of both workers, at both ends, for messages, and for each request that has rows in one."""
        rows = one.tokens / (one.steps / 2)
        busy = cpu(one, "engine") / 2 / one.seconds  # so likely does the neighbour compute too
        beside = 1 + min(1.0, busy) * (Costs(blocks=blocks, neighbour=alone.neighbour).beside(rows) - 1)
        asked = ask * one.scripts["claim"] + ask_job * one.requests
        computed = _blocks_s(one, Costs(blocks=blocks).stages(2)) * beside
        committed = submit * one.scripts["commit"] + submit_token * one.tokens + notice * one.requests
        return cpu(one, "engine") + cpu(one, "beside") - computed - asked - part * 2 * one.tokens - committed

    few, many = staged
    message = max(alone.hop.message, left_of(few) / few.steps)
    hop_part = max(alone.hop.part, (left_of(many) - message * many.steps) / many.tokens)
    return Costs(
        blocks=blocks,
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
        part=part,
        ask=ask,
        ask_job=ask_job,
        submit=submit,
        submit_token=submit_token,
        notice=notice,
        hop=message,
        hop_row=alone.hop.row,
        hop_part=hop_part,
        hop_job=alone.hop.job,
        client_request=client_request,
        client_token=client_token,
        wire=counted[0].core_wait_s,
        speeds=alone.speeds,
        turn=alone.turn,
        neighbour=alone.neighbour,
    )


def _blocks_s(one: Counted, stages: Sequence[Stage]) -> float:
    """Seconds in blocks, where each batch passes these stages: of batches with rows of prompts, one for each request if
    there are as many, and of those that decode alone. Batches of both kinds carry as many that decode: a block's cost
    bends with its rows, so the mean of all batches would say too little."""
    batches = one.steps / len(stages)
    prompts = min(one.requests, batches)
    behind, prompt = one.tokens / one.requests / 2, one.prompt_rows / one.requests
    decode = (one.tokens - one.requests) / batches
    rows, firsts = one.prompt_rows / prompts, one.requests / prompts
    with_prompts = Work(decode + rows, decode + firsts, decode * (prompt + behind), rows * prompt / 2)
    if decode < 1:  # not every batch decodes: one client's prompts are alone
        decode = (one.tokens - one.requests) / max(1.0, batches - prompts)
        with_prompts = Work(rows, firsts, 0.0, rows * prompt / 2)
    alone = Work(decode, decode, decode * (prompt + behind))
    return sum(prompts * stage.seconds(with_prompts) + (batches - prompts) * stage.seconds(alone) for stage in stages)
