"""Reads a model's generation_config.json: the defaults of requests, and the fields that we cannot apply."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from blockrelay.block_folder.manifest import GenerationDefaults
from blockrelay.block_folder.strict_json import Fields
from blockrelay.errors import BadRequest
from blockrelay.protocol.sampling_params import SamplingParams

#: Fields that do not change which tokens are generated: ids that other code reads, and settings of transformers.
_HARMLESS = frozenset(
    (
        *("_from_model_config", "transformers_version", "_commit_hash", "do_sample", "pad_token_id", "bos_token_id"),
        *("eos_token_id", "decoder_start_token_id", "use_cache", "use_mtp", "cache_implementation", "cache_config"),
        *("max_cache_len", "prefill_chunk_size", "compile_config", "disable_compile", "continuous_batching_config"),
        *("low_memory", "return_dict_in_generate", "output_attentions", "output_hidden_states", "output_scores"),
        *("output_logits", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule"),
        *("assistant_confidence_threshold", "prompt_lookup_num_tokens", "max_matching_ngram_size"),
        *("assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight"),
        *("speculation_type", "early_stopping", "length_penalty"),  # the last two are for beams; num_beams is reported
    )
)
#: Values with which a field changes nothing. null, false, and empty lists, objects and strings change nothing either.
_NEUTRAL: Mapping[str, float] = {
    **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "diversity_penalty", "presence_penalty", "frequency_penalty"), 0),
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences", "typical_p"), 1),
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale"), 1),
    "max_length": 20,  # what transformers writes by default
}
_APPLIED = ("temperature", "top_k", "top_p", "min_p", "max_new_tokens", "repetition_penalty")
_LONGEST = 200
"""Most characters of a value that is reported."""


def generation_defaults(config: Fields) -> GenerationDefaults:
    """Returns the defaults of requests from generation_config.json, `config`.

    A config with `do_sample` false makes requests greedy. A `repetition_penalty` of 1, which changes nothing, is left
    out, so that the hash of a folder is the one that earlier releases made. Raises the error of `config` (`Fields`)
    that names a value of another type, or one for which every request without its own would be refused.
    """

    def number(name: str) -> float | None:
        return config.number(name) if config.has(name) else None

    greedy = config.has("do_sample") and not config.flag("do_sample")
    defaults = GenerationDefaults(
        temperature=number("temperature"),
        top_k=_top_k(config),
        top_p=number("top_p"),
        min_p=number("min_p"),
        max_tokens=config.integer("max_new_tokens", minimum=1) if config.has("max_new_tokens") else None,
        repetition_penalty=None if (penalty := number("repetition_penalty")) == 1 else penalty,
    )
    if greedy:
        defaults = replace(defaults, temperature=0.0, top_k=None, top_p=None, min_p=None)
    given = {name: value for name, value in asdict(defaults).items() if value is not None}
    try:
        SamplingParams(**given)
    except BadRequest as error:
        problem = str(error).replace("max_tokens", "max_new_tokens")
        config.fail(f"{problem}: requests that name none of their own would be refused; correct it, or take it out")
    return defaults


def _top_k(config: Fields) -> int | None:
    """Returns top_k, and 0 (all tokens) for -1, which other engines use for that; None without the field."""
    if not config.has("top_k"):
        return None
    value: object = config.take("top_k")
    if value == -1:
        return 0
    if type(value) is not int:
        config.fail(f"top_k must be a whole number, not {value!r}")
    return value


def ignored_defaults(config: Fields) -> dict[str, Any]:
    """Returns the fields of `config` that would change answers and are not applied, with their values.

    Values longer than _LONGEST characters of JSON are cut, as text. Raises the error of `config` (`Fields`) for a
    number that is not finite.
    """
    ignored: dict[str, Any] = {}
    for name in sorted(config.names()):
        if name in _HARMLESS or name in _APPLIED or not config.has(name):
            continue
        value = config.take(name)
        # 0 is not in the list of empty values: for fields such as typical_p it is not neutral.
        if value == _NEUTRAL.get(name) or value is False or value in ("", [], {}):
            continue
        ignored[name] = _shown(config, name, value)
    return ignored


def ignored_line(ignored: Mapping[str, Any]) -> str:
    """Returns a line for people that names the fields of `ignored_defaults` and their values."""
    fields = ", ".join(
        f"{name} {value if isinstance(value, str) else json.dumps(value)}" for name, value in ignored.items()
    )
    return f"generation_config.json: not applied: {fields}"


def _shown(config: Fields, name: str, value: object) -> object:
    """Returns `value`, or the first _LONGEST characters of its JSON if that is longer."""
    try:
        text = json.dumps(value, allow_nan=False)
    except ValueError:
        config.fail(f"{name} holds a number that is not finite")
    return value if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
