"""The messages between services, in the order in which a request sees them.

All are frozen and encoded by `blockrelay.protocol.encoding.codec`. Each `decode` raises WireError, and nothing else,
for bytes that are not such a message.

gateway → record (ACCEPT)      RequestBody
CLAIM   → worker 0             Claimed
worker k → worker k+1          Forward (segments and their hidden states), one per batch and target
last worker → COMMIT           Commit;  COMMIT → inbox of worker 0: NextJob;  any end → inboxes of the route: Ended
log → gateway                  LogEntry (TokenEntry | EndEntry)
scheduler → all                Plan (blockrelay.protocol.plan)
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar, get_args

import numpy as np

from blockrelay.errors import BadRequest, WireError
from blockrelay.protocol.encoding import codec
from blockrelay.protocol.encoding.checks import count, entries, flag, items, reading, text, tokens
from blockrelay.protocol.encoding.end_meta import decode_end_meta
from blockrelay.protocol.encoding.fallback_event import FallbackEvent
from blockrelay.protocol.encoding.fallback_policy import checked_policy
from blockrelay.protocol.encoding.forward_segment import ForwardSegment
from blockrelay.protocol.encoding.named_tensors import NamedTensors, pack_tensors, unpack_tensors
from blockrelay.protocol.encoding.prompt import TokenIds, pack_prompt, unpack_prompt
from blockrelay.protocol.plan import Device
from blockrelay.protocol.sampling_params import SamplingParams

Verdict = Literal["OK", "LOST", "DIVERGED", "GAP", "EXPIRED"]
RerunReason = Literal[
    "death", "drain", "gpu_error", "missing_pages", "preempted", "no_inbox", "restart", "forgotten", "stalled"
]  # fmt: skip
EndReason = Literal["stop", "length", "tensor", "cancelled", "expired", "error"]
Logits = Literal["none", "last", "all"]
L = TypeVar("L", bound=str)
#: Most choices of one client body: its prompts, and the `n` of each.
MAX_CHOICES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBody:
    """A request as the gateway writes it into its record; it never changes after ACCEPT.

    Each choice of a client body with several, of one prompt or of many, is a request of its own.
    """

    prompt: TokenIds  # int32 [n], n >= 1
    params: dict[str, Any]  # `SamplingParams.to_dict()`
    logits: Logits = "none"  # "last" or "all": a tensor step, which generates no tokens
    prior: int = 0  # tensor step: leading tokens that belong to earlier steps
    kv_given: int = 0  # tensor step: leading tokens, whole pages, whose KV the client put on the payload Redis
    kv_asked: tuple[int, ...] = ()  # tensor step: layers whose KV the client wants (`encoding.kv_pages`)
    traceparent: str = ""  # W3C trace context of the client
    session: str = ""  # session id, and the step of the session
    step: int = 0
    background: bool = False  # continues when no client reads it
    salt: str = ""  # only requests of equal salt share KV pages
    group: str = ""  # of several choices in one client body: the id of the first one's request
    choices: int = 1  # in the request of the first choice: how many choices the body has
    sample: int = 0  # number of the choice among those of its prompt; the first one stands for the prompt in counts
    gateway: str = ""  # id of the gateway that accepted it
    grammar_id: str = ""  # of the workers that read its grammar (`blockrelay.text.grammars`); "": it has none
    calls: str = ""  # the form in which its text may call tools, by its name in gateways; "": its text calls none
    reasoning: str = ""  # whether its text begins with reasoning, as gateways write it; "": it does not
    shown: tuple[int, ...] = ()  # special tokens whose names are part of its text
    exact: bool = False  # never continues under another numerics id than that of its first token
    traced: bool = False  # stages write their steps to `Keys.trace`
    fallback: str = "allow"  # what happens when its GPU fails, as `encoding.fallback_policy` writes it

    def encode(self) -> bytes:
        """Returns the body as bytes, without default values: Redis keeps it as long as the request's result."""
        octets, width = pack_prompt(self.prompt)
        usual = SamplingParams().to_dict()
        message: dict[str, Any] = {
            "prompt": octets,
            "width": width,
            "params": {name: value for name, value in self.params.items() if value != usual.get(name)},
        }
        for one in fields(self):
            if one.name not in message and (value := getattr(self, one.name)) != one.default:
                message["trace" if one.name == "traceparent" else one.name] = value
        return codec.pack(message)

    @classmethod
    def decode(cls, data: bytes) -> "RequestBody":
        """Reads the bytes of `encode`. Raises WireError for anything else, and for parameters out of range."""
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
                prior=count(m.get("prior", 0), limit=prompt.size),
                kv_given=count(m.get("kv_given", 0), limit=prompt.size),
                kv_asked=tokens(m.get("kv_asked", [])),
                traceparent=text(m.get("trace", "")),
                session=text(m.get("session", "")),
                step=count(m.get("step", 0)),
                background=flag(m.get("background", False)),
                salt=text(m.get("salt", "")),
                group=text(m.get("group", "")),
                choices=count(m.get("choices", 1), limit=MAX_CHOICES) or 1,
                sample=count(m.get("sample", 0), limit=MAX_CHOICES),
                gateway=text(m.get("gateway", "")),
                grammar_id=text(m.get("grammar_id", "")),
                calls=text(m.get("calls", "")),
                reasoning=text(m.get("reasoning", "")),
                shown=tokens(m.get("shown", [])),
                exact=flag(m.get("exact", False)),
                traced=flag(m.get("traced", False)),
                fallback=checked_policy(m.get("fallback", "allow")),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """A request that CLAIM gave to a worker of the first stage, with all it needs to start or continue."""

    request_id: str
    run_id: str
    route: tuple[str, ...]  # worker ids, one for each stage
    route_class: Device
    waited_s: float  # since ACCEPT
    quarantined: bool  # to be run alone, because it ended workers before
    packed: bytes  # an encoded RequestBody
    tokens: tuple[int, ...]  # committed so far
    left_s: float | None = None  # until its deadline; None: it has none
    reruns: int = 0  # runs before this one
    private: bool = False  # this route or an earlier one has a nondeterministic worker: its KV pages are not shared
    reusable: int | None = None  # leading tokens whose KV pages may be reused at most; None: any

    @property
    def body(self) -> RequestBody:
        """The decoded `packed`. Raises WireError if it is not a RequestBody; only that request is then at fault."""
        return RequestBody.decode(self.packed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """The hidden states of a batch, from one stage to the next, on the payload Redis or in shared memory."""

    sender: str  # worker id
    segments: tuple[ForwardSegment, ...]
    rows: codec.FloatRows | None = None  # float32 [tokens of all segments, hidden]
    tensors: Sequence[Sequence[NamedTensors]] = ()  # instead, of ONNX blocks made by others: the parts of each segment
    block_seconds: dict[str, float] = field(default_factory=dict[str, float])  # time of each block passed, by its name
    gpu_blocks: tuple[str, ...] = ()  # names of the blocks passed that GPUs computed
    received_ns: int = field(default=0, compare=False)  # receiver's monotonic clock when it arrived; not on the wire

    def encode(self) -> dict[str, bytes]:
        """Returns the fields of a stream entry.

        For `tensors` the caller must have checked `why_not_sent` and their weight, as `pack_tensors` says.
        """
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
        """Reads the fields of `encode`; arrays are read-only views. Raises WireError for anything else."""
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
    """New tokens of one request, from the worker of the last stage to COMMIT."""

    request_id: str
    run_id: str
    position: int  # log length before `tokens`
    tokens: tuple[int, ...]
    logprobs: tuple[str, ...] = ()  # one encoded TokenLogprobs per token, or empty
    end: EndReason | Literal[""] = ""  # "": the request continues
    meta: str = ""  # at the end: `encode_end_meta`
    rows: int | None = None  # with the first tokens of a re-run: how many known tokens it computed again

    def to_script(self) -> dict[str, Any]:
        """Returns the commit as the script COMMIT reads it, without empty fields."""
        item: dict[str, Any] = {
            "request": self.request_id,
            "run": self.run_id,
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
    """COMMIT's answer to one Commit.

    OK: the tokens are in the log. LOST: the run is not the current one, or the request has ended or is gone. DIVERGED:
    the log has another token at one of the positions. GAP: the log is shorter than the commit's position. EXPIRED: the
    deadline has passed, and the request has ended.
    """

    verdict: Verdict
    length: int  # of the log afterwards


@dataclass(frozen=True, slots=True, kw_only=True)
class NextJob:
    """Asks the worker of the first stage to compute what follows `tokens`, which are now part of the log.

    COMMIT writes it to the worker's inbox. The last worker sends the same a little earlier over the payload Redis; the
    receiver recognises the second one by its `position`.
    """

    request_id: str
    run_id: str
    position: int  # log length before `tokens`
    tokens: tuple[int, ...]
    received_ns: int = field(default=0, compare=False)  # as in `Forward`

    def encode(self) -> bytes:
        """Returns the job as the msgpack list that COMMIT also writes."""
        return codec.pack_for_script([self.request_id, self.run_id, self.position, list(self.tokens)])

    @classmethod
    def decode(cls, data: bytes, received_ns: int = 0) -> "NextJob":
        """Reads the bytes of `encode`. Raises WireError for anything else."""
        with reading("a next job"):
            request, run, position, known = codec.unpack_list(data)
            names = {"request_id": text(request), "run_id": text(run)}
            return cls(**names, position=count(position), tokens=tokens(known), received_ns=received_ns)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log probabilities of a token and of the most likely tokens in its place."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, log probability), best first

    def encode(self) -> str:
        """Returns the JSON that a Commit and the log hold."""
        return json.dumps([self.logprob, self.top], separators=(",", ":"), allow_nan=False)

    @classmethod
    def decode(cls, encoded: str) -> "TokenLogprobs":
        """Reads the JSON of `encode`. Raises WireError for anything else."""
        with reading("log probabilities"):
            logprob, top = json.loads(encoded)
            return cls(float(logprob), tuple((count(token), float(value)) for token, value in top))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Tells a worker that a run is over and can be forgotten; scripts write it to the inboxes of the route."""

    request_id: str
    run_id: str
    again: bool = False
    """The request runs again, perhaps on the same workers."""

    @classmethod
    def decode(cls, data: bytes, *, again: bool = False) -> "Ended":
        """Reads the msgpack list [request id, run id]. Raises WireError for anything else."""
        with reading("the end of a run"):
            request, run = codec.unpack_list(data)
            return cls(request_id=text(request), run_id=text(run), again=again)


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One committed token of a log."""

    position: int  # from 1
    token: int
    logprobs: str = ""  # an encoded TokenLogprobs, or ""
    numerics: str = ""  # in the first entry of a log: the numerics id of the run that computed it; else ""


@dataclass(frozen=True, slots=True)
class EndEntry:
    """The terminal entry of a log."""

    position: int  # one past the last token
    reason: EndReason
    meta: dict[str, Any]  # error, code, block times, route
    fallbacks: tuple[FallbackEvent, ...]
    numerics: str  # `a+b@17`: id b computed the tokens behind the first 17
    executed: tuple[int, int] | None = None  # blocks that GPUs and CPUs executed, over all committed steps of all runs


LogEntry = TokenEntry | EndEntry


def decode_log_entry(entry_id: bytes | str, fields: Mapping[bytes, bytes], *, after: int = 0) -> list[LogEntry]:
    """Decodes a stream entry of `log:<id>`, leaving out positions up to `after`. Raises WireError.

    Most entries are one LogEntry; the terminal entry of a packed log also holds all tokens before it.
    """
    with reading("a log entry"):
        position = count(int((entry_id.decode() if isinstance(entry_id, bytes) else entry_id).partition("-")[0]))
        if b"token" in fields:
            logprobs, numerics = (fields.get(name, b"").decode() for name in (b"logprobs", b"numerics"))
            decoded: list[LogEntry] = [TokenEntry(position, count(int(fields[b"token"])), logprobs, numerics)]
        else:
            decoded = [*_packed_tokens(position, fields), _end(position, fields)]
        return [entry for entry in decoded if entry.position > after]


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


def _executed(encoded: bytes) -> tuple[int, int]:
    on_gpus, on_cpus = (count(int(number)) for number in encoded.split(b","))
    return on_gpus, on_cpus


def _one_of(value: object, allowed: tuple[L, ...]) -> L:
    for known in allowed:
        if known == value:
            return known
    raise WireError(f"expected one of {', '.join(allowed)}, not {value!r:.40}")
