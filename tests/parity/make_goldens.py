"""Makes goldens.json anew with transformers, in float32: `python -m tests.parity.make_goldens`. Needs torch.

Greedy tokens, end tokens ignored, the whole sequence computed again for each token (no cache that could be wrong).
With --check nothing is written; a difference from the committed file is an error.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.models.parity_cases import CASES, GOLDENS, NEW_TOKENS, Case, checkpoint_sha256, goldens

SAFE_MARGIN = 0.01
"""Below this distance of the two largest logits another order of additions might choose the other token."""


def golden(case: Case) -> dict[str, Any]:
    """What transformers answers for one case."""
    import torch  # pyright: ignore[reportMissingImports]  (only `make parity` installs them)
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    with tempfile.TemporaryDirectory() as folder:
        path = case.write(Path(folder) / "checkpoint")
        digest = checkpoint_sha256(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    prompt = case.prompt()
    tokens: list[int] = []
    margins: list[float] = []
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            logits = model(input_ids=torch.tensor([prompt + tokens]), use_cache=False).logits[0, -1]
            first, second = torch.topk(logits, 2).values.tolist()
            tokens.append(int(logits.argmax()))
            margins.append(first - second)
    return {"sha256": digest, "prompt": prompt, "tokens": tokens, "smallest_margin": round(min(margins), 4)}


def main() -> int:
    """Write or check the goldens. 1 if a margin is too small or, with --check, on a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the committed file instead of writing it")
    check = parser.parse_args().check
    made = {case.name: golden(case) for case in CASES}
    failed = False
    for name, found in made.items():
        safe = found["smallest_margin"] >= SAFE_MARGIN
        distinct = len(set(found["tokens"]))
        sys.stdout.write(f"{name:14} smallest margin {found['smallest_margin']:.4f}, {distinct} distinct tokens\n")
        if not safe:
            sys.stderr.write(f"{name}: margin below {SAFE_MARGIN}: choose another seed\n")
            failed = True
    if check:
        committed = goldens()
        for name in sorted(made.keys() | committed.keys()):
            same = {
                key: committed.get(name, {}).get(key) == made.get(name, {}).get(key)
                for key in ("sha256", "prompt", "tokens")
            }
            for key in (key for key, equal in same.items() if not equal):
                sys.stderr.write(f"{name}: {key} differs from the committed golden\n")
                failed = True
    elif not failed:
        lines = [f" {json.dumps(name)}: {json.dumps(found)}" for name, found in made.items()]
        GOLDENS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
