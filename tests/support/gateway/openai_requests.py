"""Bodies of OpenAI's API made into requests, for tests."""

from typing import Any

from pydantic import ValidationError

from blockrelay_gateway.admission.admission_request import AdmissionRequest
from blockrelay_gateway.admission.idempotency import random_identity
from blockrelay_gateway.api.client_headers import ClientHeaders
from blockrelay_gateway.api.openai.requests import OpenAIRequests
from blockrelay_gateway.api.openai.schemas import ChatRequest, CompletionRequest
from blockrelay_gateway.api.openai.strictness import ignored_fields
from blockrelay_gateway.http.errors import from_validation


def complete(requests: OpenAIRequests, **fields: Any) -> AdmissionRequest:
    try:
        request = CompletionRequest.model_validate({"prompt": "Tom", **fields})
        ignored_fields(request)
        (asked,) = requests.completion(request, ClientHeaders(), random_identity())
    except ValidationError as error:
        raise from_validation(error.errors()) from error
    return asked


def chat(requests: OpenAIRequests, **fields: Any) -> AdmissionRequest:
    messages = [{"role": "user", "content": "Who has the ball?"}]
    try:
        request = ChatRequest.model_validate({"messages": messages, **fields})
        ignored_fields(request)
        (asked,) = requests.chat(request, ClientHeaders(), random_identity())
    except ValidationError as error:
        raise from_validation(error.errors()) from error
    return asked
