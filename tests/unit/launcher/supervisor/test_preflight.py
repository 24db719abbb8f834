"""What `up` finds before it starts anything: each mistake is one line that names what is wrong."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from blockrelay.errors import RedisUnavailable, UsageError
from blockrelay.redis.client import connect
from blockrelay_launcher.supervisor.preflight import check_services, check_settings, look_at_redis
from blockrelay_launcher.up_options.groups import NetworkOptions
from blockrelay_launcher.up_options.options import UpOptions
from tests.support.redis.redis_server import RedisServer

MODEL = Path("model")


def asked(**network: object) -> UpOptions:
    return UpOptions(model=MODEL, network=NetworkOptions(**network))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (asked(cors_origins="chat.example.com"), "'chat.example.com' is not an origin"),
        (asked(cors_origins="*"), "BLOCKRELAY_API_KEYS"),
        (asked(allowed_hosts="example.com:80"), "'example.com:80' is not a host name"),
        (asked(api_keys=Path("/nowhere/keys")), "/nowhere/keys cannot be read"),
    ],
    ids=["origin", "any origin", "host", "keys"],
)
def test_what_the_gateways_would_refuse_is_refused(options: UpOptions, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        check_services(options, [8000, 8001])
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_good_options_pass() -> None:
    check_services(asked(cors_origins="https://chat.example.com", allowed_hosts="example.com"), [8000])


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("worker-2", "", "is for none of the services of this `up`: scheduler, worker-1, gateway"),
        ("gateway", "BLOCKRELAY_LOG_LEVEL DEBUG\n", "line 1: 'BLOCKRELAY_LOG_LEVEL DEBUG' is not NAME=VALUE"),
        ("gateway", "# comment\n\nBLOCKRELAY_LOGLEVEL=DEBUG\n", "line 3: BLOCKRELAY_LOGLEVEL is not a setting"),
        (
            "gateway",
            "LOG_LEVEL=DEBUG\n",
            "line 1: LOG_LEVEL is not a setting; the nearest name is BLOCKRELAY_LOG_LEVEL",
        ),
    ],
)
def test_a_setting_that_nothing_would_read_is_refused(tmp_path: Path, name: str, content: str, said: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError) as refused:
        check_settings(tmp_path, UpOptions(model=MODEL))
    assert said in str(refused.value)


def test_settings_that_are_read_pass(tmp_path: Path) -> None:
    check_settings(tmp_path / "none", UpOptions(model=MODEL))
    (tmp_path / "worker-1").write_text("# why\n\nBLOCKRELAY_THREADS=2\nblockrelay_log_level = DEBUG\n")
    check_settings(tmp_path, UpOptions(model=MODEL))


def test_a_wrong_password_is_refused_and_a_redis_that_is_away_is_named(own_redis: RedisServer, tmp_path: Path) -> None:
    wrong = asked(redis=f"unix://someone:x@{own_redis.socket}")
    with pytest.raises(UsageError, match="the control Redis does not let us in"):
        look_at_redis(wrong, "t")
    assert look_at_redis(asked(redis=own_redis.url), "t") == []
    away = asked(redis=own_redis.url, payload_redis=f"unix://{tmp_path}/none.sock")
    (line,) = look_at_redis(away, "t")
    assert line.startswith("waiting for the payload Redis: Redis does not answer")


@pytest.fixture
def without_tls() -> Iterator[int]:
    """The port of a server that answers everything as a Redis without TLS answers a handshake."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1)
                connection.sendall(b"-ERR unknown command\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(10)


def test_a_redis_without_tls_is_told_from_one_that_is_away(without_tls: int) -> None:
    with connect(f"rediss://127.0.0.1:{without_tls}") as client, pytest.raises(RedisUnavailable, match="over TLS"):
        client.ping()
    with connect("rediss://127.0.0.1:1") as client, pytest.raises(RedisUnavailable) as away:
        client.ping()
    assert "TLS" not in str(away.value), "nobody was there to speak it with"
