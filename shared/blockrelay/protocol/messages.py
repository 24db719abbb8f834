"""Every message, in the order of a request's life. Frozen; encoded by `blockrelay.protocol.encoding.codec`.

Each `decode` raises WireError, and nothing else, for bytes that are not such a message.

gateway → record (ACCEPT)      RequestBody
CLAIM   → worker 0             Claimed
worker k → worker k+1          Forward (segments + rows, or tensors by name), one per batch and target
last worker → COMMIT           Commit;  COMMIT → inbox of worker 0: NextJob;  any end → inboxes of the route: Ended
log → gateway                  LogEntry (TokenEntry | EndEntry)
scheduler → all                Plan (blockrelay.protocol.plan)
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

import numpy as np

from blockrelay.errors import BadRequest, WireError
from blockrelay.protocol.encoding import codec
from blockrelay.protocol.encoding.checks import count, entries, flag, items, reading, text, tokens
from blockrelay.protocol.encoding.end_meta import decode_end_meta
from blockrelay.protocol.encoding.fallback_event import FallbackEvent
from blockrelay.protocol.encoding.forward_segment import ForwardSegment
from blockrelay.protocol.encoding.named_tensors import NamedTensors, pack_tensors, unpack_tensors
from blockrelay.protocol.encoding.prompt import TokenIds, pack_prompt, unpack_prompt
from blockrelay.protocol.plan import Device
from blockrelay.protocol.sampling_params import SamplingParams

Verdict = Literal["OK", "LOST", "DIVERGED", "GAP", "EXPIRED"]
RerunReason = Literal["death", "drain", "gpu_error", "missing_pages", "no_inbox", "restart", "forgotten", "stalled"]
EndReason = Literal["stop", "length", "tensor", "cancelled", "expired", "error"]
Logits = Literal["none", "last", "all"]
#: What becomes of a request whose GPU fails: a CPU goes on from the KV pages that have left the device ("allow"), or
#: computes the prompt anew ("recompute"), or it waits for a GPU, and ends with an error when none comes ("deny").
Fallback = Literal["allow", "recompute", "deny"]
L = TypeVar("L", bound=str)
#: Prompts of one body of a client.
MAX_CHOICES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBody:
    """gateway → record. What a request asks for; never changes after ACCEPT.

    `prompt` int32 [n], n >= 1. `params` is `SamplingParams.to_dict()`. A tensor step has `logits` "last" or "all" and
    generates nothing; `prior` is then how many leading tokens belong to earlier steps. Its client has given the KV of
    the first `kv_given` tokens, whole pages, and asks for that of the layers `kv_asked`, all on the payload Redis
    (`encoding.kv_pages`). A `background` request lives on when nobody follows it. Only requests of equal `salt` share
    KV pages. Each of several prompts of a client's body is a request; all name the first as `group`, and that one says
    how many `choices` there are. `gateway` accepted it. An `exact` one never goes on under another numerics id than
    that of its first token. Stages tell their steps for one that is `traced`.
    """

    prompt: TokenIds
    params: dict[str, Any]
    logits: Logits = "none"
    prior: int = 0
    kv_given: int = 0
    kv_asked: tuple[int, ...] = ()
    traceparent: str = ""
    session: str = ""
    step: int = 0
    background: bool = False
    salt: str = ""
    group: str = ""
    choices: int = 1
    gateway: str = ""
    exact: bool = False
    traced: bool = False
    fallback: Fallback = "allow"

    def encode(self) -> bytes:
        """Small: it is kept as long as what came of it. What is as usual is left out."""
        octets, width = pack_prompt(self.prompt)
        usual = SamplingParams().to_dict()
        message: dict[str, Any] = {
            "prompt": octets,
            "width": width,
            "params": {name: value for name, value in self.params.items() if value != usual.get(name)},
            "logits": self.logits if self.logits != "none" else "",
            "prior": self.prior,
            "kv_given": self.kv_given,
            "kv_asked": list(self.kv_asked),
            "trace": self.traceparent,
            "session": self.session,
            "step": self.step,
            "background": self.background,
            "salt": self.salt,
            "group": self.group,
            "choices": self.choices if self.choices != 1 else 0,
            "gateway": self.gateway,
            "exact": self.exact,
            "traced": self.traced,
            "fallback": self.fallback if self.fallback != "allow" else "",
        }
        return codec.pack({name: value for name, value in message.items() if value or name == "params"})

    @classmethod
    def decode(cls, data: bytes) -> "RequestBody":
        with reading("a request body"):
            m = codec.unpack(data)
            prompt = unpack_prompt(m["prompt"], m.get("width"))
            try:
                params = SamplingParams.from_dict(entries(m["params"])).to_dict()
            except BadRequest as error:
                raise WireError(str(error)) from error
            return cls(
                prompt=prompt,
                params=params,
                logits=_one_of(m.get("logits", "none"), get_args(Logits)),
                prior=count(m.get("prior", 0), most=prompt.size),
                kv_given=count(m.get("kv_given", 0), most=prompt.size),
                kv_asked=tokens(m.get("kv_asked", [])),
                traceparent=text(m.get("trace", "")),
                session=text(m.get("session", "")),
                step=count(m.get("step", 0)),
                background=flag(m.get("background", False)),
                salt=text(m.get("salt", "")),
                group=text(m.get("group", "")),
                choices=count(m.get("choices", 1), most=MAX_CHOICES) or 1,
                gateway=text(m.get("gateway", "")),
                exact=flag(m.get("exact", False)),
                traced=flag(m.get("traced", False)),
                fallback=_one_of(m.get("fallback", "allow"), get_args(Fallback)),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """CLAIM → worker 0. A request that now is on this worker, with everything it needs to start or go on. `reruns`: how
    many runs of it there were. `private`: some worker of the route, or of one before it, does not compute the same bits
    twice, so that its KV pages are nobody else's. `reusable`: of how many leading tokens pages may be found, None: any.

    `body` raises WireError when `packed` is not a RequestBody: that request alone is to blame.
    """

    request: str
    run: str
    route: tuple[str, ...]
    route_class: Device
    waited_s: float  # since ACCEPT
    quarantined: bool
    packed: bytes
    tokens: tuple[int, ...]  # committed so far
    left_s: float | None = None  # until its deadline
    reruns: int = 0
    private: bool = False
    reusable: int | None = None

    @property
    def body(self) -> RequestBody:
        return RequestBody.decode(self.packed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """worker k → worker k+1, on the payload Redis or in shared memory. `rows` float32 [sum of segment rows, hidden]; or
    instead, of ONNX blocks that others made, the `tensors` of each segment, whose parts are its rows in order."""

    sender: str
    segments: tuple[ForwardSegment, ...]
    rows: codec.FloatRows | None = None
    tensors: Sequence[Sequence[NamedTensors]] = ()
    block_seconds: dict[str, float] = field(default_factory=dict[str, float])
    gpu_blocks: tuple[str, ...] = ()  # of the blocks these rows came through
    received_ns: int = field(default=0, compare=False)  # by whom decodes it, on its monotonic clock; not on the wire

    def encode(self) -> dict[str, bytes]:
        head = {
            "from": self.sender,
            **({} if self.rows is None else {"hidden": int(self.rows.shape[1])}),
            "times": self.block_seconds,
            "gpu": list(self.gpu_blocks),
            "segments": [segment.to_list() for segment in self.segments],
        }
        if self.rows is None:
            return {"head": codec.pack(head), "tensors": pack_tensors(self.tensors)}
        return {"head": codec.pack(head), "rows": np.ascontiguousarray(self.rows, dtype="<f4").tobytes()}

    @classmethod
    def decode(cls, fields: Mapping[bytes, bytes], received_ns: int = 0) -> "Forward":
        with reading("forwarded rows"):
            head = codec.unpack(fields[b"head"])
            segments = tuple(map(ForwardSegment.from_list, items(head["segments"])))
            lengths = [len(segment.token_ids) for segment in segments]
            named = b"tensors" in fields
            return cls(
                sender=text(head["from"]),
                segments=segments,
                rows=None if named else codec.rows_from_bytes(fields[b"rows"], sum(lengths), count(head["hidden"])),
                tensors=unpack_tensors(fields[b"tensors"], lengths) if named else (),
                block_seconds={name: float(value) for name, value in entries(head["times"]).items()},
                gpu_blocks=tuple(text(name) for name in items(head["gpu"])),
                received_ns=received_ns,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """last worker → COMMIT. `position` is the log length before `tokens`; `end` "" while the request goes on. `rows`:
    how many rows of known tokens a re-run has computed, with its first tokens; None at any other time."""

    request: str
    run: str
    position: int
    tokens: tuple[int, ...]
    logprobs: tuple[str, ...] = ()  # one encoded TokenLogprobs per token, or empty
    end: EndReason | Literal[""] = ""
    meta: str = ""
    rows: int | None = None

    def to_script(self) -> dict[str, Any]:
        """As the script reads it; without what is empty."""
        item: dict[str, Any] = {
            "request": self.request,
            "run": self.run,
            "position": self.position,
            "tokens": list(self.tokens),
        }
        if self.logprobs:
            item["logprobs"] = list(self.logprobs)
        if self.end:
            item |= {"end": self.end, "meta": self.meta}
        if self.rows is not None:
            item["rows"] = self.rows
        return item


@dataclass(frozen=True, slots=True)
class CommitAnswer:
    verdict: Verdict
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NextJob:
    """COMMIT → inbox of worker 0: these tokens are now part of the log; compute what follows them.

    The last worker sends the same a little earlier over the payload Redis: whoever gets it twice sees it by `position`.
    """

    request: str
    run: str
    position: int  # log length before `tokens`
    tokens: tuple[int, ...]
    received_ns: int = field(default=0, compare=False)  # as in `Forward`

    def encode(self) -> bytes:
        return codec.pack_list([self.request, self.run, self.position, list(self.tokens)])

    @classmethod
    def decode(cls, data: bytes, received_ns: int = 0) -> "NextJob":
        with reading("a next job"):
            request, run, position, known = codec.unpack_list(data)
            names = {"request": text(request), "run": text(run)}
            return cls(**names, position=count(position), tokens=tokens(known), received_ns=received_ns)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probability of a token, and of the most likely ones: (id, log probability), best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    def encode(self) -> str:
        """As it stands in a Commit and in the log."""
        return json.dumps([self.logprob, self.top], separators=(",", ":"), allow_nan=False)

    @classmethod
    def decode(cls, encoded: str) -> "TokenLogprobs":
        with reading("log probabilities"):
            logprob, top = json.loads(encoded)
            return cls(float(logprob), tuple((count(token), float(value)) for token, value in top))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """FINISH, RERUN, COMMIT → inbox of every route member: this run is over, forget it."""

    request: str
    run: str

    @classmethod
    def decode(cls, data: bytes) -> "Ended":
        with reading("the end of a run"):
            request, run = codec.unpack_list(data)
            return cls(request=text(request), run=text(run))


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One committed token. `logprobs` is an encoded TokenLogprobs or "". `numerics` is the id of the run that computed
    it, in the first entry of a log; "" in all others."""

    position: int
    token: int
    logprobs: str = ""
    numerics: str = ""


