"""Computes the logits of a checkpoint with torch, in float32 or rounded as w8a8."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from blockrelay_storyteller import model


def torch_logits(folder: Path, threads: int, *, rounded: bool) -> Callable[[list[int]], NDArray[np.float32]]:
    """Returns a function from token ids to logits, float32 [ids, vocab].

    `folder` is a checkpoint that `model.save` wrote. `threads` become torch's threads, for the whole process. With
    `rounded`, all linear layers round as the w8a8 executor does.
    """
    torch.set_num_threads(threads)
    net = model.load(folder).eval()
    net.quantise(rounded)

    def logits_of(ids: list[int]) -> NDArray[np.float32]:
        with torch.no_grad():
            return net(torch.tensor([ids]))[0].float().numpy()

    return logits_of
