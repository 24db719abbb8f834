"""The pages of docs/ that are made from the code: `python -m docs.generate` writes them (`make docs-pages`)."""
