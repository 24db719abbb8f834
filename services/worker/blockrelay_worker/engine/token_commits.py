"""Draws tokens from the last stage's logits and hands them to the committer; collects logits of tensor steps."""

import time

import numpy as np

from blockrelay.errors import GrammarEnded
from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay.protocol.messages import Commit
from blockrelay_worker.engine.rows.batch_builder import scored_rows
from blockrelay_worker.engine.rows.commit_builder import draws_of, end_without_token, next_tokens
from blockrelay_worker.engine.run_endings import Endings
from blockrelay_worker.engine.stage_role import StageRole
from blockrelay_worker.execution.selection import LogitRows
from blockrelay_worker.runs.run import Run
from blockrelay_worker.sampling.row_sampler import Sampler
from blockrelay_worker.sampling.sampler import NOTHING_FOLLOWS, Draw
from blockrelay_worker.scheduling.work import Work
from blockrelay_worker.transport.committer import Committer
from blockrelay_worker.transport.stage_sender import StageSender
from blockrelay_worker.transport.tensor_results import TensorResultWriter


class TokenCommits:
    """Turns the logits of a step into commits. Used by the engine thread only."""

    def __init__(
        self,
        role: StageRole,
        sampler: Sampler,
        endings: Endings,
        sender: StageSender,
        committer: Committer,
        results: TensorResultWriter,
        metrics: WorkerMetrics,
    ) -> None:
        self._role, self._sample, self._endings, self._metrics = role, sampler, endings, metrics
        self._sender, self._committer, self._results = sender, committer, results

    def commit(self, parts: list[tuple[Work, LogitRows]], bad: set[str]) -> None:
        """Chooses the next tokens from the wanted logits of each Work and hands them to the committer.

        Requests in `bad` are left out. The logits of a tensor step are collected, and stored once it is complete. Rows
        that score the tokens of a prompt give numbers, which the end of the request has.
        """
        drawn: list[tuple[Work, list[Draw]]] = []
        for item, logits in parts:
            run = item.run
            if run.request_id in bad or run.last is None:
                continue
            if (scores := run.last.scores) is not None and (scored := len(scored_rows(item))):
                scores.add(logits[:scored], self._sample)
                logits = logits[scored:]
            if run.body.logits != "none":
                if len(logits):
                    run.last.logits.append(np.array(logits))
                if item.samples:
                    self._results.submit(run.last.logits, end_without_token(run, self._role))
            elif item.samples and not run.params.max_tokens:
                self._committer.submit([end_without_token(run, self._role)])
            elif item.samples:
                run.forget_from(item.known_end)  # a later stage learned the drafts with their rows
                try:
                    drawn.append((item, draws_of(run, logits, item.tokens[item.rows - item.drafts :])))
                except GrammarEnded as error:
                    self._fail(run, str(error))
        if drawn:
            self._commit_tokens(drawn)

    def _commit_tokens(self, drawn: list[tuple[Work, list[Draw]]]) -> None:
        """Draws the tokens of all runs together, and commits them run by run; a run without a possible token fails."""
        sampled = self._sample([draw for _, draws in drawn for draw in draws])
        commits: list[Commit] = []
        announced: list[tuple[str, Commit]] = []
        generated = end = 0
        for item, draws in drawn:
            run, begin, end = item.run, end, end + len(draws)
            commit = next_tokens(run, item.tokens[item.rows - item.drafts :], sampled[begin:end], self._role)
            if commit is None:
                self._fail(run, NOTHING_FOLLOWS)
                continue
            self._count(run, item.drafts, len(commit.tokens))
            generated += len(commit.tokens)
            commits.append(commit)
            if run.trace is not None:
                run.trace.ready_ns = time.monotonic_ns()  # a worker of the whole model can compute on at once
            if not commit.end and len(run.route) > 1:
                announced.append((run.route[0], commit))
        if announced:
            self._sender.announce(announced)
        self._committer.submit(commits)
        self._metrics.generation_tokens.inc(generated)

    def _fail(self, run: Run, message: str) -> None:
        self._endings.fail(run, message, "execution_error", f"block_{self._role.last}")

    def _count(self, run: Run, drafts: int, tokens: int) -> None:
        if run.first is not None:
            run.first.token_came(self._metrics.prefill_time)
        if drafts:
            self._metrics.draft_tokens.inc(drafts)
            self._metrics.accepted_tokens.inc(tokens - 1)
            if run.first is not None:
                run.first.judge(drafts, tokens - 1)
