"""The ten scripts as atomic steps, one function each, under the names of their Lua files; PLAN writes nothing that a
request depends on and is left out. Arguments and answers are those of the Lua scripts as far as the model has them;
`overdue` stands for the clock: requests whose deadline has passed. Callers name the package: `scripts.claim`.
"""

from tests.protocol_model.scripts.claiming import Claimed, claim
from tests.protocol_model.scripts.queueing import unqueue
from tests.protocol_model.scripts.retiring import look, stay
from tests.protocol_model.scripts.transitions import (
    accept,
    announce,
    beat,
    commit,
    dead,
    finish,
    forget,
    migrate,
    name,
    rerun,
    take,
)

__all__ = [
    "Claimed",
    "accept",
    "announce",
    "beat",
    "claim",
    "commit",
    "dead",
    "finish",
    "forget",
    "look",
    "migrate",
    "name",
    "rerun",
    "stay",
    "take",
    "unqueue",
]
