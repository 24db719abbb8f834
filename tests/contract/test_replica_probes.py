"""The probes of a control Redis that fails over: a replica is ready when it follows its master, and lives before."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from blockrelay_launcher.supervisor.embedded_redis import find_server_program
from blockrelay_launcher.supervisor.ports import kept_ports
from tests.support.project import ROOT
from tests.support.redis.deployed import server_options
from tests.support.redis.server_process import HOST, HOSTNAME, Process
from tests.support.waiting import wait_until


@pytest.mark.skipif(
    shutil.which("redis-cli") is None or find_server_program().version < (7,),
    reason="install redis-server 7, which is deployed: a replica of 6.2 answers PING without its master",
)
def test_a_replica_is_ready_when_it_follows_its_master(tmp_path: Path) -> None:
    """Else a roll goes on to the next server, or the master, while the first one lacks what was accepted."""
    objects = yaml.safe_load_all((ROOT / "deploy/k8s/base/redis-control.yaml").read_text())
    (pod,) = [one["spec"]["template"]["spec"] for one in objects if one["kind"] == "StatefulSet"]

    def says(server: Process, probe: str) -> bool:
        words: list[str] = pod["containers"][0][probe]["exec"]["command"]
        asked = [word.replace("redis-cli ", f"redis-cli -p {server.port} ") for word in words]
        if words[0] == "redis-cli":
            asked[1:1] = ["-p", str(server.port)]
        return subprocess.run(asked, capture_output=True, check=False, timeout=30).returncode == 0

    with kept_ports(HOST, 0, 2) as ports:
        options = server_options(HOSTNAME)
        master = Process(tmp_path / "master", ports[0], options)
        replica = Process(tmp_path / "replica", ports[1], options | {"replicaof": f"{HOST} {ports[0]}"})
        try:
            replica.start()
            for probe in ("startupProbe", "livenessProbe"):
                assert says(replica, probe)
            assert not says(replica, "readinessProbe")
            master.start()
            assert says(master, "readinessProbe")
            wait_until(lambda: says(replica, "readinessProbe"), "the replica follows, and says so")
        finally:
            replica.kill()
            master.kill()
