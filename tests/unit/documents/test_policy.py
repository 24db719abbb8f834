"""The modules `policy.py`: every number has a comment, and what their heads say of settings is true."""

import ast
import re
from importlib import import_module

import pytest
from pydantic_settings import BaseSettings

from blockrelay.settings import GatewaySettings, SchedulerSettings, WorkerSettings
from tests.support.project import ROOT

SERVICES = ("gateway", "scheduler", "worker", "launcher", "converter")
SETTINGS: dict[str, type[BaseSettings]] = {
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "worker": WorkerSettings,
}
#: A setting with its default, as the head of a module names both.
DEFAULT = re.compile(r"`(\w+)`\s+\(default\s+([\d.]+)")


def source(service: str) -> str:
    return (ROOT / "services" / service / f"blockrelay_{service}" / "policy.py").read_text()


@pytest.mark.parametrize("service", SERVICES)
def test_every_number_has_a_comment_in_a_sentence(service: str) -> None:
    lines = source(service).splitlines()
    for node in ast.parse(source(service)).body[1:]:
        assert isinstance(node, ast.Assign), "numbers only, each alone"
        above = node.lineno - 2
        while re.match(r"[A-Z_]+ = ", lines[above]):  # a comment may speak of numbers that follow each other
            above -= 1
        assert lines[above].startswith("#: ") and lines[above].endswith("."), lines[node.lineno - 1]


@pytest.mark.parametrize("service", SETTINGS)
def test_the_head_names_settings_with_their_defaults(service: str) -> None:
    head = ast.get_docstring(ast.parse(source(service))) or ""
    named = DEFAULT.findall(head)
    assert named
    for name, default in named:
        assert SETTINGS[service].model_fields[name].default == float(default), name


@pytest.mark.parametrize("service", SERVICES)
def test_the_head_names_what_is_there(service: str) -> None:
    known = {name for one in SERVICES for name in vars(import_module(f"blockrelay_{one}.policy"))}
    head = ast.get_docstring(ast.parse(source(service))) or ""
    assert set(re.findall(r"`([A-Z][A-Z_]+)`", head)) <= known


@pytest.mark.parametrize(
    ("service", "words"),
    [
        ("worker", ["KV pool", "KV_SHARE_OF_ONE_WORKER", "hung step on a CPU", "session_timeout_s", "STUCK_FACTOR"]),
        ("launcher", ["KV pools", "KV_SHARE_OF_ALL_WORKERS", "KV_SHARE_OF_ONE_WORKER"]),
        ("scheduler", ["empty stage", "vacancy_s"]),
    ],
)
def test_the_head_answers_what_is_asked_most(service: str, words: list[str]) -> None:
    head = ast.get_docstring(ast.parse(source(service))) or ""
    assert all(word in head for word in words)
