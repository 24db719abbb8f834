"""Servers that fail over and their Sentinels, which read their users again when `load-users` of deploy/k8s says so."""

from pathlib import Path

import pytest

from blockrelay.errors import RedisTrouble
from blockrelay.redis import client as redis_link
from tests.support.redis.failover import WithSentinels, arranged
from tests.support.redis.redis_server import find_binary, has_tls
from tests.support.redis.server_process import HOST, LEFT_BY_SSL, password_of

pytestmark = [pytest.mark.failovers, pytest.mark.filterwarnings(f"ignore:{LEFT_BY_SSL}:ResourceWarning")]


@pytest.mark.skipif(not has_tls(find_binary()), reason=f"{find_binary()} has no TLS, NOT TESTED: install redis-server")
def test_all_of_them_take_a_password_that_is_new_in_their_file(tmp_path: Path) -> None:
    """The user `reloader` reloads the users of every server, and may do nothing else."""
    with arranged(WithSentinels, tmp_path, secured=True) as found:
        assert found.security is not None and isinstance(found, WithSentinels)

        def url(port: int, user: str, password: str) -> str:
            assert found.security is not None
            return f"rediss://{user}:{password}@{HOST}:{port}/0?{found.security.parameters}"

        for name in ("users", "sentinels"):
            file = found.security.folder / f"{name}.acl"
            file.write_text(file.read_text().replace("user keda on ", "user keda on >another "))
        ports = [process.port for process in found.processes()]
        assert len(ports) == 6
        for port in ports:
            with redis_link.connect(url(port, "keda", "another")) as client, pytest.raises(RedisTrouble):
                client.ping()
            with redis_link.connect(url(port, "reloader", password_of("reloader"))) as client:
                assert client.execute_command("ACL LOAD")
                with pytest.raises(RedisTrouble):
                    client.execute_command("ACL LIST")
            with redis_link.connect(url(port, "keda", "another")) as client:
                assert client.ping()
