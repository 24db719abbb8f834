"""Reads a checkpoint in Hugging Face's layout: config.json, safetensors and tokenizer."""
