"""Builds the answers of /v1/infer. Pure."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from blockrelay.errors import BlockrelayError
from blockrelay.protocol.messages import EndEntry
from blockrelay.protocol.plan import GPU
from blockrelay.protocol.tensors import base64_pieces
from blockrelay_gateway.api.openai.responses import in_force, usage
from blockrelay_gateway.http.errors import infer_error, to_json
from blockrelay_gateway.streaming.active_requests.active_request import ActiveRequest
from blockrelay_gateway.streaming.deltas import CollectedAnswer, Delta, finish_reason
from blockrelay_gateway.streaming.responses import ResponseFormat


def execution(*ends: EndEntry) -> dict[str, Any]:
    """Returns execution_times (seconds), execution_stats and fallback_events, from the terminal entry of each row.

    Rows share batches, so a block's time is the largest of all rows. The counts of executed blocks add up all steps of
    a request; rows are executed together, so the largest count of a row stands for all, for GPUs and CPUs apart.
    `warm_sessions` is there for ONNX blocks made by others: the sessions that their worker has made and run so far.
    """
    times: dict[str, float] = {}
    for end in ends:
        for block, seconds in (end.meta.get("execution_times") or {}).items():
            times[block] = max(seconds, times.get(block, 0.0))
    sessions: dict[str, float] = next((m for end in reversed(ends) if (m := end.meta.get("warm_sessions"))), {})
    executed = [end.executed or (0, 0) for end in ends]
    fallbacks = [event for end in ends for event in end.fallbacks]
    return {
        "execution_times": times,
        "execution_stats": {
            "gpu_blocks_executed": max((on_gpus for on_gpus, _ in executed), default=0),
            "cpu_blocks_executed": max((on_cpus for _, on_cpus in executed), default=0),
            "total_fallbacks": len(fallbacks),
            "successful_fallbacks": sum(event.success for event in fallbacks),
            "avg_block_time": round(sum(times.values()) / len(times), 6) if times else 0.0,
            "cached_tokens": sum(end.meta.get("cached_tokens") or 0 for end in ends),
            **({"warm_sessions": sessions} if sessions else {}),
        },
        "fallback_events": [event.to_json() for event in fallbacks],
    }


def tensor_success(
    tensors: Mapping[str, NDArray[Any]],
    ends: Sequence[EndEntry],
    *,
    session_id: str | None,
    step: int,
    seconds: float,
    **more: Any,
) -> dict[str, Any]:
    """The answer to a tensor step whose rows ended with `ends`; `seconds` is the time since its acceptance.

    `more` has further fields, those of `execution`. The data of its tensors is empty: `TensorAnswer` fills it in while
    it is sent.
    """
    return {
        "status": "success",
        "message": "Pipeline completed successfully",
        "session_id": session_id,
        "step": step,
        "outputs": {
            name: {"_tensor_": True, "dtype": tensor.dtype.name, "shape": list(tensor.shape), "data_b64": ""}
            for name, tensor in tensors.items()
        },
        "total_pipeline_time": round(seconds, 6),
        "system_fingerprint": ",".join(dict.fromkeys(end.numerics for end in ends if end.numerics)) or None,
        **more,
    }


class TensorAnswer:
    """The JSON of `body` (of `tensor_success`) with the data of its tensors, which are encoded while they are sent.

    So the text of hundreds of megabytes is never in memory, and encoding it holds up no other request.
    """

    def __init__(self, body: dict[str, Any], tensors: Mapping[str, NDArray[Any]]) -> None:
        """`tensors` are those with which `tensor_success` made `body`, in the same order."""
        gap = b'"data_b64":""'  # cannot stand in any of the texts, whose quotes are escaped
        head, *rest = to_json(body).split(gap)
        self._head, self._rest = head, list(zip(tensors.values(), rest, strict=True))
        self._before, self._behind = gap[:-1], gap[-1:]

    @property
    def size(self) -> int:
        """Bytes of the whole JSON."""
        quotes = len(self._before) + len(self._behind)
        return len(self._head) + sum(quotes + -(-one.nbytes // 3) * 4 + len(text) for one, text in self._rest)

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yields the JSON in order. The event loop serves others between two pieces."""
        yield self._head
        for tensor, text in self._rest:
            yield self._before
            for piece in base64_pieces(tensor):
                yield piece
                await asyncio.sleep(0)
            yield self._behind + text


def pipeline_error(error: BlockrelayError, end: EndEntry, *, session_id: str | None) -> dict[str, Any]:
    """The answer to a request that was accepted and then failed; it also has an error in OpenAI's shape."""
    block = end.meta.get("failed_block") or None
    times: dict[str, float] = end.meta.get("execution_times") or {}
    worker = "GPU" if end.meta.get("device") == GPU else "CPU"
    failed = {"block_id": block, "error": str(error), "execution_time": times.get(block or "", 0.0), "worker": worker}
    return infer_error(
        error,
        session_id,
        message=f"Pipeline failed at {block}: {error}" if block else f"Pipeline failed: {error}",
        error_type=end.meta.get("error_type") or None,
        failed_block=block,
        successful_blocks=[name for name in times if name != block],
        failed_blocks=[failed] if block else [],
        fallback_events=[event.to_json() for event in end.fallbacks],
    )


class InferFormat(ResponseFormat):
    """The answers of the text form; a stream has one object per token, then the object of the whole answer.

    An instance is for one answer, whose tokens it collects.
    """

    opens_early = True
    prefix = "req"

    def __init__(self) -> None:
        self._answers: dict[int, CollectedAnswer] = {}

    def opening(self, active: ActiveRequest) -> dict[str, Any] | None:
        """The first event: the request id, the values in force, and the path that continues an interrupted stream."""
        name = active.public_id()
        events = f"/v1/requests/{name}/events?starting_after="  # the client appends the position of its last event
        return {"status": "accepted", "request_id": name, **in_force(active), "resume": events}

    def chunk(self, index: int, delta: Delta, active: ActiveRequest, fingerprint: str) -> dict[str, Any]:
        """The event of one token, or the whole answer at the end."""
        answer = self._answers.setdefault(index, CollectedAnswer())
        answer.add(delta)
        if delta.end is not None:
            return self.whole([answer], [active])
        return {
            "status": "token",
            "request_id": active.public_id(),
            "position": delta.position,
            "outputs": {"text": delta.text, "token_ids": [delta.token]},
        }

    def problem(self, error: BlockrelayError, active: ActiveRequest) -> dict[str, Any]:
        """The last event of a request that failed."""
        assert active.end is not None
        return pipeline_error(error, active.end, session_id=None)

    def whole(self, answers: Sequence[CollectedAnswer], requests: Sequence[ActiveRequest]) -> dict[str, Any]:
        """The answer without streaming, of the one request, which has ended well."""
        (answer,), (active,) = answers, requests
        assert answer.end is not None
        return {
            "status": "success",
            "message": "Pipeline completed successfully",
            "request_id": active.public_id(),
            "outputs": {"text": answer.text, "token_ids": answer.token_ids},
            "finish_reason": finish_reason(answer.end),
            "usage": usage([active]),
            **in_force(active),
            "total_pipeline_time": round(active.last_entry_at - active.started, 6),
            "system_fingerprint": answer.end.numerics or None,
            **execution(answer.end),
        }

    def background(self, active: ActiveRequest, status: str) -> dict[str, Any]:
        """The answer to a request that runs in the background."""
        return {"status": status, "request_id": active.public_id(), **in_force(active)}
