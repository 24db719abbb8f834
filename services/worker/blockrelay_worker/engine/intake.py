"""Creates the runs of a worker: from CLAIM in the first stage, from their first rows in later stages."""

import time
from typing import Any, cast

from blockrelay.block_folder.model import ModelConfig
from blockrelay.errors import WireError
from blockrelay.observability.logs import get
from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay.protocol.encoding.forward_segment import ForwardSegment
from blockrelay.protocol.messages import Claimed, Forward, NextJob, RequestBody, TokenEntry
from blockrelay.protocol.records.ended import decode_log
from blockrelay.protocol.sampling_params import SamplingParams, derive_seed
from blockrelay.protocol.transitions import calls
from blockrelay.text.grammars import grammars_of
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_worker.engine.stage_role import StageRole
from blockrelay_worker.kernels.specification import PAGE
from blockrelay_worker.kv.run_table import RunTable
from blockrelay_worker.runs.run import FirstStageState, LastStageState, LaterStageState, Run, RunTrace
from blockrelay_worker.sampling.prompt_scores import PromptScores
from blockrelay_worker.sampling.stop_conditions import Progress, advance
from blockrelay_worker.scheduling.later_stage import Refusal
from blockrelay_worker.transport.redis_links import Links


class Intake:
    """Creates runs and puts them into the run table. Used by the engine thread only."""

    def __init__(
        self,
        role: StageRole,
        model: ModelConfig,
        tokenizer: Tokenizer | None,
        links: Links,
        table: RunTable,
        metrics: WorkerMetrics,
    ) -> None:
        """`tokenizer` finds stop strings and reads grammars; None if no request has any."""
        self._role, self._model, self._tokenizer = role, model, tokenizer
        self._links, self._table, self._prefill_time = links, table, metrics.prefill_time
        self._grammars = grammars_of(tokenizer, model) if role.first_stage or role.last_stage else None
        if self._grammars is not None:
            self._grammars.prepare()

    @property
    def grammar_id(self) -> str:
        """The id of the grammars that are read here; "": none are."""
        return "" if self._grammars is None else self._grammars.id

    def claimed(self, job: Claimed) -> Run:
        """Creates the run of a claimed job, with the KV pages that the prefix cache has for its first tokens.

        Raises WireError when the body does not decode; then the table has no new run.
        """
        body = job.body
        run = self._new_run(
            job.request_id,
            job.run_id,
            job.route,
            body,
            job.tokens,
            quarantined=job.quarantined,
            reusable_limit=job.reusable,
            deadline=None if job.left_s is None else time.monotonic() + job.left_s,
            reruns=job.reruns,
            private=job.private,
        )
        self._table.add(run)
        self._table.attach_prefix(run)
        get().info(
            "RUN_START",
            request_id=job.request_id,
            traceparent=body.traceparent or None,
            run=job.run_id,
            route=job.route,
            prompt_tokens=run.prompt_length,
            committed=len(job.tokens),
            found=run.computed,
        )
        return run

    def next_job(self, message: NextJob) -> bool:
        """Adds committed tokens to a run of the first stage; those that it has are skipped.

        Returns False if tokens before them are missing: the run then needs RERUN. True also if the run has ended.
        """
        run = self._table.get(message.request_id, message.run_id)
        if run is None:
            return True  # the run ended meanwhile
        committed = len(run.tokens) - run.prompt_length
        if message.position > committed:
            return False
        new_tokens = message.tokens[committed - message.position :]
        if run.trace is not None and new_tokens:
            run.trace.ready_ns = message.received_ns
        run.learn(new_tokens)
        if new_tokens and run.first is not None:
            run.first.token_came(self._prefill_time)
        return True

    def segment(self, segment: ForwardSegment, message: Forward) -> Run | Refusal:
        """Returns the run that a segment of `message` belongs to, with KV pages for its rows; or why there is none.

        "drop": the run is not current, has ended, or the message came before. "rerun": an earlier message or a KV
        page is missing, or the rows lie in a published page. "later": the page store is loading the pages before these
        rows; or the pages that were reserved for them are still held by runs whose end is not known here yet. For later
        stages only. If the request's record cannot be decoded,
        the request ends with an error: "drop". Waits for Redis if the run is not in the table; raises Stopping when the
        process should end meanwhile.
        """
        run = self._table.get(segment.request_id, segment.run_id)
        if run is None:
            if segment.sequence != 0:
                return "rerun" if self._is_current(segment) else "drop"
            run = self._first_sight(segment)
            if run is None:
                return "drop"
        if run.later is None or segment.sequence < run.later.expected or run.ended:
            return "drop"
        if run.kv.loading:
            return "later"
        end = segment.position + len(segment.token_ids)
        if segment.sequence > run.later.expected or segment.position > run.computed:
            return "rerun"
        if segment.position < run.kv.published * PAGE:
            return "rerun"
        if not self._table.grow(run, end):
            return "later"
        run.receive(segment.position, segment.token_ids)
        run.later.expected += 1
        run.later.block_seconds, run.later.gpu_blocks = message.block_seconds, message.gpu_blocks
        if run.trace is not None:
            run.trace.ready_ns = message.received_ns
        return run

    def reusable(self, segment: ForwardSegment) -> int | None:
        """How many leading tokens of a refused segment's run have their KV pages here.

        None unless the segment is the run's first one and was refused because pages before it are missing.
        """
        run = self._table.get(segment.request_id, segment.run_id)
        return run.computed if run is not None and segment.sequence == 0 and segment.position > run.computed else None

    def _is_current(self, segment: ForwardSegment) -> bool:
        current = self._links.retry_until_reachable(
            lambda: self._links.control.hget(self._links.keys.request(segment.request_id), "run"), "read request"
        )
        return cast(bytes | None, current) == segment.run_id.encode()

    def _first_sight(self, segment: ForwardSegment) -> Run | None:
        """Creates the run of a first segment from the request's record and log, read in one transaction.

        None if another run is current, or if body or log cannot be decoded: then the request ends with an error.
        """
        keys, request_id = self._links.keys, segment.request_id

        def read() -> Any:
            pipeline = self._links.control.pipeline(transaction=True)
            pipeline.hmget(keys.request(request_id), "run", "route", "body", "quarantined", "reruns", "private")
            pipeline.xrange(keys.log(request_id))
            return pipeline.execute()

        (current, route, body, solo, reruns, private), log = self._links.retry_until_reachable(read, "read request")
        if current is None or current.decode() != segment.run_id:
            return None
        try:
            entries = decode_log(log)
            decoded = RequestBody.decode(body)
        except WireError as error:
            get().error("REQUEST_REFUSED", request_id=request_id, error=str(error))
            meta = {"error": str(error), "code": "wire"}
            self._links.run_until_reachable(calls.finish(request_id, "error", meta=meta, run_id=segment.run_id))
            return None
        committed = tuple(e.token for e in entries if isinstance(e, TokenEntry))
        run = self._new_run(
            request_id,
            segment.run_id,
            tuple(route.decode().split(",")),
            decoded,
            committed,
            quarantined=solo == b"1",
            reruns=int(reruns or 0),
            private=private == b"1",
        )
        self._table.add(run)
        # The first stage reuses the pages before its first row; this stage must have them too.
        if 0 < segment.position <= run.reusable:
            self._table.attach_prefix(run, exactly=segment.position)
        run.forget_from(segment.position)  # later stages learn them with the rows
        return run

    def _new_run(
        self,
        request_id: str,
        run_id: str,
        route: tuple[str, ...],
        body: RequestBody,
        committed: tuple[int, ...],
        *,
        quarantined: bool,
        reusable_limit: int | None = None,
        deadline: float | None = None,
        reruns: int = 0,
        private: bool = False,
    ) -> Run:
        """Builds the run of a request from its decoded record. Decides which state it has in this stage."""
        params = SamplingParams.from_dict(body.params)
        progress = grammar = None
        if params.grammar and (self._role.first_stage or self._role.last_stage):
            if self._grammars is None:
                raise WireError("the request has a grammar, and this worker reads none")
            grammar = self._grammars.follow(params.grammar)
        if self._role.last_stage and body.logits == "none":
            progress = Progress(
                params,
                prompt=body.prompt,
                context=self._model.max_position,
                eos_ids=tuple(self._model.eos_ids),
                tokenizer=self._tokenizer,
                grammar=grammar,
                shown=body.shown,
            )
            for token in committed:
                advance(progress, token)
        tokens = [*body.prompt.tolist(), *committed]
        last = None
        if self._role.last_stage:
            known_before = len(tokens) if reruns else None
            listed, vocabulary = params.prompt_logprobs, self._model.vocab_size
            scores = None if listed is None else PromptScores(body.prompt, listed, vocab_size=vocabulary)
            last = LastStageState(progress=progress, scores=scores, committed=len(committed), known_before=known_before)
        return Run(
            request_id=request_id,
            run_id=run_id,
            route=route,
            body=body,
            params=params,
            seed=params.seed if params.seed is not None else derive_seed(request_id),
            context=self._model.max_position,
            quarantined_until=len(tokens) if quarantined else 0,
            reusable_limit=reusable_limit if params.use_cache else 0,
            reruns=reruns,
            private=private or body.kv_given > 0,  # no other request may use KV that a client supplied
            may_draft=not private or self._role.inexact_sharing,
            deadline=deadline,
            known=tokens,
            first=FirstStageState(grammar=grammar) if self._role.first_stage else None,
            later=None if self._role.first_stage else LaterStageState(),
            last=last,
            trace=RunTrace(run=reruns + 1, ready_ns=time.monotonic_ns()) if body.traced else None,
        )
