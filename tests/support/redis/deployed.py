"""What deploy/k8s starts a control Redis that fails over and its Sentinels with: the same lines, other addresses."""

from pathlib import Path

import yaml

from tests.support.project import ROOT

_K8S = ROOT / "deploy" / "k8s"
_CONFIG = _K8S / "components" / "sentinel" / "config"


def server_options(host: str) -> dict[str, str]:
    """Name -> value of a configuration file, of any of the three servers; `host` is its own name."""
    objects = yaml.safe_load_all((_K8S / "base" / "redis-control.yaml").read_text())
    (pod,) = [one["spec"]["template"]["spec"] for one in objects if one["kind"] == "StatefulSet"]
    words: list[str] = pod["containers"][0]["args"][1:]
    arguments = {name.removeprefix("--"): value or '""' for name, value in zip(words[::2], words[1::2], strict=True)}
    del arguments["dir"]  # of the container
    return arguments | _lines(_CONFIG / "redis.conf", words=1, HOST=host)


def sentinel_options(host: str, master: str, port: int) -> dict[str, str]:
    """As that, of a Sentinel; `master` and `port` are where the first master is."""
    return _lines(_CONFIG / "sentinel.conf", words=2, HOST=host, MASTER=master, PORT=str(port))


def _lines(path: Path, *, words: int, **names: str) -> dict[str, str]:
    """The first `words` of each line -> the rest, with `names` replaced as start-redis and start-sentinel do."""
    text = path.read_text()
    for name, value in names.items():
        assert name in text, f"{path.name} has no {name}"
        text = text.replace(name, value)
    split = [line.split(maxsplit=words) for line in text.splitlines() if line and not line.startswith("#")]
    return {" ".join(parts[:words]): parts[words] for parts in split}
