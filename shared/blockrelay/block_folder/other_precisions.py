"""Opens the block folders of one checkpoint in several precisions, and checks that they belong together."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.block_folder.manifest import TOKENIZER_NAME
from blockrelay.errors import UsageError

#: Embeddings of this many tokens, spread over the vocabulary, are compared.
_TOKENS = 64
#: Largest difference between their products, as a share of these, in two folders of one checkpoint. float16 changes
#: them by less than a thousandth; those of another checkpoint have nothing in common.
_CLOSE = 0.02


def open_precisions(folder: BlockFolder, others: Sequence[Path]) -> tuple[BlockFolder, ...]:
    """Returns `folder` and the `others`, which hold the same model in other precisions; no weights are read but a few
    embeddings.

    Raises UsageError, one line, for a folder of another model, vocabulary or context, for ONNX blocks made by others,
    and for two folders of one precision. Raises BlockFolderError for a folder that cannot be opened.
    """
    found = [folder]
    for path in others:
        other = open_block_folder(path, blocks=[])
        if (why := _difference(folder, other)) is not None:
            raise UsageError(
                f"{path} is not {folder.root} in another precision: {why}. Convert the same checkpoint with another "
                "--precision"
            )
        if same := [one for one in found if one.manifest.precision == other.manifest.precision]:
            raise UsageError(f"{path} and {same[0].root} are both {other.manifest.precision}: leave one of them out")
        found.append(other)
    return tuple(found)


def _difference(folder: BlockFolder, other: BlockFolder) -> str | None:
    """Returns in what two folders differ that are one model in two precisions, in words; None if they may be."""
    if folder.model.onnx_blocks is not None or other.model.onnx_blocks is not None:
        return "ONNX blocks made by others have one precision"
    mine, theirs = folder.model, replace(other.model, name=folder.model.name)
    if mine.max_position != theirs.max_position:
        return f"its context is {theirs.max_position} tokens, not {mine.max_position}"
    if mine != theirs:
        return "it has another shape"
    tokenizers = [one.manifest.files.get(TOKENIZER_NAME) for one in (folder, other)]
    if tokenizers[0] != tokenizers[1]:
        return "it has another tokenizer"
    products = [_products(one) for one in (folder, other)]
    if np.linalg.norm(products[0] - products[1]) > _CLOSE * np.linalg.norm(products[0]):
        return "it has other embeddings, so it comes from another checkpoint"
    return None


def _products(folder: BlockFolder) -> NDArray[np.float64]:
    """Returns the products of some tokens' embeddings with each other: the rotation of a basis does not change them."""
    embedding = folder.tensors(1)["embedding"]
    step = max(1, len(embedding) // _TOKENS)
    rows = embedding[::step][:_TOKENS].astype(np.float64)
    return rows @ rows.T