@dataclass(frozen=True, slots=True)
class EndEntry:
    """The terminal entry; `position` is one past the last token. `meta` holds error, code, block times, route.

    `executed`: how many blocks GPUs and how many CPUs have executed, summed over the steps that all runs of the request
    have committed; None where none has.
    """

    position: int
    reason: EndReason
    meta: dict[str, Any]
    fallbacks: tuple[FallbackEvent, ...]
    numerics: str
    executed: tuple[int, int] | None = None


LogEntry = TokenEntry | EndEntry


def decode_log_entry(entry_id: bytes | str, fields: Mapping[bytes, bytes], *, after: int = 0) -> list[LogEntry]:
    """A stream entry of `log:<id>` as LogEntries with positions behind `after`.

    One; but the terminal entry of a log that was packed holds all tokens before it.
    """
    with reading("a log entry"):
        position = count(int((entry_id.decode() if isinstance(entry_id, bytes) else entry_id).partition("-")[0]))
        if b"token" in fields:
            logprobs, numerics = (fields.get(name, b"").decode() for name in (b"logprobs", b"numerics"))
            found: list[LogEntry] = [TokenEntry(position, count(int(fields[b"token"])), logprobs, numerics)]
        else:
            found = [*_packed_tokens(position, fields), _end(position, fields)]
        return [entry for entry in found if entry.position > after]


