"""Trains the bundled model from its initial weights and writes a Hugging Face folder.

    python -m blockrelay_storyteller.train FIRST [--device cpu|cuda] [--threads 2]
    python -m blockrelay_storyteller.train OUT --polish FIRST

The training data are generated during the training. The same arguments on the same machine give the same data, on any
device.
"""

import argparse
import json
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from blockrelay_storyteller import model, muon
from blockrelay_storyteller.corpus import token_streams
from blockrelay_storyteller.corpus.documents import CHAT_TEMPLATE, END_OF_TEXT, SPECIALS, Document, document

log = logging.getLogger("train")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPhase:
    """A part of the training."""

    share: float
    """Share of all tokens, 0 to 1."""
    length: int
    """Tokens of a row."""
    beats: tuple[int, int]
    """Least and most events of a story."""
    drill: bool = False
    """True if the documents are drills (see `documents.document`)."""
    joined: bool = False
    """True if attention runs through the whole row: the model learns to ignore the past after an end of text."""
    answer_weight: int = 2
    """Weight of a token of an answer in the loss; all others have 1."""


#: Drills come first: they teach the model to bind names to things. Long rows come last: they teach the late positions.
PHASES = (
    TrainingPhase(share=0.27, length=128, beats=(0, 3), drill=True, answer_weight=8),
    TrainingPhase(share=0.55, length=256, beats=(1, 6)),
    TrainingPhase(share=0.12, length=512, beats=(2, 10)),
    TrainingPhase(share=0.06, length=1024, beats=(3, 14), joined=True),
)


