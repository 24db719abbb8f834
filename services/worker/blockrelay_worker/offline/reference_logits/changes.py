"""The logits from which a greedy request chose its tokens: those of the model, changed by the request's parameters."""

from collections.abc import Sequence

import numpy as np

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay.text.grammars import grammars_of
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_worker.offline.reference_logits.distances import Rows
from blockrelay_worker.offline.reference_logits.models import Array
from blockrelay_worker.sampling.logit_changes import TokenCounts, changes_of


def changed(
    rows: Array, prompt: Sequence[int], answer: Sequence[int], params: SamplingParams, folder: BlockFolder
) -> Rows:
    """Returns `rows`, the model's logits [tokens of the answer, vocabulary], as `params` change them, in float64.

    Tokens that may not follow have minus infinity. Rows behind a token outside the vocabulary stay as they are.
    """
    own = rows.astype(np.float64)
    end_ids = params.end_ids(folder.model.eos_ids)
    state = None
    if params.grammar and folder.tokenizer_path is not None:
        grammars = grammars_of(Tokenizer.from_file(folder.tokenizer_path), folder.model)
        state = None if grammars is None else grammars.follow(params.grammar)
    counts, before = TokenCounts(prompt, len(prompt)), list(prompt)
    for row, logits, token in zip(rows, own, answer, strict=True):
        ids, values = changes_of(row, params, counts, before, end_ids)
        logits[ids] = values
        if state is not None:
            masks = state.masks(())
            bits = np.unpackbits(masks[0].view(np.uint8), bitorder="little") if masks else np.zeros(len(row), np.uint8)
            logits[bits[: len(row)] == 0] = -np.inf
            if token not in end_ids:
                state.push([token])
        if not 0 <= token < len(row):
            break
        counts.add([token])
        before.append(token)
    return own
