"""The file of the authority that clients believe changes: connections that are made from then on go by the new one."""

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import trustme

from blockrelay.errors import RedisTrouble, RedisUnavailable
from blockrelay.redis import client as redis_link
from blockrelay_launcher.supervisor.ports import kept_ports
from tests.support.redis.redis_server import find_binary, has_tls
from tests.support.redis.server_process import LEFT_BY_SSL
from tests.support.swapped_folder import SwappedFolder
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.skipif(not has_tls(find_binary()), reason=f"{find_binary()} has no TLS: install redis-server"),
    pytest.mark.filterwarnings(f"ignore:{LEFT_BY_SSL}:ResourceWarning"),
]


class Server:
    """A Redis at a port of its own, whose certificate is of a new authority with every start."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> str:
        """What clients have to believe."""
        self.stop()
        authority, own = trustme.CA(), self.folder / "server.pem"
        authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(own))
        ca = authority.cert_pem.bytes().decode()
        (self.folder / "own-ca.pem").write_text(ca)
        options = {
            "bind": "127.0.0.1", "port": "0", "tls-port": str(self.port), "save": "", "dir": str(self.folder),
            "tls-cert-file": str(own), "tls-key-file": str(own), "tls-auth-clients": "no",
            "tls-ca-cert-file": str(self.folder / "own-ca.pem"),
        }  # fmt: skip
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        self.process = subprocess.Popen([find_binary(), *arguments], stdout=subprocess.DEVNULL)
        url = f"rediss://127.0.0.1:{self.port}/0?ssl_ca_certs={self.folder / 'own-ca.pem'}"
        with redis_link.connect(url) as client:

            def answers() -> bool:
                with suppress(RedisTrouble):
                    return bool(client.ping())
                return False

            wait_until(answers, "the server answers")
        return ca

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with kept_ports("127.0.0.1", 0, 1) as (port,):
        found = Server(tmp_path, port)
        try:
            yield found
        finally:
            found.stop()


def test_threads_and_tasks_believe_whom_the_file_names_now(server: Server, tmp_path: Path) -> None:
    folder = SwappedFolder(tmp_path / "ca", {"ca.crt": server.start()})
    url = f"rediss://127.0.0.1:{server.port}/0?ssl_ca_certs={folder / 'ca.crt'}"

    async def run() -> None:
        threads, tasks = redis_link.connect(url), redis_link.connect_async(url, connections=1)
        assert await asyncio.to_thread(threads.ping) and await tasks.ping()  # pyright: ignore[reportGeneralTypeIssues]
        new = await asyncio.to_thread(server.start)
        for _ in range(2):  # the connection of before is lost, then the new server is not believed
            with pytest.raises(RedisUnavailable):
                await asyncio.to_thread(threads.ping)
            with pytest.raises(RedisUnavailable):
                await tasks.ping()  # pyright: ignore[reportGeneralTypeIssues]
        for unfinished in ("", new[: len(new) // 2]):
            folder.swap({"ca.crt": unfinished})
            with pytest.raises(RedisUnavailable):
                await asyncio.to_thread(threads.ping)
            with pytest.raises(RedisUnavailable):
                await tasks.ping()  # pyright: ignore[reportGeneralTypeIssues]
        folder.swap({"ca.crt": new})
        assert await asyncio.to_thread(threads.ping) and await tasks.ping()  # pyright: ignore[reportGeneralTypeIssues]
        threads.close()
        await tasks.aclose()

    asyncio.run(run())
