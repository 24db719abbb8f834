"""Checks options and settings before `up` starts anything: a mistake is one line and exit code 2, not a dead service.

Causes that may pass (a Redis that does not answer) are left to the services, which wait.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import redis

from blockrelay.auth.api_keys import read_keys
from blockrelay.auth.web_origins import Rules
from blockrelay.errors import RedisRefused, RedisTrouble, UsageError
from blockrelay.protocol.keys import Keys
from blockrelay.redis.client import check_redis, connect
from blockrelay.redis.errors import CommandError
from blockrelay.settings import GatewaySettings, WorkerSettings, check_names
from blockrelay_launcher.supervisor.data_folder import parse_setting
from blockrelay_launcher.supervisor.service_specs import given_to_gateways
from blockrelay_launcher.up_options.options import UpOptions, service_names


def check_services(options: UpOptions, ports: Sequence[int]) -> None:
    """Raises UsageError for API keys, origins or host names that the gateways, on `ports`, would refuse.

    Raises ValidationError for settings in the environment that workers or gateways would refuse.
    """
    WorkerSettings()
    network = options.network
    settings = GatewaySettings.model_validate({"host": network.address, **given_to_gateways(network, ports)})
    Rules.of(settings)
    if settings.api_keys is not None:
        read_keys(settings.api_keys)


def check_settings(folder: Path, options: UpOptions) -> None:
    """Raises UsageError for a file in `folder` that no service reads, and for a wrong line in one.

    `folder` is DATA/settings, with a file of NAME=VALUE lines for each service; it need not exist.
    """
    names = service_names(options)
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name not in names:
            raise UsageError(f"{path} is for none of the services of this `up`: {', '.join(names)}")
        try:
            lines = path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{path} cannot be read: {error}") from error
        for number, line in enumerate(lines, 1):
            try:
                check_names(parse_setting(line), strict=True)
            except UsageError as error:
                raise UsageError(f"{path}, line {number}: {error}") from error


def look_at_redis(options: UpOptions, cell: str) -> list[str]:
    """Returns a line for each Redis of the user that does not answer now.

    If the cell is new, this writes its protocol number to the control Redis. Raises UsageError for a Redis that will
    never work as configured, such as with a wrong password.
    """
    waiting: list[str] = []
    for url, name, keys in (
        (options.network.redis, "control Redis", Keys(cell)),
        (options.network.payload_redis, "payload Redis", None),
    ):
        if url is None:
            continue
        with connect(url, cell=cell) as client:
            try:
                check_redis(client, name, cell=keys)
            except RedisTrouble as error:
                waiting.append(f"waiting for the {name}: {error}")
    return waiting


def weaknesses(client: redis.Redis, *, carries_rows: bool = False) -> list[str]:
    """Returns a line for each setting of a control Redis that weakens a promise; hidden settings count as good.

    `carries_rows`: the server is the payload Redis too, and its append-only file gives a line, also if hidden. `up`
    starts none of its own then, because workers on other hosts that share the control Redis could not reach it. Raises
    RedisTrouble if the server does not answer.
    """
    lines: list[str] = []
    try:
        info: dict[str, Any] = client.info()
    except (RedisRefused, CommandError):
        info = {}
    if info.get("aof_enabled") == 0:
        lines.append("it keeps no append-only file, so its crash loses accepted requests (set appendonly yes)")
    elif (fsync := _setting(client, "appendfsync")) not in (None, "always"):
        lines.append(f"its appendfsync is {fsync}, so its crash loses the last requests accepted (set always)")
    if carries_rows and info.get("aof_enabled") != 0:
        lines.append(
            "it is the payload Redis too, so every row and every tensor result waits for its append-only file and takes"
            " its memory (give --payload-redis URL, a Redis without AOF that all workers reach)"
        )
    policy = info.get("maxmemory_policy", "noeviction")
    if info.get("maxmemory") and policy != "noeviction":
        lines.append(f"its maxmemory-policy is {policy}, so requests vanish when it is full (set noeviction)")
    return lines


def _setting(client: redis.Redis, name: str) -> str | None:
    """Returns a setting of the server; None where CONFIG is hidden, as on managed servers."""
    try:
        return cast(dict[str, str], client.config_get(name)).get(name)
    except (RedisRefused, CommandError):
        return None


def warnings_about(url: str, cell: str, *, carries_rows: bool = False) -> list[str]:
    """Returns warnings for the user about the control Redis at `url`; none while it does not answer.

    `carries_rows`: as for `weaknesses`.
    """
    with connect(url, cell=cell) as client:
        try:
            lines = weaknesses(client, carries_rows=carries_rows)
        except RedisTrouble:
            return []
    return [f"warning: the Redis of --redis weakens a promise: {line}" for line in lines]
