"""Reads config.json of the supported model families, and refuses by name every field that is not supported."""

from dataclasses import dataclass
from typing import Any, NoReturn, cast

from blockrelay.block_folder.model import HEAD_DIMS, ModelConfig, is_head_dim
from blockrelay.block_folder.strict_json import Fields
from blockrelay.errors import UnsupportedModel, UsageError
from blockrelay.text.text_assets import first_id, token_ids

#: The supported families, as `model_type` names them, and the class that `architectures` must name for each.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_MUST_BE_OFF = ("attention_bias", "mlp_bias", "use_bias", "use_qk_norm", "qk_layernorm", "final_logit_softcapping")
_MUST_BE_OFF_OR_ONE = (
    *("num_experts", "num_local_experts", "n_routed_experts", "partial_rotary_factor"),
    *("logit_scale", "logits_scaling", "residual_multiplier", "embedding_multiplier"),
)
"""Fields by which other families or forks change the computation.

Absent, null, false, 0 and, in this second list, 1 leave it unchanged.
"""
_DEFAULT_THETA = 10000.0
_DEFAULT_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}  # those of transformers; a Llama has as many as heads
_DEFAULT_WINDOW = 4096  # transformers' default for a Mistral or Qwen config without the field


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """The rotary embedding of a checkpoint. The four scaling fields are None where the type does not use them."""

    type: str
    """The scaling: default, linear or llama3, as transformers names it."""
    theta: float
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceConfig:
    """The checked contents of a config.json. Absent fields have the defaults of transformers."""

    model: ModelConfig
    """The shape, and the tokens that begin and end texts. It has no name yet."""
    tied: bool
    """True if the head shares its weights with the embedding."""
    rotary: Rotary


def read_config(content: bytes, *, max_position: int | None = None) -> SourceConfig:
    """Reads the bytes of a config.json; `max_position` shortens the context to this many tokens.

    Raises UnsupportedModel for a field that is not supported, and UsageError for one that is missing or wrong; both
    name it.
    """
    raw = Fields.parse(content, "config.json", UsageError)
    family = raw.text("model_type")
    if family not in ARCHITECTURES:
        _refuse("model_type", family, f"can convert {', '.join(ARCHITECTURES)}")
    _refuse_what_changes_the_computation(raw, family)
    heads = raw.integer("num_attention_heads", minimum=1)
    hidden_size = raw.integer("hidden_size", minimum=1)
    layers = raw.integer("num_hidden_layers", minimum=1)
    context = raw.integer("max_position_embeddings", minimum=1)
    rotary = _read_rotary(raw, context)
    if max_position is not None and max_position > context:
        raise UsageError(f"--max-position {max_position} is beyond the model's context of {context}")
    tied = raw.flag("tie_word_embeddings") if raw.has("tie_word_embeddings") else False
    model = ModelConfig(
        name="",
        family=family,
        hidden_size=hidden_size,
        layers=layers,
        heads=heads,
        kv_heads=_kv_heads(raw, family, heads),
        head_dim=_head_dim(raw, family, hidden_size, heads),
        intermediate_size=raw.integer("intermediate_size", minimum=1),
        vocab_size=raw.integer("vocab_size", minimum=1),
        max_position=max_position or context,
        rms_norm_eps=raw.number("rms_norm_eps") if raw.has("rms_norm_eps") else 1e-6,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        eos_ids=token_ids(raw, "eos_token_id") or (),
        bos_id=first_id(raw, "bos_token_id"),
    )
    if heads % model.kv_heads:
        raise UsageError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {model.kv_heads}"
        )
    if not is_head_dim(model.head_dim):
        _refuse("head_dim", model.head_dim, f"must be {HEAD_DIMS}")
    refuse_sliding_window(raw, family, layers, model.max_position)
    return SourceConfig(model=model, tied=tied, rotary=rotary)


def _refuse(field: str, value: object, why: str) -> NoReturn:
    raise UnsupportedModel(f"config.json: {field} {value!r} is not supported: {why}", field=field)


def _refuse_what_changes_the_computation(raw: Fields, family: str) -> None:
    if raw.has("architectures"):
        architectures = raw.take("architectures")
        if not isinstance(architectures, list) or ARCHITECTURES[family] not in architectures:
            _refuse("architectures", architectures, f"a {family} model must be {ARCHITECTURES[family]}")
    if raw.has("quantization_config"):
        _refuse("quantization_config", "...", "convert the unquantised checkpoint")
    if raw.has("hidden_act") and (activation := raw.text("hidden_act")) != "silu":
        _refuse("hidden_act", activation, "only silu is computed")
    for name in (*_MUST_BE_OFF, *_MUST_BE_OFF_OR_ONE):
        value = raw.take(name) if raw.has(name) else None
        if value and not (name in _MUST_BE_OFF_OR_ONE and value == 1):
            _refuse(name, value, "this changes the computation in a way Blockrelay does not know")


