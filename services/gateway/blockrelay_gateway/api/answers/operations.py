"""The answers about the gateway itself, and of the tokenizer's routes."""

from typing import Any, Literal

from pydantic import Field

from blockrelay_gateway.api.answers.parts import Answer
from blockrelay_gateway.api.common_schemas import example

_MODEL: dict[str, Any] = {
    "id": "storyteller",
    "object": "model",
    "created": 1790000000,
    "owned_by": "blockrelay",
    "max_model_len": 1024,
    "context_length": 1024,
    "meta": {"n_ctx_train": 1024},
    "precision": "w8a8",
    "kv_cache_layout": "fp16",
    "blocks": 8,
    "model_hash": "9f2c",
    "ignored_defaults": {},
    "chat": True,
    "structured_output": True,
}


class ModelMeta(Answer):
    n_ctx_train: int


class Model(Answer):
    """A model that is served."""

    model_config = example(**_MODEL)

    id: str
    object: Literal["model"]
    created: int = Field(description="Unix seconds")
    owned_by: Literal["blockrelay"]
    max_model_len: int
    context_length: int
    meta: ModelMeta
    precision: str | None = Field(description="that is in force; null: not known yet")
    kv_cache_layout: str | None
    blocks: int
    model_hash: str
    ignored_defaults: dict[str, Any] = Field(description="of generation_config.json: what has no effect here")
    chat: bool = Field(description="it has a chat template")
    structured_output: bool


class ModelList(Answer):
    """The answer of GET /v1/models."""

    model_config = example(object="list", data=[_MODEL])

    object: Literal["list"]
    data: list[Model]


class PlannedWorker(Answer):
    """A worker of a stage. It has the last two fields once it serves."""

    id: str
    ready: bool
    precision: str | None = None
    kv_cache_layout: str | None = None


class PlannedStage(Answer):
    """A stage: blocks that the same workers compute."""

    stage: int
    blocks: str
    kind: str = Field(alias="class", description="kind of device that is wanted")
    devices: list[str]
    workers: list[PlannedWorker]
    reason: str


class PlanView(Answer):
    """The answer of GET /v1/plan."""

    model_config = example(
        object="plan",
        model="storyteller",
        epoch=1,
        source="even",
        precision="w8a8",
        kv_cache_layout="fp16",
        plan={"block_1": "CPU", "block_2": "CPU"},
        stages=[
            {
                "stage": 0,
                "blocks": "1-2",
                "class": "CPU",
                "devices": [],
                "workers": [{"id": "host-1-0", "ready": True}],
                "reason": "all blocks",
            }
        ],
        missing=[],
    )

    object: Literal["plan"]
    model: str
    epoch: int
    source: str
    precision: str | None
    kv_cache_layout: str | None
    plan: dict[str, str] = Field(description="which kind of device runs which block")
    stages: list[PlannedStage]
    missing: list[str] = Field(description="why no token could be produced; empty: it could")


class Liveness(Answer):
    """The answer of GET /livez."""

    model_config = example(status="ok", stopped=[])

    status: Literal["ok", "failed"]
    stopped: list[str] = Field(description="background work of this process that has ended")


class ReadinessView(Answer):
    """The answer of GET /readyz."""

    model_config = example(status="ready", reasons=[])

    status: Literal["ready", "not ready"]
    reasons: list[str]


class Health(Answer):
    """The answer of GET /health."""

    model_config = example(status="ok")

    status: Literal["ok", "not ready"]


class Version(Answer):
    """The answer of GET /version."""

    model_config = example(version="1.0.0")

    version: str


class Root(Answer):
    """The answer of GET /."""

    model_config = example(name="blockrelay", version="1.0.0", model="storyteller")

    name: Literal["blockrelay"]
    version: str
    model: str


class Tokens(Answer):
    """The answer of POST /tokenize."""

    model_config = example(count=2, max_model_len=1024, tokens=[95, 61], token_strs=None)

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = Field(description="if the request asks for them")


class Detokenized(Answer):
    """The answer of POST /detokenize."""

    model_config = example(prompt="Once upon a time")

    prompt: str


class AddedToken(Answer):
    content: str
    special: bool


class TokenizerInfo(Answer):
    """The answer of GET /tokenizer_info, in the names of tokenizer_config.json; what the model has not is null."""

    model_config = example(
        tokenizer_class="PreTrainedTokenizerFast",
        model_max_length=1024,
        bos_token="<s>",
        eos_token="</s>",
        unk_token=None,
        pad_token=None,
        added_tokens_decoder={"0": {"content": "<s>", "special": True}},
        chat_template=None,
    )

    tokenizer_class: str
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    added_tokens_decoder: dict[str, AddedToken]
    chat_template: str | None
