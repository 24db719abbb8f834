"""What a replay says about the tokens that were committed."""

import pytest

from blockrelay_worker.offline.replay import compared


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        ([5, 6], [5, 6, 7], "under n all 2 committed tokens are the same"),
        ([5, 6], [5, 9, 7], "under n token 1 is 9 and was 6: all 1 before it are the same"),
        ([5, 6], [5], "under n token 1 is missing and was 6: all 1 before it are the same"),
    ],
)
def test_the_first_token_that_differs_is_named(then: list[int], now: list[int], said: str) -> None:
    assert compared(then, now, "n") == said
