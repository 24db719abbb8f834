"""`bench.scenarios.retention` runs and reports its figures. The figures themselves are not asserted."""

import json

import pytest

from bench.scenarios import retention
from bench.scenarios.retention import Kind


def test_every_kind_is_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "ANSWERS", (3,))
    monkeypatch.setattr(retention, "WARM_UP", 1)
    assert retention.main(["--requests", "128", "--mib", "64", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    kinds = [Kind(one["tokens"], one["keyed"], one["reruns"]) for one in found]
    assert kinds == [Kind(3, keyed, reruns) for keyed in (False, True) for reruns in (0, 1)]
    for one in found:
        assert one["kept_per_s"] * one["bytes"] * Kind(3, one["keyed"], 0).retention_s < 32 << 20
        assert min(one["bytes"], one["kept_per_s"], one["forgotten_per_cpu_s"], one["forget_ms"]) > 0


def test_too_few_are_refused() -> None:
    with pytest.raises(SystemExit):
        retention.main(["--requests", "127"])
