"""Reads a model's settings from the files beside its ONNX blocks: end tokens, context length, tokenizer, chat template.

Exporters leave these files there (`blockrelay.onnx_blocks.beside`). A setting that is in none of them is assumed or
left out, and a note names it.
"""

from dataclasses import dataclass
from pathlib import Path

from blockrelay.block_folder.hub_cache import model_name
from blockrelay.block_folder.model import HEAD_DIMS, ModelConfig, is_head_dim
from blockrelay.block_folder.strict_json import Fields
from blockrelay.errors import UsageError
from blockrelay.onnx_blocks.beside import read_beside
from blockrelay.onnx_blocks.llama.model import Llama
from blockrelay.text.text_assets import Texts, optional_json
from blockrelay_converter.checkpoint.config import ARCHITECTURES, refuse_sliding_window


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """The model's description for its block folder, its text files, and notes on what had to be assumed."""

    model: ModelConfig
    texts: Texts
    notes: tuple[str, ...]


def read_settings(
    folder: Path, llama: Llama, *, name: str | None, max_position: int | None, rows: int | None
) -> ModelDescription:
    """Reads the settings of the recognised model `llama` from the files in `folder`, beside its ONNX blocks.

    `name` is the model's name for clients (None: a name from the folder). `max_position` sets the context in tokens
    and may not exceed that of the files or tables. None: what the files say, or DEFAULT_CONTEXT (4096) if they do not,
    but at most `rows`. `rows` is the number of positions in the graphs' rotary tables (None: no limit).

    Raises UsageError for a wrong file, a head size that cannot be computed or a `max_position` that is too large.
    Raises UnsupportedModel for a sliding window that would change the result.
    """
    if not is_head_dim(llama.head_dim):
        raise UsageError(f"{folder}: heads of {llama.head_dim} cannot be computed: {HEAD_DIMS}")
    beside = read_beside(folder, vocabulary=llama.vocab_size, max_position=max_position, rows=rows)
    config, genai = (optional_json(folder / one) for one in ("config.json", "genai_config.json"))
    given = genai.nested("model") if genai.has("model") else Fields({}, "genai_config.json", UsageError)
    has_type = config.has("model_type")
    family = _family(config, given, llama)
    if has_type:
        refuse_sliding_window(config, family, len(llama.layers), beside.max_position)
    texts = beside.texts
    model = ModelConfig(
        name=name or model_name(folder),
        family=family,
        hidden_size=llama.hidden_size,
        layers=len(llama.layers),
        heads=llama.heads,
        kv_heads=llama.kv_heads,
        head_dim=llama.head_dim,
        intermediate_size=llama.intermediate_size,
        vocab_size=llama.vocab_size,
        max_position=beside.max_position,
        rms_norm_eps=llama.epsilon,
        qkv_bias=llama.qkv_bias,
        qk_norm=llama.qk_norm,
    )
    return ModelDescription(model=texts.added_to(model), texts=texts, notes=beside.lacking)


def _family(config: Fields, given: Fields, llama: Llama) -> str:
    """Returns the family in config.json or genai_config.json if it is supported, else one with the same layers."""
    for fields, field in ((config, "model_type"), (given, "type")):
        if fields.has(field) and (family := fields.text(field)) in ARCHITECTURES:
            return family
    return "qwen3" if llama.qk_norm else "qwen2" if llama.qkv_bias else "llama"
