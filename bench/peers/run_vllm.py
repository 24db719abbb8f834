"""Measures vLLM on the CPU: continuous batching, bfloat16 weights."""

import os
import time

from protocol import measure_whole, prompts, read_options

KV_GIB = 2


def main() -> None:
    """Prints the figures."""
    options = read_options(("bf16",))
    if options.convert_only:
        return
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(KV_GIB))
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{options.threads - 1}")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm import LLM, SamplingParams  # reads the variables above

    longest = max(prompt + new for _, prompt, new in options.cases)
    llm = LLM(
        str(options.checkpoint),
        dtype="bfloat16",
        max_model_len=longest,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=True,
    )

    def seconds(requests, prompt, new):
        params = SamplingParams(max_tokens=new, min_tokens=new, ignore_eos=True, temperature=0, detokenize=False)
        inputs = [{"prompt_token_ids": row.tolist()} for row in prompts(requests, prompt)]
        started = time.perf_counter()
        llm.generate(inputs, params, use_tqdm=False)
        return time.perf_counter() - started

    measure_whole(options, "bf16", seconds)


if __name__ == "__main__":
    main()
