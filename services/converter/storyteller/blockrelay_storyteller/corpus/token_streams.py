"""Turns documents into token ids: trains the tokenizer, and packs documents into rows for training."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from blockrelay_storyteller.corpus.documents import SPECIALS, Document, document, text_of

#: Number of rows filled at the same time; more of them leave less padding.
_OPEN_ROWS = 64


def train_tokenizer(seed: str, *, vocab: int, documents: int) -> Tokenizer:
    """Trains a byte-level BPE tokenizer on the first `documents` documents of the stream `seed`.

    It has at most `vocab` tokens. The special tokens have the first ids, in the order of SPECIALS.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text_of(document(seed, index)) for index in range(documents)), trainer)
    return tokenizer


def load_tokenizer(folder: Path) -> Tokenizer:
    """Reads the tokenizer.json in `folder`."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Packed rows of training tokens; all arrays are [rows, length]."""

    ids: NDArray[np.uint16]
    weights: NDArray[np.uint8]
    """Weight of a token as a target; 0 for padding and, unless documents are joined, the first token of each."""
    owner: NDArray[np.uint8]
    """Number of the document within the row, so that attention can stay within one; 255 for padding."""


def encode(tokenizer: Tokenizer, segments: Document, answer_weight: int) -> tuple[list[int], list[int]]:
    """Returns the ids and target weights of one document: `answer_weight` for tokens of answers, 1 for others."""
    ids: list[int] = []
    weights: list[int] = []
    for segment in segments:
        piece: list[int] = tokenizer.encode(segment.text).ids
        ids += piece
        weights += [answer_weight if segment.question else 1] * len(piece)
    return ids, weights


def pack(
    tokenizer: Tokenizer, documents: Iterator[Document], *, rows: int, length: int, answer_weight: int, joined: bool
) -> Rows:
    """Fills `rows` rows with whole documents, each where it fits best; a document longer than a row is cut.

    `documents` must not end before all rows are full. The up to _OPEN_ROWS rows that are open then are dropped with
    their documents. `length` is the tokens of a row. Tokens of answers weigh `answer_weight` (up to 255), others 1.
    With `joined`, the documents of a row count as one; else a row has room for 255 at most. Ids must be below 65536.
    """
    closed: list[tuple[list[int], list[int], list[int]]] = []
    open_rows: list[tuple[list[int], list[int], list[int]]] = []
    while len(closed) < rows:
        ids, weights = encode(tokenizer, next(documents), answer_weight)
        ids, weights = ids[:length], weights[:length]
        fitting = [row for row in open_rows if len(row[0]) + len(ids) <= length]
        row = max(fitting, key=lambda row: len(row[0])) if fitting else ([], [], [])
        if not fitting:
            open_rows.append(row)
        if not joined:
            weights[0] = 0
        row[2].extend([row[2][-1] + 1 if row[2] and not joined else 0] * len(ids))
        row[0].extend(ids)
        row[1].extend(weights)
        if len(open_rows) > _OPEN_ROWS:
            open_rows.sort(key=lambda row: len(row[0]))
            closed.append(open_rows.pop())
    result = Rows(
        ids=np.zeros((rows, length), np.uint16),
        weights=np.zeros((rows, length), np.uint8),
        owner=np.full((rows, length), 255, np.uint8),
    )
    for index, (ids, weights, owner) in enumerate(closed):
        result.ids[index, : len(ids)] = ids
        result.weights[index, : len(ids)] = weights
        result.owner[index, : len(ids)] = owner
    return result
