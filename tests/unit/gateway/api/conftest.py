"""What the tests of bodies share."""

import pytest

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.block_folder.manifest import GenerationDefaults
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_gateway.api.openai.chat_template import ChatTemplate
from blockrelay_gateway.api.openai.requests import OpenAIRequests
from blockrelay_gateway.api.request_builder import RequestBuilder
from blockrelay_gateway.api.structured_output import StructuredOutput


@pytest.fixture
def requests(folder: BlockFolder, tokenizer: Tokenizer) -> OpenAIRequests:
    template = folder.chat_template()
    assert template is not None
    builder = RequestBuilder(
        name="tiny",
        model=folder.model,
        generation=GenerationDefaults(),
        tokenizer=tokenizer,
        default_max_tokens=None,
        structured=StructuredOutput.of(tokenizer, folder.model),
    )
    return OpenAIRequests(builder, ChatTemplate(template, special_tokens=folder.model.template_tokens))
