"""Fits the costs to the counts of real systems. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.simulate.costs import BlockCosts, Costs, Stage, Work
from bench.simulate.measured.counting import Counted
from bench.simulate.measured.hops import HopCosts
from bench.simulate.measured.least_squares import least


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """The costs that were measured alone, without a load on a system; fields have the meanings of those of `Costs`."""

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
    """Seconds of CPU per second of a system without requests, by kind of process."""


def fitted(counted: Sequence[Counted], staged: Sequence[Counted], alone: Alone) -> Costs:
    """Returns the costs that fit the counts.

    `counted` are several loads on one worker. Each kind of process is fitted by itself: its seconds of CPU, less those
    of an idle system, to the amounts of its work. `staged` are two loads on two stages, with one client and with
    several, from which the costs of messages come: engines sleep between messages there, and so a message costs more
    than one of many in a loop.
    """

    def cpu(one: Counted, kind: str) -> float:
        """Returns the seconds of CPU of a kind of process, without those of an idle system."""
        return one.cpu[kind] - alone.idle.get(kind, 0.0) * one.seconds

    def calls(name: str) -> list[int]:
        return [one.scripts[name] for one in counted]

    requests, tokens = [one.requests for one in counted], [one.tokens for one in counted]
    commits, claims = calls("commit"), calls("claim")
    script_s = {name: [one.script_s[name] for one in counted] for name in ("accept", "claim", "commit")}
    commit, commit_token, commit_end = least(list(zip(commits, tokens, requests, strict=True)), script_s["commit"])
    claim, claim_job = least(list(zip(claims, requests, strict=True)), script_s["claim"])

    # The CPU of Redis outside its commands: a share for each command that a client sends, and one for each sync.
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
    # Blocks in a system take a little more or less time than alone: other code uses the caches, and clock rates drift.
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
        """Returns the seconds of CPU that both workers have left for messages, after all other known work."""
        rows = one.tokens / (one.steps / 2)
        busy = cpu(one, "engine") / 2 / one.seconds  # the probability that the neighbour computes too
        beside = 1 + min(1.0, busy) * (Costs(blocks=blocks, neighbour=alone.neighbour).beside(rows) - 1)
        claiming = ask * one.scripts["claim"] + ask_job * one.requests
        computing = _blocks_s(one, Costs(blocks=blocks).stages(2)) * beside
        committing = submit * one.scripts["commit"] + submit_token * one.tokens + notice * one.requests
        return cpu(one, "engine") + cpu(one, "beside") - computing - claiming - part * 2 * one.tokens - committing

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
    """Returns the seconds of CPU in blocks, where each batch passes all `stages`.

    There are two kinds of batches: those with rows of prompts (one for each request, if there are as many batches), and
    those that only decode. Both have the same number of decode rows. They are computed apart, because a block's seconds
    are not linear in its rows, and so the mean batch would give too few.
    """
    batches = one.steps / len(stages)
    prompts = min(one.requests, batches)
    behind, prompt = one.tokens / one.requests / 2, one.prompt_rows / one.requests
    decode = (one.tokens - one.requests) / batches
    rows, firsts = one.prompt_rows / prompts, one.requests / prompts
    with_prompts = Work(decode + rows, decode + firsts, decode * (prompt + behind), rows * prompt / 2)
    if decode < 1:  # with one client, no request decodes in the batch of a prompt
        decode = (one.tokens - one.requests) / max(1.0, batches - prompts)
        with_prompts = Work(rows, firsts, 0.0, rows * prompt / 2)
    alone = Work(decode, decode, decode * (prompt + behind))
    return sum(prompts * stage.seconds(with_prompts) + (batches - prompts) * stage.seconds(alone) for stage in stages)
