"""Turns bodies of /v1/infer into admission requests. Pure, but for the request ids drawn at random."""

from dataclasses import replace
from typing import Literal

from blockrelay.errors import BadRequest
from blockrelay.protocol.sampling_params import SamplingParams, derive_seed
from blockrelay.protocol.tensors import result_bytes
from blockrelay_gateway.admission.admission_request import AdmissionRequest
from blockrelay_gateway.admission.idempotency import Identity, Name, random_identity
from blockrelay_gateway.api.client_headers import ClientHeaders
from blockrelay_gateway.api.infer.schemas import TENSOR_FIELDS, TENSOR_ONLY_FIELDS, InferRequest
from blockrelay_gateway.api.infer.session_kv import RowKv
from blockrelay_gateway.api.infer.tensor_steps import TensorStep
from blockrelay_gateway.api.request_builder import RequestBuilder


def is_tensor_form(request: InferRequest) -> bool:
    """True for the tensor form, False for the text form.

    Raises BadRequest, naming a field, for a mixture of both, and for a body with neither prompt nor input_tensors.
    """
    given = request.model_fields_set
    if (request.input_tensors is None) == (request.prompt is None):
        raise BadRequest("send either prompt or input_tensors", param="prompt")
    if request.input_tensors is None:
        for name in sorted(given & TENSOR_ONLY_FIELDS):
            if getattr(request, name) is not None:
                raise BadRequest(f"{name} belongs to the tensor form, which has no prompt", param=name)
        return False
    for name in sorted(given - TENSOR_FIELDS):
        if getattr(request, name) is not None:
            raise BadRequest(f"{name} belongs to the text form, not to input_tensors", param=name)
    return True


def text_request(
    builder: RequestBuilder, request: InferRequest, headers: ClientHeaders, who: Identity
) -> AdmissionRequest:
    """Builds the request of the text form, for which `is_tensor_form` is False; `who` has its id.

    Raises BadRequest, or NotFound for another model.
    """
    builder.check_model(request.model)
    prompt = request.prompt
    tokens = builder.encode(prompt, "prompt") if isinstance(prompt, str) else list(prompt or ())
    (name,) = who.names()
    return builder.text(request, name, tokens, max_tokens=request.max_tokens, logprobs=None, headers=headers)


def tensor_request(
    builder: RequestBuilder,
    request: InferRequest,
    step: TensorStep,
    name: Name,
    *,
    logits: Literal["last", "all"],
    headers: ClientHeaders,
    kv: RowKv,
) -> AdmissionRequest:
    """Builds the request of one row of a tensor step.

    Its prompt has all tokens of the session; the first `step.prior` of them are from earlier steps. Raises BadRequest.
    """
    params = SamplingParams(max_tokens=0, temperature=0.0, seed=derive_seed(name.request_id))
    asked = builder.request(request, name, list(step.tokens), params, headers, param="input_tensors.input_ids")
    body = replace(
        asked.body,
        logits=logits,
        prior=step.prior,
        kv_given=kv.given_tokens,
        kv_asked=kv.wanted_layers,
        session=step.session.session if step.session else "",
        step=step.session.step if step.session else 0,
    )
    taken = result_bytes(step.new if logits == "all" else 1, builder.model.vocab_size) + kv.bytes
    return replace(asked, body=body, session=step.session, result_bytes=taken, given=kv.given)


def accepted(request: AdmissionRequest) -> AdmissionRequest:
    """`request` without the KV that the client sent: once accepted, the payload Redis has it."""
    return replace(request, given={})


def renamed(request: AdmissionRequest) -> AdmissionRequest:
    """The same work under a new request id and outside its session; KV that the client sent is computed instead."""
    body = replace(request.body, kv_given=0)
    return replace(request, request_id=random_identity().base, fingerprint="", session=None, body=body, given={})
