"""The routes of the tokenizer: text to tokens and back, and what it is, in the forms of vLLM."""
