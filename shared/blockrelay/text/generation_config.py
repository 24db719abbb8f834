"""What a model's author generates with (generation_config.json): what becomes the defaults of requests, and what we
cannot apply."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from blockrelay.block_folder.manifest import GenerationDefaults
from blockrelay.block_folder.strict_json import Fields
from blockrelay.errors import BadRequest
from blockrelay.protocol.sampling_params import SamplingParams

#: Say nothing about which tokens are generated: ids that others read, and how transformers goes about its work.
_HARMLESS = frozenset(
    (
        *("_from_model_config", "transformers_version", "_commit_hash", "do_sample", "pad_token_id", "bos_token_id"),
        *("eos_token_id", "decoder_start_token_id", "use_cache", "use_mtp", "cache_implementation", "cache_config"),
        *("max_cache_len", "prefill_chunk_size", "compile_config", "disable_compile", "continuous_batching_config"),
        *("low_memory", "return_dict_in_generate", "output_attentions", "output_hidden_states", "output_scores"),
        *("output_logits", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule"),
        *("assistant_confidence_threshold", "prompt_lookup_num_tokens", "max_matching_ngram_size"),
        *("assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight"),
        *("speculation_type", "early_stopping", "length_penalty"),  # the last two are about beams, which are named
    )
)
#: With these values a field changes nothing. So do null, false and what is empty.
_NEUTRAL: Mapping[str, float] = {
    **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "diversity_penalty", "presence_penalty", "frequency_penalty"), 0),
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences", "typical_p"), 1),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "guidance_scale"), 1),
    "max_length": 20,  # what transformers writes where nobody has said anything
}
_APPLIED = ("temperature", "top_k", "top_p", "min_p", "max_new_tokens")
_LONGEST = 200
"""Characters of a value that is shown."""


def generation_defaults(config: Fields) -> GenerationDefaults:
    """The defaults of requests. UsageError names a value that every request without its own would be refused for."""

    def number(name: str) -> float | None:
        return config.number(name) if config.has(name) else None

    greedy = config.has("do_sample") and not config.flag("do_sample")
    defaults = GenerationDefaults(
        temperature=number("temperature"),
        top_k=_top_k(config),
        top_p=number("top_p"),
        min_p=number("min_p"),
        max_tokens=config.integer("max_new_tokens", minimum=1) if config.has("max_new_tokens") else None,
    )
    if greedy:
        defaults = GenerationDefaults(temperature=0.0, max_tokens=defaults.max_tokens)
    given = {name: value for name, value in asdict(defaults).items() if value is not None}
    try:
        SamplingParams(**given)
    except BadRequest as error:
        said = str(error).replace("max_tokens", "max_new_tokens")
        config.fail(f"{said}: requests that name none of their own would be refused; correct it, or take it out")
    return defaults


def _top_k(config: Fields) -> int | None:
    """-1 is how others spell "all of them"."""
    if not config.has("top_k"):
        return None
    value: object = config.take("top_k")
    if value == -1:
        return 0
    if type(value) is not int:
        config.fail(f"top_k must be a whole number, not {value!r}")
    return value


def ignored_defaults(config: Fields) -> dict[str, Any]:
    """The fields that would change answers and are not applied, with their values; long ones are cut, as text."""
    found: dict[str, Any] = {}
    for name in sorted(config.names()):
        if name in _HARMLESS or name in _APPLIED or not config.has(name):
            continue
        value = config.take(name)
        # Of what is empty or off, 0 alone may mean something, where 1 is what changes nothing.
        if value == _NEUTRAL.get(name) or value is False or value in ("", [], {}):
            continue
        found[name] = _shown(config, name, value)
    return found


def ignored_line(ignored: Mapping[str, Any]) -> str:
    """The line that names them."""
    fields = ", ".join(
        f"{name} {value if isinstance(value, str) else json.dumps(value)}" for name, value in ignored.items()
    )
    return f"generation_config.json: not applied: {fields}"


def _shown(config: Fields, name: str, value: object) -> object:
    """The value, or the beginning of its JSON."""
    try:
        text = json.dumps(value, allow_nan=False)
    except ValueError:
        config.fail(f"{name} holds a number that is not finite")
    return value if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
