"""Makes the several choices of a prompt (`n`): requests that differ in their ids and seeds alone. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from blockrelay.errors import BadRequest
from blockrelay.protocol.messages import MAX_CHOICES
from blockrelay.protocol.sampling_params import derive_seed
from blockrelay_gateway.admission.admission_request import AdmissionRequest
from blockrelay_gateway.admission.idempotency import Name
from blockrelay_gateway.api.openai.schemas import ChoiceFields


def choices_of(fields: ChoiceFields, *, prompts: int = 1) -> int:
    """Returns how many choices each of the `prompts` of a body gets. Raises BadRequest for `n` or `best_of`."""
    n = 1 if fields.n is None else fields.n
    if not 1 <= n <= MAX_CHOICES:
        raise BadRequest(f"n must be from 1 to {MAX_CHOICES}, not {n}", param="n")
    if n * prompts > MAX_CHOICES:
        what = f"{prompts} prompts with n {n} are {n * prompts} choices, and a request has at most {MAX_CHOICES}"
        raise BadRequest(f"{what}: send a smaller n, or fewer prompts at a time", param="n")
    if fields.best_of is not None and fields.best_of != n:
        what = f"best_of must be n, which is {n}, and not {fields.best_of}"
        raise BadRequest(f"{what}: leave it out, and choose among the n choices of the answer", param="best_of")
    return n


def with_siblings(first: AdmissionRequest, names: Sequence[Name]) -> list[AdmissionRequest]:
    """Returns the choices of one prompt: `first`, which has the first of their `names`, and one for each other name.

    Choice i > 0 has a seed that derives from that of `first` and from i; so any choice can be had alone.
    """
    return [first, *(_sibling(first, index, name) for index, name in enumerate(names) if index)]


def _sibling(first: AdmissionRequest, index: int, name: Name) -> AdmissionRequest:
    """Returns choice `index` of the prompt of `first`; 0 < `index`."""
    params = replace(first.params, seed=derive_seed(f"{first.params.seed}:{index}"))
    body = replace(first.body, params=params.to_dict(), group=name.group, choices=name.choices, sample=index)
    return replace(first, request_id=name.request_id, fingerprint=name.fingerprint, body=body, params=params)