#: A second training from the weights of the first one: whole stories, so that the model learns to end them.
POLISH = (TrainingPhase(share=1.0, length=512, beats=(2, 7), answer_weight=1),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The hyperparameters of a training: all that the result depends on, besides the shape and the machine.

    `batch` is in tokens per step. `matrix_rate` and `other_rate` are peak learning rates, reached after 30 steps.
    `decay` is the share of the training in which they fall, in a straight line, to 2 % of the peak. `quantised` is the
    share of steps, at the end, that round as the w8a8 executor does.
    """

    tokens: int = 4_200_000
    phases: tuple[TrainingPhase, ...] = PHASES
    seed: str = "bundled"
    batch: int = 2048
    matrix_rate: float = 0.006
    other_rate: float = 0.0015
    decay: float = 0.6
    quantised: float = 0.0
    tokenizer_documents: int = 20_000


#: Fields of the Recipe for POLISH: lower learning rates, and documents of its own.
POLISH_RECIPE = {
    "tokens": 1_500_000,
    "phases": POLISH,
    "seed": "polish",
    "matrix_rate": 0.004,
    "other_rate": 0.001,
    "decay": 0.9,
}


def batches(tokenizer: token_streams.Tokenizer, recipe: Recipe) -> Iterator[tuple[float, token_streams.Rows]]:
    """Yields (progress from 0 to 1, rows of about `recipe.batch` tokens) until all phases are done."""
    done = 0
    for number, phase in enumerate(recipe.phases):
        stream = _stream(f"{recipe.seed}:{number}", phase)
        rows = max(1, recipe.batch // phase.length)
        until = sum(p.share for p in recipe.phases[: number + 1]) * recipe.tokens
        while done < until - recipe.batch // 2:
            many = token_streams.pack(
                tokenizer,
                stream,
                rows=rows * 32,
                length=phase.length,
                answer_weight=phase.answer_weight,
                joined=phase.joined,
            )
            for first in range(0, rows * 32, rows):
                if done >= until - recipe.batch // 2:
                    break
                part = slice(first, first + rows)
                yield (
                    done / recipe.tokens,
                    token_streams.Rows(ids=many.ids[part], weights=many.weights[part], owner=many.owner[part]),
                )
                done += rows * phase.length


def _stream(seed: str, phase: TrainingPhase) -> Iterator[Document]:
    return (document(seed, index, beats=phase.beats, drill=phase.drill) for index in count())


def losses_of(net: model.TorchLlama, rows: token_streams.Rows, device: str, autocast: bool) -> tuple[Tensor, Tensor]:
    """Returns two losses in nats per token: the weighted mean to train on, and the mean over answers.

    Answers are recognised by a weight above 1: the second is NaN if `rows` have none. With `autocast`, the net computes
    in bfloat16.
    """
    ids = torch.from_numpy(rows.ids.astype("int64")).to(device)
    weights = torch.from_numpy(rows.weights.astype("float32")).to(device)[:, 1:].reshape(-1)
    owner = torch.from_numpy(rows.owner).to(device)
    length = ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    mask = (owner[:, None, :, None] == owner[:, None, None, :]) & causal
    with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
        logits = net(ids, mask)
    wanted = torch.nonzero(weights).squeeze(1)
    logits = logits[:, :-1].reshape(-1, logits.shape[-1])[wanted]
    losses = F.cross_entropy(logits.float(), ids[:, 1:].reshape(-1)[wanted], reduction="none")
    answers = losses.detach()[weights[wanted] > 1]
    return (losses * weights[wanted]).sum() / weights.sum(), answers.mean()


def train(
    recipe: Recipe,
    net: model.TorchLlama,
    tokenizer: token_streams.Tokenizer,
    device: str,
    *,
    autocast: bool,
    snapshots: Path,
) -> model.TorchLlama:
    """Trains `net` in place and returns it.

    Logs the mean loss every 50 steps, and raises SystemExit if that is not finite. Writes the Hugging Face folder to
    `snapshots` every 250 steps. With `autocast`, the net computes in bfloat16. `device` is "cpu" or "cuda".
    """
    net.to(device)
    matrices = [p for p in net.model.layers.parameters() if p.ndim == 2]
    others = [p for name, p in net.named_parameters() if p.ndim != 2 or "layers" not in name]
    optimisers: list[torch.optim.Optimizer] = [
        muon.Muon(matrices, lr=recipe.matrix_rate),
        torch.optim.Adam(others, lr=recipe.other_rate, betas=(0.9, 0.95), eps=1e-10, fused=True),
    ]
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["base"] = group["lr"]
    started = time.monotonic()
    shown, tokens = [], 0
    for step, (progress, rows) in enumerate(batches(tokenizer, recipe)):
        net.quantise(progress >= 1 - recipe.quantised)
        factor = min(1.0, (step + 1) / 30, max(0.02, (1 - progress) / recipe.decay))
        loss, answers = losses_of(net, rows, device, autocast)
        loss.backward()
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = group["base"] * factor
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        tokens += rows.ids.size
        shown.append(torch.stack((loss.detach(), answers)))
        if step % 50 == 49:
            mean, answer_mean = torch.stack(shown).mean(0).tolist()
            seconds = time.monotonic() - started
            log.info(
                "step %d  %d tokens  %.0f s  loss %.4f  of answers %.4f", step + 1, tokens, seconds, mean, answer_mean
            )
            shown.clear()
            if step % 250 == 249:
                save(net, tokenizer, snapshots)
            if not math.isfinite(mean):
                raise SystemExit("the loss is not finite")
    net.quantise(False)
    log.info("trained on %d tokens in %.0f s", tokens, time.monotonic() - started)
    return net


def save(net: model.TorchLlama, tokenizer: token_streams.Tokenizer, folder: Path) -> None:
    """Writes the Hugging Face folder: weights, config, tokenizer, chat template, generation defaults."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save(net, folder)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    ends = [0, 1]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "bos_token": None,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": net.shape.positions,
        "chat_template": CHAT_TEMPLATE,
        "additional_special_tokens": list(SPECIALS[1:]),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    generation = {"eos_token_id": ends, "pad_token_id": 0, "do_sample": False, "max_new_tokens": 256}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def main() -> None:
    """Runs the command line: trains the model and writes it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--polish", type=Path, help="checkpoint to train further, on whole stories")
    parser.add_argument("--recipe", type=json.loads, default={}, help="fields of Recipe that differ, as JSON")
    parser.add_argument("--shape", type=json.loads, default={}, help="fields of Shape that differ, as JSON")
    parser.add_argument("--float32", action="store_true", help="no bfloat16 arithmetic")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(options.threads)
    torch.set_float32_matmul_precision("high")
    if options.polish:
        recipe = Recipe(**POLISH_RECIPE | options.recipe)
        net, tokenizer = model.load(options.polish), token_streams.load_tokenizer(options.polish)
    else:
        recipe = Recipe(**options.recipe)
        torch.manual_seed(0)
        net = model.TorchLlama(model.Shape(**options.shape))
        tokenizer = token_streams.train_tokenizer(
            recipe.seed, vocab=net.shape.vocab, documents=recipe.tokenizer_documents
        )
    log.info("%s\n%s", recipe, net.shape)
    net = train(recipe, net, tokenizer, options.device, autocast=not options.float32, snapshots=options.out)
    save(net, tokenizer, options.out)


if __name__ == "__main__":
    main()