def _packed_tokens(end: int, fields: Mapping[bytes, bytes]) -> list[TokenEntry]:
    known = tokens(codec.unpack_list(fields[b"all"])) if b"all" in fields else ()
    if len(known) >= end:
        raise WireError(f"a log of {len(known)} tokens ends at position {end}")
    logprobs = codec.unpack_list(fields[b"logprobs"]) if b"logprobs" in fields else [""] * len(known)
    first, numerics = end - len(known), fields.get(b"numerics", b"").decode()
    return [
        TokenEntry(first + index, token, text(one), "" if index else numerics)
        for index, (token, one) in enumerate(zip(known, logprobs, strict=True))
    ]


def _end(position: int, fields: Mapping[bytes, bytes]) -> EndEntry:
    with reading("the end of a log"):
        meta, fallbacks = fields.get(b"meta", b""), fields.get(b"fallbacks", b"")
        return EndEntry(
            position=position,
            reason=_one_of(fields[b"end"].decode(), get_args(EndReason)),
            meta=decode_end_meta(meta),
            fallbacks=tuple(map(FallbackEvent.decode, items(json.loads(fallbacks)))) if fallbacks else (),
            numerics=fields.get(b"numerics", b"").decode(),
            executed=_executed(fields[b"executed"]) if b"executed" in fields else None,
        )


def _executed(said: bytes) -> tuple[int, int]:
    on_gpus, on_cpus = (count(int(number)) for number in said.split(b","))
    return on_gpus, on_cpus


def _one_of(value: object, allowed: tuple[L, ...]) -> L:
    for known in allowed:
        if known == value:
            return known
    raise WireError(f"expected one of {', '.join(allowed)}, not {value!r:.40}")
