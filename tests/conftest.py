"""Fixtures every suite uses. One real redis-server per test process, emptied for each test."""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import redis

from blockrelay.host.cpu import cores
from blockrelay.protocol.keys import Keys
from blockrelay.redis.client import Scripts
from tests.support.at_most import AtMost
from tests.support.cell import Cell, begin_cell
from tests.support.leaks import Spawned, folders, ownerless_keys, processes, settled
from tests.support.models.tiny_model import write_tiny_model
from tests.support.redis.redis_server import RedisServer
from tests.support.redis.rights import ConfinedScripts
from tests.support.suites import OTHER_MARKERS, SUITES, suite_of

# No example fails because the machine is slow.
hypothesis.settings.register_profile("blockrelay", deadline=None)
hypothesis.settings.load_profile("blockrelay")

TESTS = Path(__file__).parent
spawned = Spawned()

# A shell starts what it runs in the background with Ctrl-C ignored, and children inherit that; tests press Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--at-most", type=float, metavar="SECONDS", help="begin no test later than that")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Three workers for two cores in `make test`, whose tests wait for processes for about half of their time."""
    return cores() * 3 // 2 if config.getoption("markexpr") == "quick" else None


def pytest_configure(config: pytest.Config) -> None:
    if (seconds := config.getoption("at_most")) is not None:
        config.pluginmanager.register(AtMost(config, seconds))
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # where `tmp_path` stays for a look
    folder = tempfile.mkdtemp(prefix="br-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    caches = os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="br-caches-")  # not the user's own
    config.add_cleanup(lambda: shutil.rmtree(caches, ignore_errors=True))
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    for name in ("NO_PROXY", "no_proxy"):  # what a proxy is named for is not on this machine
        os.environ[name] = ",".join(filter(None, ("127.0.0.1,localhost,::1", os.environ.get(name))))
    for name, meaning in (SUITES | OTHER_MARKERS).items():
        config.addinivalue_line("markers", f"{name}: {meaning}")


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test the marker of its suite, so that `-m quick` and the others choose by it."""
    for item in items:
        try:
            suite = suite_of(item.path.relative_to(TESTS), (mark.name for mark in item.iter_markers()))
        except ValueError as error:
            raise pytest.UsageError(f"{item.nodeid}: {error}") from None
        item.add_marker(suite)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No BLOCKRELAY_* variable of the shell reaches a test."""
    for name in [n for n in os.environ if n.startswith("BLOCKRELAY_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session", autouse=True)
def the_session_leaves_nothing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What fixtures of modules and of the session started and made is gone at the end."""
    homes = (Path(tempfile.gettempdir()), tmp_path_factory.getbasetemp())
    yield
    assert not (left := settled(processes)), f"processes: {left}"
    assert not (left := settled(lambda: folders(homes))), f"folders: {left}"


@pytest.fixture
def processes_may_stay() -> bool:
    """Whether a test may replace processes of a system that it shares with the tests behind it."""
    return False


@pytest.fixture(autouse=True)
def leaves_nothing(tmp_path_factory: pytest.TempPathFactory, processes_may_stay: bool) -> Iterator[None]:
    """A test fails that leaves processes or folders behind."""
    homes = (Path(tempfile.gettempdir()), tmp_path_factory.getbasetemp())
    spawned.begin()
    there = folders(homes)
    yield
    if not processes_may_stay:
        assert not (left := settled(spawned.left)), f"processes: {left}"
    assert not (left := settled(lambda: folders(homes) - there)), f"folders: {left}"


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[RedisServer]:
    with tempfile.TemporaryDirectory(prefix="br-test-") as folder:  # short: unix socket paths are limited
        server = RedisServer(Path(folder)).start()
        yield server
        server.stop()


@pytest.fixture
def cells(keys: Keys) -> list[Keys]:
    """Those that `redis_server` has."""
    return [keys]


@pytest.fixture
def redis_server(shared_redis: RedisServer, cells: list[Keys]) -> Iterator[RedisServer]:
    """A server with new cells alone, shared by the tests of this process. Do not kill it: use `own_redis` for that."""
    client = shared_redis.client()
    begin_cell(client, *cells)
    yield shared_redis
    left = settled(lambda: ownerless_keys(client))  # gateways of the module may be in the middle of a change
    client.close()
    assert not left, "\n".join(map(str, left))


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """A server of this test alone, to be killed and restarted."""
    with tempfile.TemporaryDirectory(prefix="br-test-") as folder:
        server = RedisServer(Path(folder)).start()
        try:
            yield server
            server.assert_nothing_is_ownerless()
        finally:
            server.stop()


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[redis.Redis]:
    connection = redis_server.client()
    yield connection
    connection.close()


@pytest.fixture
def keys() -> Keys:
    return Keys("t")


@pytest.fixture
def scripts(client: redis.Redis, keys: Keys) -> Iterator[Scripts]:
    """Each script runs with the rights that the table of keys gives it."""
    confined = ConfinedScripts(client, keys)
    yield confined
    confined.close()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of four layers; what changes it changes a copy."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def cell(client: redis.Redis, keys: Keys, scripts: Scripts) -> Cell:
    return Cell(client, keys, scripts)
