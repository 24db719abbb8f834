"""A chat: its commands, what is sent with a turn, its figures."""

import pytest

from blockrelay_launcher.client.resuming import Refused
from blockrelay_launcher.demo.answer import Answer, error_fields, one_line
from blockrelay_launcher.demo.conversation import (
    Conversation,
    ConversationTotals,
    command_of,
    is_beyond_the_context,
    left_out,
)


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("/quit\n", "/quit"),
        (" /NEW ", "/new"),
        ("/nothing", "/nothing"),
        ("/etc/passwd", None),
        ("/quit now", None),
        ("quit", None),
        ("/", None),
        ("", None),
    ],
)
def test_a_command_is_one_word_behind_a_slash(line: str, command: str | None) -> None:
    assert command_of(line) == command


def test_turns_are_sent_along_and_the_oldest_forgotten_for_good() -> None:
    conversation = Conversation()
    assert conversation.messages("a") == [{"role": "user", "content": "a"}]
    conversation.add("a", "1")
    conversation.add("b", "2")
    said = [(message["role"], message["content"]) for message in conversation.messages("c")]
    assert said == [("user", "a"), ("assistant", "1"), ("user", "b"), ("assistant", "2"), ("user", "c")]
    assert conversation.messages("c", without=1) == conversation.messages("c")[2:]
    conversation.add("c", "3", without=1)
    assert conversation.turns == [("b", "2"), ("c", "3")]
    conversation.forget()
    assert conversation.turns == []


def test_what_is_left_out_is_said_in_words() -> None:
    assert left_out(1, 512) == "(the oldest turn is left out: the model's context is 512 tokens)"
    assert left_out(3, 512) == "(the 3 oldest turns are left out: the model's context is 512 tokens)"


@pytest.mark.parametrize(
    ("status", "body", "fewer"),
    [
        (400, '{"error": {"message": "m", "param": "messages", "code": "context_length_exceeded"}}', True),
        (400, '{"error": {"message": "m", "param": "max_tokens"}}', True),
        (400, '{"error": {"message": "m", "param": "seed"}}', False),
        (400, '{"error": {"message": "m", "param": "messages"}}', False),
        (503, '{"error": {"message": "m", "code": "context_length_exceeded"}}', False),
        (400, "not JSON", False),
        (400, '{"error": "m"}', False),
    ],
)
def test_only_a_chat_that_may_be_too_long_is_sent_again_shorter(status: int, body: str, fewer: bool) -> None:
    assert is_beyond_the_context(status, error_fields(Refused(status, body))) is fewer


def test_why_there_is_no_answer_is_one_line() -> None:
    assert one_line(Refused(400, '{"error": {"message": "a\\n b", "param": null}}')) == "a b"
    assert one_line(Refused(0, "ConnectError()")) == "the gateway does not answer (0: ConnectError())"
    assert one_line(ValueError("a\nb")) == "a b"


def test_a_cancelled_answer_has_the_tokens_that_came() -> None:
    answer = Answer(0.0)
    first = {"choices": [{"delta": {"content": "On"}, "token_ids": [1]}], "usage": None}
    assert answer.take(first) == "On"
    answer.take({"choices": [{"text": "ce", "token_ids": [2, 3], "finish_reason": "stop"}]})
    assert (answer.text, answer.tokens, answer.reason) == ("Once", 3, "stop")
    answer.take({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 4}})
    assert (answer.prompt_tokens, answer.tokens) == (7, 4)


def test_the_summary_of_a_chat() -> None:
    totals = ConversationTotals()
    assert totals.rows() == {"turns": "0", "tokens": "0"}
    totals.answers += [Answer(9.0, tokens=11, first=0.1, last=1.1), Answer(9.0, tokens=1, first=0.3, last=0.3)]
    totals.answers += [Answer(9.0)]
    totals.cancelled += 1
    assert totals.rows() == {
        "turns": "3 (1 cancelled)",
        "tokens": "12",
        "tokens per second": "10",
        "time to first token": "200 ms on average",
    }
