"""Builds draws from logits, and commits from what they give: the last stage. Pure but for the run that it advances."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.errors import GrammarEnded
from blockrelay.protocol.encoding.end_meta import encode_end_meta
from blockrelay.protocol.messages import Commit, TokenLogprobs
from blockrelay.text.grammars import GrammarState
from blockrelay_worker.engine.stage_role import StageRole
from blockrelay_worker.execution.selection import Largest, LogitRows
from blockrelay_worker.runs.run import Run
from blockrelay_worker.sampling.logit_changes import TokenCounts, changes_of
from blockrelay_worker.sampling.sampler import NO_TOKEN, Draw, Sampled
from blockrelay_worker.sampling.stop_conditions import FinishReason, advance


def draws_of(run: Run, logits: LogitRows, drafts: Sequence[int]) -> list[Draw]:
    """Returns the draws of the token after `run.tokens`, and of those behind each of `drafts`.

    `logits` has a row for each of them. A request that changes logits sees the drafts before a row as its tokens.
    Raises GrammarEnded if the request has a grammar by which nothing can follow.
    """
    length = len(run.tokens)
    if not run.params.changes_logits:
        return [Draw(row, run.params, run.seed, length + i) for i, row in enumerate(logits)]
    last = run.last
    assert last is not None and last.progress is not None, "it generates tokens"
    masks = _masks(last.progress.grammar, drafts)
    # No mask: the draft before was not allowed, so nothing behind it counts.
    allowed = [masks[i] if i < len(masks) else None for i in range(len(logits))]
    if not run.params.edits_logits:
        rows = zip(logits, allowed, strict=True)
        return [Draw(row, run.params, run.seed, length + i, None, mask) for i, (row, mask) in enumerate(rows)]
    if last.counts is None or last.counts.length > length:
        last.counts = TokenCounts(run.tokens, run.prompt_length)
    counts = last.counts
    counts.add(run.tokens[counts.length :])
    tokens, draws = list(run.tokens), list[Draw]()
    for i, row in enumerate(logits):
        assert not isinstance(row, Largest), "this draw needs the whole row"
        changes = changes_of(row, run.params, counts, tokens, last.progress.end_ids)
        draws.append(Draw(row, run.params, run.seed, length + i, changes, allowed[i]))
        counts.add(drafts[i : i + 1])
        tokens += drafts[i : i + 1]
    counts.take_back(drafts[: len(logits)])
    return draws


def _masks(grammar: GrammarState | None, drafts: Sequence[int]) -> list[NDArray[np.uint32]]:
    """Returns the masks of a request with a grammar; [] for any other. Raises GrammarEnded if nothing can follow."""
    if grammar is None:
        return []
    if masks := grammar.masks(drafts):
        return masks
    raise GrammarEnded(f"nothing can follow by the grammar: {grammar.error}")


def next_tokens(run: Run, drafts: Sequence[int], sampled: Sequence[Sampled], role: StageRole) -> Commit | None:
    """Adds the token after `run.tokens` to it, and one more after each draft that was right; returns their commit.

    None: no token is allowed to follow, and nothing was changed. Behind a right draft that ends the commit.

    `sampled` are the 1 + len(drafts) results of `draws_of`: behind the last known token and behind each draft. The one
    behind a draft counts only if that draft was chosen, so tokens are those of a step without drafts. Changes `run`:
    its tokens and what follows from them, `ended` included. `run.tokens` has no drafts (`Run.forget_from`). The run
    generates tokens (it is no tensor step) and has not ended.
    """
    last = run.last
    assert last is not None and last.progress is not None and not run.ended
    position, tokens = last.committed, list[int]()
    logprobs: list[str] = []
    end: FinishReason | None = None
    for one, draft in zip_longest(sampled, drafts):
        if one.token == NO_TOKEN:
            break
        tokens.append(one.token)
        if one.logprob is not None:
            logprobs.append(TokenLogprobs(one.logprob, one.top).encode())
        end = advance(last.progress, one.token)
        if end is not None or one.token != draft:
            break
    if not tokens:
        return None
    run.commit(tokens)
    run.ended = end is not None
    known, last.known_before = last.known_before, None
    return Commit(
        request_id=run.request_id,
        run_id=run.run_id,
        position=position,
        tokens=tuple(tokens),
        logprobs=tuple(logprobs),
        end=end or "",
        meta=end_meta(run, role) if end else "",
        rows=None if known is None else max(0, known - 1 - run.kv.cached),  # the last token's row is new work
    )


def end_without_token(run: Run, role: StageRole) -> Commit:
    """The commit that ends a tensor step, or a request for 0 tokens. Sets `run.ended`.

    It has no token. Store the result of a tensor step on the payload Redis before it is committed.
    """
    run.ended, end = True, "length" if run.body.logits == "none" else "tensor"
    return Commit(
        request_id=run.request_id, run_id=run.run_id, position=0, tokens=(), end=end, meta=end_meta(run, role)
    )


def end_meta(run: Run, role: StageRole) -> str:
    """The metadata of the log's last entry, encoded: block times, GPU blocks, route, seed and reused prompt tokens.

    With ONNX blocks of other makers also this worker's figures about its sessions, and with `prompt_logprobs` the log
    probabilities of the prompt's tokens.
    """
    meta: dict[str, Any] = {
        "execution_times": {} if run.last is None else run.last.block_seconds(),
        "gpu_blocks": list(run.gpu_blocks_before + role.gpu_blocks),
        "route": list(run.route),
        "seed": run.seed,
        "cached_tokens": min(run.kv.cached, run.prompt_length),
    }
    if run.last is not None and run.last.sessions:
        meta["warm_sessions"] = {name: round(value, 3) for name, value in run.last.sessions.items()}
    if run.last is not None and run.last.scores is not None:
        meta["prompt_logprobs"] = run.last.scores.encode()
    return encode_end_meta(meta)
