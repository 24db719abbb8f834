"""Exports every model of one exporter, in its environment: `python -m tests.parity.exporters.export optimum`.

What each exporter writes is left as it is: what real exporters write is what has to be served.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.support.models.exports import CASES, EXPORTS, Export, Exporter, write_model


def by_optimum(export: Export, model: Path, out: Path) -> None:
    """As `optimum-cli export onnx` does."""
    import torch  # pyright: ignore[reportMissingImports]
    from optimum.exporters.onnx import onnx_export_from_model  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    dtype = torch.float16 if export.kind == "fp16" else torch.float32
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    onnx_export_from_model(loaded, output=out, task="text-generation-with-past", do_validation=False)


def by_torch(export: Export, model: Path, out: Path) -> None:
    """By `torch.onnx.export` with dynamo, which wants the module to take and give its cache as tensors."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, DynamicCache  # pyright: ignore[reportMissingImports]

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()

    class WithCache(torch.nn.Module):  # pyright: ignore[reportUntypedBaseClass]
        def __init__(self) -> None:
            super().__init__()
            self.model = loaded

        def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any, past: Any) -> Any:
            cache = DynamicCache()
            for layer, (key, value) in enumerate(past):
                cache.update(key, value, layer)
            found = self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=cache,
                use_cache=True,
            )
            return found.logits, [(layer.keys, layer.values) for layer in found.past_key_values.layers]

    config, (batch, new, behind) = loaded.config, (2, 3, 5)
    of_cache = (batch, config.num_key_value_heads, behind, config.head_dim)
    past = [(torch.randn(of_cache), torch.randn(of_cache)) for _ in range(config.num_hidden_layers)]
    given = (
        torch.ones(batch, new, dtype=torch.long),
        torch.ones(batch, behind + new, dtype=torch.long),
        torch.arange(behind, behind + new).repeat(batch, 1),
        past,
    )
    rows, tokens, length = (torch.export.Dim(name, min=1, max=400) for name in ("batch", "new", "past"))
    one = {0: rows, 2: length}
    shapes = (
        {0: rows, 1: tokens},
        {0: rows, 1: torch.export.Dim.AUTO},
        {0: rows, 1: tokens},
        [(one, one)] * config.num_hidden_layers,
    )
    program = torch.onnx.export(WithCache(), given, dynamic_shapes=shapes, dynamo=True, external_data=True)
    program.save(out / "model.onnx", external_data=True)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, out)


def by_genai(export: Export, model: Path, out: Path) -> None:
    """By the builder, as people run it."""
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", model, "-o", out]
    with tempfile.TemporaryDirectory() as cache:
        subprocess.run([*command, "-p", export.kind, "-e", "cpu", "-c", cache], check=True)


EXPORTERS: Mapping[Exporter, Callable[[Export, Path, Path], None]] = {
    "optimum": by_optimum,
    "torch": by_torch,
    "genai": by_genai,
}


def main() -> None:
    """Writes anew what is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("exporter", choices=EXPORTERS)
    exporter: Exporter = parser.parse_args().exporter
    os.environ["HF_HUB_OFFLINE"] = "1"  # everything is here
    shutil.rmtree(EXPORTS / exporter, ignore_errors=True)
    for export in (case for case in CASES if case.exporter == exporter):
        out = export.file.parent
        out.mkdir(parents=True)
        with tempfile.TemporaryDirectory() as folder:
            EXPORTERS[exporter](export, write_model(export.model, Path(folder) / export.model), out)
        if not export.file.is_file():
            raise FileNotFoundError(export.file)


if __name__ == "__main__":
    main()
