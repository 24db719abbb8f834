"""Reports about the batches of a step: to traces of requests, and to readers of status events."""

import time
from dataclasses import replace

from blockrelay.protocol.encoding.stage_span import StageSpan
from blockrelay.protocol.status_events import Moment, NodeStatus, Shard
from blockrelay_worker.engine.rows.batch_builder import split, wanted_rows
from blockrelay_worker.engine.stage_role import StageRole
from blockrelay_worker.execution.batch import StageOutput
from blockrelay_worker.execution.selection import Largest
from blockrelay_worker.scheduling.work import Work
from blockrelay_worker.transport.redis_links import Links
from blockrelay_worker.transport.stage_spans import StageSpans
from blockrelay_worker.transport.status_events import StatusEventPublisher


class StepReports:
    """Reports when a batch begins and ends. Used by the engine thread only; waits for nothing but in `close`.

    Two threads, which write the reports, run from `start` to `close`; call each once. `model` is the model's name.
    """

    def __init__(self, role: StageRole, links: Links, model: str) -> None:
        self._role, self._shard = role, Shard.of_blocks(model, role.first, role.last, role.blocks)
        self._status_events, self._stage_spans = StatusEventPublisher(links), StageSpans(links)

    def start(self) -> None:
        """Starts the threads."""
        self._status_events.start()
        self._stage_spans.start()

    def close(self) -> None:
        """Writes what waits and ends the threads; does not wait longer than 2 s if Redis does not answer."""
        self._status_events.close()
        self._stage_spans.close()

    def tell_start(self, work: list[Work]) -> None:
        """Reports the start of a batch to readers of status events."""
        if self._status_events.has_subscribers:
            self._status_events.put([self._status(item, "start") for item in work])

    def tell_end(self, work: list[Work], began_ns: int, output: StageOutput | None) -> None:
        """Reports the end of a batch to traces and to readers of status events. `output` None: the batch failed.

        `began_ns`: when the batch was taken, in nanoseconds of the monotonic clock.
        """
        if traced := [item for item in work if item.run.trace is not None]:
            self._trace(traced, sum(item.rows for item in work), began_ns, time.monotonic_ns())
        if not self._status_events.has_subscribers:
            return
        elapsed_ns = time.monotonic_ns() - began_ns
        counts = [len(wanted_rows(item)) for item in work]
        chosen = [] if output is None or output.rows is None else split(work, output.rows, counts)
        ended: list[NodeStatus] = []
        for index, item in enumerate(work):
            size = 0
            if output is not None and output.logits is not None:
                size = len(wanted_rows(item)) * output.logits.shape[1]
            elif chosen:
                size = sum(row.ids.size if isinstance(row, Largest) else row.size for row in chosen[index][1])
            elif output is not None and output.hidden is not None:
                size = item.rows * output.hidden.shape[1]
            elif output is not None and output.tensors is not None:
                size = sum(array.size for part in output.tensors[index] for array in part.arrays.values())
            ended.append(replace(self._status(item, "end"), elapsed_ns=elapsed_ns, result_size=size))
        self._status_events.put(ended)

    def _trace(self, traced: list[Work], batch_rows: int, began_ns: int, ended_ns: int) -> None:
        role = self._role
        for item in traced:
            trace = item.run.trace
            assert trace is not None
            ready_ns = min(trace.ready_ns, began_ns)
            span = StageSpan(
                run=trace.run,
                worker_id=role.worker_id,
                stage=role.stage,
                first=role.first,
                last=role.last,
                number=trace.steps,
                kind="decode" if item.decodes else "prefill",
                position=item.position,
                rows=item.rows,
                batch_rows=batch_rows,
                ready_us=ready_ns // 1000,
                waited_us=began_ns // 1000 - ready_ns // 1000,
                computed_us=ended_ns // 1000 - began_ns // 1000,
            )
            trace.steps += 1
            trace.ready_ns = ended_ns
            self._stage_spans.put(item.run.request_id, span)

    def _status(self, item: Work, moment: Moment) -> NodeStatus:
        run = item.run
        return NodeStatus(
            node=self._role.worker_id,
            moment=moment,
            prompt=self._role.first_stage and item.position < run.prompt_length,
            shard=self._shard,
            request_id=run.request_id,
            position=item.position,
            rows=item.rows,
            prompt_tokens=run.prompt_length,
        )
