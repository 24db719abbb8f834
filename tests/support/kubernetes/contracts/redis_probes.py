"""What Redis is asked by its probes: whether it answers anything, and whether it is ready."""

import re
from collections.abc import Iterator

from tests.support.kubernetes.contracts.objects import WORKLOADS, called, image_of, kinds, pod_of
from tests.support.kubernetes.rendering import Manifest

#: A probe of a server that is at work may be late; one that is ended because of it must have been silent for so long.
LEAST_S = 30


def asked(objects: list[Manifest]) -> Iterator[str]:
    """Probes of Redis ask by redis-cli, over TLS where that is on; only readiness waits until the file is read."""
    for workload in kinds(objects, *WORKLOADS):
        for container in pod_of(workload)["containers"]:
            if image_of(container)[0].rpartition("/")[2] != "redis":
                continue
            secure = "--tls-port" in container.get("args", [])
            for name in ("startupProbe", "livenessProbe", "readinessProbe"):
                text = " ".join(container.get(name, {}).get("exec", {}).get("command", []))
                if not re.search(r"\bredis-cli .*\bping\b", text):
                    yield f"{called(workload)}: {name} does not ask `redis-cli ping`: an open port answers nothing"
                elif secure != ("--tls" in text.split()):
                    yield f"{called(workload)}: {name} asks {'without' if secure else 'with'} TLS"
                elif ("PONG" in text) != (name == "readinessProbe"):
                    yield f"{called(workload)}: {name} {_about(name)}"
            lives = container.get("livenessProbe", {})
            if lives.get("periodSeconds", 10) * lives.get("failureThreshold", 3) < LEAST_S:
                yield f"{called(workload)}: it is ended after less than {LEAST_S} s without an answer"


def _about(name: str) -> str:
    if name == "readinessProbe":
        return "is content with LOADING"
    return "ends a Redis that reads its file: LOADING is an answer, too"
