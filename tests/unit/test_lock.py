"""requirements.lock is what `make install LOCKED=1` installs, and it fits what pyproject.toml asks for."""

import tomllib

from packaging.requirements import Requirement
from packaging.version import Version

from tests.support.project import ROOT

#: Not locked: they have environments of their own (torch alone is larger than all else together; there is one ONNX
#: Runtime in each), or draw pictures.
APART = {"parity", "fuzz", "docs", "pictures", "directml", "cuda", "openvino"}


def declared() -> list[Requirement]:
    """Every direct dependency of the project, but for the extras that have their own environments."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for name in extras.keys() - APART for line in extras[name])]
    return [found for found in map(Requirement, lines) if found.name != "blockrelay"]


def locked() -> dict[str, list[Requirement]]:
    """The pins by name; several where Pythons or platforms differ."""
    pins: dict[str, list[Requirement]] = {}
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        if line and not line.lstrip().startswith("#"):
            pin = Requirement(line)
            pins.setdefault(pin.name, []).append(pin)
    return pins


def test_every_dependency_is_locked_to_a_version_that_is_asked_for() -> None:
    pins = locked()
    for wanted in declared():
        assert wanted.name in pins, f"{wanted.name} is not locked: run `make lock`"
        for pin in pins[wanted.name]:
            (exact,) = pin.specifier
            assert exact.operator == "==", pin
            assert wanted.specifier.contains(Version(exact.version), prereleases=True), (
                f"{pin} is not {wanted}: run `make lock`"
            )


def test_the_lock_names_no_index() -> None:
    assert "://" not in (ROOT / "requirements.lock").read_text()
