"""When the certificate of a Redis over TLS ends is known from the connections to it."""

import ssl
import subprocess
from pathlib import Path

import pytest

from blockrelay.redis.client import connect
from blockrelay.redis.connections import server_certificate_end
from blockrelay_launcher.supervisor.ports import kept_ports
from tests.support.redis.redis_server import RedisServer, find_binary, has_tls
from tests.support.redis.server_process import HOST, Process, Security


def end_of(file: Path) -> float:
    """The end of the first certificate of a file, as openssl says it."""
    command = ["openssl", "x509", "-noout", "-enddate", "-in", file]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return ssl.cert_time_to_seconds(shown.strip().removeprefix("notAfter="))


@pytest.mark.skipif(not has_tls(find_binary()), reason=f"{find_binary()} has no TLS: install redis-server")
def test_the_end_of_a_servers_certificate_is_known_while_there_is_a_connection(tmp_path: Path) -> None:
    security = Security.make(tmp_path)
    with kept_ports(HOST, 0, 1) as (port,):
        server = Process(tmp_path / "server", port, {"aclfile": str(tmp_path / "users.acl"), "save": '""'}, security)
        server.start()
        try:
            with connect(server.url) as client:
                assert server_certificate_end(client) is None
                assert client.ping()
                assert server_certificate_end(client) == end_of(tmp_path / "server.pem")
            assert server_certificate_end(client) is None, "it is closed"
        finally:
            server.kill()


def test_without_tls_there_is_none(redis_server: RedisServer) -> None:
    with connect(redis_server.url) as client:
        assert client.ping() and server_certificate_end(client) is None
