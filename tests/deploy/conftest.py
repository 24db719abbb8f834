"""Overlays that every test of this folder may render."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.kubernetes import rendering
from tests.support.kubernetes.rendering import Manifest
from tests.support.kubernetes.variants import prepare

#: Variant -> all of its objects, the test's own copies.
Render = Callable[[str], list[Manifest]]


@pytest.fixture(scope="session")
def overlays(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Variant -> the folder of its overlay."""
    return prepare(tmp_path_factory.mktemp("deploy"))


@pytest.fixture
def render(overlays: dict[str, Path]) -> Render:
    return lambda variant: rendering.render(overlays[variant])
