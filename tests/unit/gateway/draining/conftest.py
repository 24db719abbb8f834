"""What a played worker says."""

import pytest

from blockrelay.text.tokenizer import Tokenizer
from tests.support.gateway.streams import TEXT


@pytest.fixture
def said(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(TEXT, add_special_tokens=False)
