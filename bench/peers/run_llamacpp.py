"""Measures llama.cpp through its Python binding: a batch of sequences that decode together, like its server's slots."""

import ctypes
import json
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
from protocol import measure, prompts, read_options
from safetensors import safe_open

KINDS = {"q4_0": "Q4_0", "q8_0": "Q8_0"}
BATCH = 512
TENSORS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def main() -> None:
    """Converts the checkpoint if needed, and prints the figures."""
    options = read_options(tuple(KINDS))
    for precision in options.precisions:
        is_file = options.checkpoint.suffix == ".gguf"  # runs as it is
        path = options.checkpoint if is_file else options.work / f"llamacpp-{precision}.gguf"
        if not path.exists():
            draft = path.with_suffix(".draft")
            convert(options.checkpoint, draft, KINDS[precision])
            draft.rename(path)
        if options.convert_only:
            continue
        requests = max(case[0] for case in options.cases)
        tokens = max(case[0] * (case[1] + case[2]) for case in options.cases)
        context = Context(path, requests=requests, tokens=tokens, threads=options.threads)
        measure(options, precision, context.run)
        context.close()


class Context:
    """A loaded model with room for `tokens` tokens of `requests` sequences, which computes on `threads` threads.

    Raises RuntimeError if llama.cpp fails.
    """

    def __init__(self, path: Path, *, requests: int, tokens: int, threads: int) -> None:
        llama_cpp.llama_backend_init()
        quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        self._quiet = quiet  # kept alive: C calls it
        llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
        params = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max, settings.kv_unified = tokens, requests, True
        settings.n_batch = settings.n_ubatch = BATCH
        settings.n_threads = settings.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        if not self._context:
            raise RuntimeError("llama.cpp made no context")
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)

    def close(self) -> None:
        """Frees the model and its context."""
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)

    def run(self, requests, prompt, new):
        """Runs a case; yields after the first tokens, and at the end (see `protocol.measure`)."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        ids = prompts(requests, prompt)
        rows = [(int(ids[s, p]), p, s, p == prompt - 1) for s in range(requests) for p in range(prompt)]
        last = [0] * requests
        for start in range(0, len(rows), BATCH):
            last = self._decode(rows[start : start + BATCH], last)
        yield
        for position in range(prompt, prompt + new - 1):
            last = self._decode([(last[s], position, s, True) for s in range(requests)], last)
        yield

    def _decode(self, rows, last):
        """Computes rows of (token, position, sequence, whether its logits are wanted).

        Returns the most likely next token of each sequence; `last` where none was wanted.
        """
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, int(wanted)
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if llama_cpp.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        chosen = list(last)
        for i, (_, _, sequence, wanted) in enumerate(rows):
            if wanted:
                logits = llama_cpp.llama_get_logits_ith(self._context, i)
                chosen[sequence] = int(np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax())
        return chosen


def convert(checkpoint: Path, path: Path, kind: str) -> None:
    """Writes the checkpoint as a GGUF file without a vocabulary, with matrices quantised as `kind`."""
    config = json.loads((checkpoint / "config.json").read_text())
    rope = config.get("rope_parameters") or config  # transformers 5 has an object of its own for it
    quant = getattr(gguf.GGMLQuantizationType, kind)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_tokenizer_model("no_vocab")
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, "np") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                add(writer, name, tensors.get_tensor(name).astype(np.float32), config, quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add(writer, name, tensor, config, quant) -> None:
    """Adds a tensor of the checkpoint to the GGUF file under the name that llama.cpp has for it."""
    target = TOP.get(name)
    if target is None:
        _, _, layer, rest = name.split(".", 3)
        target = f"blk.{layer}.{TENSORS[rest.removesuffix('.weight')]}.weight"
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for part, count in heads.items():
        if part in name:  # GGUF pairs neighbouring columns for the rotation, checkpoints pair halves
            halves = tensor.reshape(count, 2, tensor.shape[0] // count // 2, -1)
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
    if tensor.ndim == 1:
        writer.add_tensor(target, tensor)
    else:
        writer.add_tensor(target, gguf.quants.quantize(tensor, quant), raw_dtype=quant)


if __name__ == "__main__":
    main()