def _kv_heads(raw: Fields, family: str, heads: int) -> int:
    if raw.has("num_key_value_heads"):
        return raw.integer("num_key_value_heads", minimum=1)
    absent = "num_key_value_heads" not in set(raw.names())  # null means: as many as there are heads
    return _DEFAULT_KV_HEADS.get(family, heads) if absent else heads


def _head_dim(raw: Fields, family: str, hidden_size: int, heads: int) -> int:
    if raw.has("head_dim"):
        return raw.integer("head_dim", minimum=1)
    if family == "qwen3":
        return 128  # transformers' default for this family, independent of the hidden size
    return hidden_size // heads


def _read_rotary(raw: Fields, context: int) -> Rotary:
    # Same precedence as in transformers: `rope_scaling`, the old name, wins over `rope_parameters`.
    spelling = next((name for name in ("rope_scaling", "rope_parameters") if raw.has(name)), None)
    theta = raw.number("rope_theta") if raw.has("rope_theta") else _DEFAULT_THETA
    if theta <= 0:
        raw.fail("rope_theta must be positive")
    if spelling is None:
        return Rotary(type="default", theta=theta)
    given = raw.nested(spelling)
    kind = next((given.text(name) for name in ("rope_type", "type") if given.has(name)), "default")
    if kind not in ("default", "linear", "llama3"):
        _refuse(f"{spelling}.rope_type", kind, "can compute default, linear and llama3")
    for name in given.names():
        if name.endswith("_attention"):
            _refuse(f"{spelling}.{name}", "...", "the layers must share one rotary embedding")
    for name in ("attention_factor", "mscale", "partial_rotary_factor"):
        if given.has(name) and (value := given.number(name)) != 1.0:
            _refuse(f"{spelling}.{name}", value, "only 1 is computed")
    theta = given.number("rope_theta") if given.has("rope_theta") else theta
    if theta <= 0:
        given.fail("rope_theta must be positive")
    if kind == "default":
        return Rotary(type=kind, theta=theta)
    factor = given.number("factor")
    if factor < 1:
        given.fail("factor must be at least 1")
    if kind == "linear":
        return Rotary(type=kind, theta=theta, factor=factor)
    name = "original_max_position_embeddings"
    outer = raw.integer(name, minimum=1) if raw.has(name) else None
    inner = given.integer(name, minimum=1) if given.has(name) else None
    low, high = given.number("low_freq_factor"), given.number("high_freq_factor")
    if not 0 < low < high:
        given.fail("low_freq_factor must be positive and below high_freq_factor")
    return Rotary(
        type=kind,
        theta=theta,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=outer or inner or context,
    )


def refuse_sliding_window(raw: Fields, family: str, layers: int, max_position: int) -> None:
    """Raises UnsupportedModel for a sliding window, or layer types, that would change the computation.

    `raw` is the config.json, whose fields about windows and layer types must not have been read; a field of the wrong
    type raises its error. `max_position` is the context in tokens. A window is harmless when it is off, when no layer
    uses it, or when it is no smaller than the context.
    """
    if family == "llama":
        window = raw.integer("sliding_window") if raw.has("sliding_window") else None
    else:
        # null means no window; absent means transformers' default
        absent = "sliding_window" not in set(raw.names())
        window = _DEFAULT_WINDOW if absent else raw.optional_integer("sliding_window")
    types: Any = raw.take("layer_types") if raw.has("layer_types") else None
    full = isinstance(types, list) and all(item == "full_attention" for item in cast(list[object], types))
    if types is not None and not full and family in ("llama", "mistral"):
        _refuse("layer_types", types, "every layer must be full_attention")
    if family in ("qwen2", "qwen3"):
        used = raw.has("use_sliding_window") and raw.flag("use_sliding_window")
        first = raw.integer("max_window_layers") if raw.has("max_window_layers") else 28
        if not used:
            window = None
        if full or (types is None and first >= layers):
            window = None
    if window is not None and window < max_position:
        _refuse(
            "sliding_window", window, f"smaller than the context of {max_position}; --max-position {window} converts it"
        )
