"""Measures onnxruntime-genai: int4 weights, static batches."""

import json
import subprocess
import sys

import numpy as np
import onnxruntime_genai as og
from protocol import measure, prompts, read_options


def main() -> None:
    """Converts the checkpoint if needed, and prints the figures."""
    options = read_options(("int4",))
    for precision in options.precisions:
        folder = options.work / f"genai-{precision}"
        if not folder.exists():
            draft = options.work / f"genai-{precision}.draft"
            builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(options.checkpoint)]
            cache = options.work / "genai-cache"
            subprocess.run(
                [*builder, "-o", str(draft), "-p", precision, "-e", "cpu", "-c", str(cache)],
                check=True,
                stdout=sys.stderr,
            )
            draft.rename(folder)
        if options.convert_only:
            continue
        config = og.Config(str(folder))
        config.overlay(
            json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": options.threads}}}})
        )
        model = og.Model(config)

        def run(requests, prompt, new, model=model):
            params = og.GeneratorParams(model)
            params.set_search_options(max_length=prompt + new, min_length=prompt + new, batch_size=requests)
            generator = og.Generator(model, params)
            ids = prompts(requests, prompt).astype(np.int32)
            generator.append_tokens(ids if requests > 1 else ids[0])
            generator.generate_next_token()
            yield
            for _ in range(new - 1):
                generator.generate_next_token()
            yield

        measure(options, precision, run)


if __name__ == "__main__":
    main()
