"""What is exported: tiny models with random weights, each by an exporter that people use.

This module is read where torch is and where it is not.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tests.support.models.checkpoints import write_checkpoint, write_tokenizer
from tests.support.project import ROOT

Exporter = Literal["optimum", "torch", "genai"]
Model = Literal["llama", "qwen3", "gpt2", "phi3"]
Kind = Literal["fp32", "fp16", "int4"]

#: `make parity-exporters` fills it: EXPORTS/exporter/name/model.onnx.
EXPORTS = ROOT / "build" / "exporters"
VOCABULARY = 512
LAYERS = 4

#: Of `write_checkpoint`.
CHECKPOINTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"seed": 71, "head_dim": 16, "intermediate_size": 160, "vocab_size": VOCABULARY},
    "qwen3": {
        "seed": 610,
        "family": "qwen3",
        "head_dim": 32,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": True,
        "rope_theta": 1000000.0,
    },
}
#: Of `transformers`, in its own names.
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {
        "n_embd": 64,
        "n_head": 4,
        "n_layer": LAYERS,
        "n_positions": 512,
        "initializer_range": 0.5,
    },
    "phi3": {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "original_max_position_embeddings": 512,
        "pad_token_id": 0,
        "initializer_range": 0.2,
    },
}


@dataclass(frozen=True, slots=True)
class Export:
    """A model as one exporter writes it, in one precision."""

    exporter: Exporter
    model: Model
    kind: Kind = "fp32"

    @property
    def name(self) -> str:
        return f"{self.model}-{self.kind}"

    @property
    def is_llama(self) -> bool:
        """Whether `blockrelay import` knows such layers. Phi-3's are Llama's, with several weights in one."""
        return self.model != "gpt2"

    @property
    def file(self) -> Path:
        """The whole model."""
        return EXPORTS / self.exporter / self.name / "model.onnx"


CASES = (
    Export("optimum", "llama"),
    Export("optimum", "llama", "fp16"),
    Export("optimum", "qwen3"),
    Export("optimum", "gpt2"),
    Export("optimum", "phi3"),
    Export("torch", "llama"),
    Export("torch", "qwen3"),
    Export("genai", "llama"),
    Export("genai", "llama", "int4"),
)


def write_model(model: Model, folder: Path) -> Path:
    """A checkpoint with a tokenizer in `folder`. Those of `CONFIGS` need torch and transformers."""
    if model in CHECKPOINTS:
        return write_checkpoint(folder, **CHECKPOINTS[model])
    import torch  # pyright: ignore[reportMissingImports]  (only the exporters' environments have them)
    from transformers import AutoConfig, AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    torch.manual_seed(73)
    told = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(model, **told, **CONFIGS[model])
    AutoModelForCausalLM.from_config(config).eval().save_pretrained(folder)
    write_tokenizer(folder, vocab_size=VOCABULARY)
    return folder
