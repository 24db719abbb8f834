"""config.json: what each family means, both spellings, and a refusal by field for what we do not compute."""

import json
from typing import Any

import pytest

from blockrelay.errors import UnsupportedModel, UsageError
from blockrelay_converter.checkpoint.config import Rotary, SourceConfig, read_config

BASE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 2048,
}


def read(max_position: int | None = None, **changes: Any) -> SourceConfig:
    return read_config(json.dumps(BASE | changes).encode(), max_position=max_position)


def test_the_defaults_are_those_of_transformers() -> None:
    config = read()
    assert config.model.head_dim == 16
    assert config.model.rms_norm_eps == 1e-6
    assert not config.tied
    assert config.rotary == Rotary(type="default", theta=10000.0)
    assert config.model.eos_ids == ()
    assert config.model.bos_id is None
    without = {key: value for key, value in BASE.items() if key != "num_key_value_heads"}
    assert read_config(json.dumps(without).encode()).model.kv_heads == 4
    assert read_config(json.dumps(without | {"num_key_value_heads": None}).encode()).model.kv_heads == 4
    assert read(model_type="qwen3").model.head_dim == 128
    assert read(head_dim=24).model.head_dim == 24
    assert read(head_dim=None).model.head_dim == 16
    assert read(head_dim=256).model.head_dim == 256


PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-2-7b": {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "vocab_size": 32000,
    },
    "Llama-3.2-1B-Instruct": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    },
    "Mistral-7B-v0.3": {
        "architectures": ["MistralForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 32768,
    },
    "Qwen2.5-0.5B-Instruct": {
        "architectures": ["Qwen2ForCausalLM"],
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_act": "silu",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 21,
        "model_type": "qwen2",
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
}


@pytest.mark.parametrize(
    ("name", "head_dim", "tied", "rotary_type"),
    [
        ("Llama-2-7b", 128, False, "default"),
        ("Llama-3.2-1B-Instruct", 64, True, "llama3"),
        ("Mistral-7B-v0.3", 128, False, "default"),
        ("Qwen2.5-0.5B-Instruct", 64, True, "default"),
        ("Qwen3-0.6B", 128, True, "default"),
    ],
)
def test_published_models_are_read(name: str, head_dim: int, tied: bool, rotary_type: str) -> None:
    config = read_config(json.dumps(PUBLISHED[name]).encode())
    assert (config.model.head_dim, config.tied, config.rotary.type) == (head_dim, tied, rotary_type)


def test_families_differ_in_bias_and_head_norms() -> None:
    found = {
        family: (config.model.qkv_bias, config.model.qk_norm)
        for family in ("llama", "mistral", "qwen2", "qwen3")
        if (config := read(model_type=family, sliding_window=None))
    }
    assert found == {
        "llama": (False, False),
        "mistral": (False, False),
        "qwen2": (True, False),
        "qwen3": (False, True),
    }


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"rope_theta": 5e5}, Rotary(type="default", theta=5e5)),
        ({"rope_theta": 5e5, "rope_scaling": None}, Rotary(type="default", theta=5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, Rotary(type="default", theta=5e5)),
        ({"rope_theta": 7.0, "rope_parameters": {"rope_theta": 5e5}}, Rotary(type="default", theta=5e5)),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            Rotary(type="linear", theta=10000.0, factor=2.0),
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
            Rotary(type="linear", theta=5e5, factor=2.0),
        ),
    ],
)
def test_both_spellings_of_the_rotary_embedding_are_read(fields: dict[str, Any], expected: Rotary) -> None:
    assert read(**fields).rotary == expected


def test_llama3_scaling_is_read_in_both_spellings() -> None:
    expected = Rotary(
        type="llama3", theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=2048
    )
    assert read(rope_theta=5e5, rope_scaling=LLAMA3).rotary == expected
    assert read(rope_parameters={**LLAMA3, "rope_theta": 5e5}).rotary == expected


def test_end_tokens_are_one_or_several() -> None:
    assert read(eos_token_id=2).model.eos_ids == (2,)
    assert read(eos_token_id=[5, 2, 5]).model.eos_ids == (5, 2)
    assert read(eos_token_id=None).model.eos_ids == ()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"model_type": "mixtral"}, "model_type"),
        ({"model_type": "gemma2"}, "model_type"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"num_experts": 2}, "num_experts"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "rope_parameters.partial_rotary_factor",
        ),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"head_dim": 20}, "head_dim"),
        ({"head_dim": 264}, "head_dim"),
        ({"hidden_size": 2048}, "head_dim"),  # 4 heads of 512
        ({"hidden_size": 2}, "head_dim"),  # of 0
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_scaling.rope_type"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.rope_type"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters.full_attention"),
        ({"rope_scaling": {**LLAMA3, "attention_factor": 1.3}}, "rope_scaling.attention_factor"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window"),
        ({"model_type": "mistral"}, "sliding_window"),  # absent means 4096 there
        ({"model_type": "mistral", "sliding_window": None, "layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 2}, "sliding_window"),
        ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["sliding_attention"]}, "sliding_window"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias"),
    ],
)
def test_what_we_do_not_compute_is_refused_by_its_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        read(**fields)
    assert caught.value.field == field
    assert field.split(".")[-1] in str(caught.value) or "rope_type" in field
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"sliding_window": 8192},
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "mistral", "sliding_window": 8192},
        {"model_type": "mistral", "max_position_embeddings": 4096},
        {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 16},
        {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 4},
        {"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["full_attention"] * 4},
        {"attention_bias": False, "mlp_bias": False, "num_experts": None, "partial_rotary_factor": 1.0},
        {"attention_dropout": 0.1, "pretraining_tp": 1, "use_cache": True, "torch_dtype": "bfloat16"},
        {"architectures": ["LlamaForCausalLM"], "dtype": "float16"},
    ],
)
def test_what_is_off_or_irrelevant_does_no_harm(fields: dict[str, Any]) -> None:
    read(**fields)


def test_a_window_is_no_obstacle_in_a_context_that_fits_into_it() -> None:
    fields: dict[str, Any] = {"model_type": "mistral", "sliding_window": 4096}
    with pytest.raises(UnsupportedModel, match="--max-position 4096 converts it"):
        read(**fields)
    assert read(max_position=4096, **fields).model.max_position == 4096
    with pytest.raises(UsageError, match="--max-position 8193 is beyond the model's context of 8192"):
        read(max_position=8193)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size must be an integer"),
        ({"num_attention_heads": 0}, "num_attention_heads must be an integer of at least 1"),
        ({"num_attention_heads": 5}, "num_attention_heads 5 is not a multiple of num_key_value_heads 2"),
        ({"rope_theta": "big"}, "rope_theta must be a finite number"),
        ({"rope_theta": -1.0}, "rope_theta must be positive"),
        ({"rope_theta": 0, "rope_scaling": {"rope_type": "default"}}, "rope_theta must be positive"),
        ({"rope_scaling": {"rope_type": "linear"}}, "field 'factor' is missing"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "low_freq_factor must be positive and below"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id or a list of token ids"),
        ({"eos_token_id": [-1]}, "eos_token_id must be a token id or a list of token ids"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
    ],
)
def test_nonsense_is_refused_by_its_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=r"config\.json") as caught:
        read(**fields)
    assert message in str(caught.value)


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(UsageError, match=r"config\.json: not JSON"):
        read_config(b"{")
