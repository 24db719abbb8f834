"""Measures OpenVINO GenAI: continuous batching, weights of 8 or 4 bits."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import openvino
import openvino_genai
from protocol import measure_whole, prompts, read_options

WEIGHTS = {"int8": ["int8"], "int4": ["int4", "--sym", "--group-size", "128", "--ratio", "1.0"]}
KV_GIB = 4


def main() -> None:
    """Converts the checkpoint if needed, and prints the figures."""
    options = read_options(("int4", "int8"))
    for precision in options.precisions:
        folder = options.work / f"openvino-{precision}"
        if not folder.exists():
            convert(options.checkpoint, folder, precision)
        if options.convert_only:
            continue
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_seqs, scheduler.enable_prefix_caching = KV_GIB, 64, False
        properties = {"INFERENCE_NUM_THREADS": options.threads}
        pipeline = openvino_genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)

        def seconds(requests, prompt, new, pipeline=pipeline):
            config = openvino_genai.GenerationConfig(max_new_tokens=new, ignore_eos=True)
            config.do_sample = False
            ids = [openvino.Tensor(row[None].astype(np.int64)) for row in prompts(requests, prompt)]
            started = time.perf_counter()
            pipeline.generate(ids, [config] * requests)
            return time.perf_counter() - started

        measure_whole(options, precision, seconds)  # it returns only when all requests of a batch have ended


def convert(checkpoint: Path, folder: Path, precision: str) -> None:
    """Converts the checkpoint with optimum-cli."""
    draft = folder.with_suffix(".draft")
    command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "--model", str(checkpoint)]
    subprocess.run(
        [*command, "--task", "text-generation-with-past", "--weight-format", *WEIGHTS[precision], str(draft)],
        check=True,
        stdout=sys.stderr,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )
    draft.rename(folder)


if __name__ == "__main__":
    main()
