"""What the text requests of all APIs share, as pydantic models: types and names only.

Unknown fields are errors: a field that is silently ignored is a promise broken.
"""

from pydantic import BaseModel, ConfigDict, Field


class Strict(BaseModel):
    """No conversions, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class SamplingFields(Strict):
    """None = the default."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(default=None, description="keep the k most likely tokens; 0 or -1 = all")
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    return_token_ids: bool | None = None
    background: bool | None = Field(default=None, description="answer at once; read the result from /v1/requests/{id}")
    priority: int | None = Field(default=None, description="lower is earlier; the key says how low")
    timeout: float | None = Field(default=None, description="seconds; the request ends with an error after that")
    cache_salt: str | None = Field(default=None, description="KV pages are shared only among requests of equal salt")
    exact: bool | None = Field(default=None, description="end rather than go on under another numerics id")
