"""What a replay says about the tokens that were committed."""

import pytest

from blockrelay_worker.offline.replay import compared


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        ([5, 6], [5, 6, 7], "the first 2 tokens are those of then"),
        ([5, 6], [5, 9, 7], "token 1 is 9 and was 6; those before it are the same"),
        ([5, 6], [5], "the first 1 tokens are those of then"),
    ],
)
def test_the_first_token_that_differs_is_named(then: list[int], now: list[int], said: str) -> None:
    assert compared(then, now) == said
