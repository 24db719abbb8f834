"""All settings of all services; the only package that takes settings from the environment.

Each field is the environment variable `BLOCKRELAY_<FIELD>` (upper case), or the option `--<field>` of the service's
process, which wins. A service reads its settings in `__main__` and passes them down. A wrong value or an unknown name
is an error that has that name. Names of other services' settings are allowed, since services share environments.
"""

from blockrelay.settings.common import BUNDLED_MODEL, MAX_RETENTION_S, Settings
from blockrelay.settings.gateway import GatewaySettings
from blockrelay.settings.reading import check_names, environment_for, is_link, problems_of, read_settings
from blockrelay.settings.scheduler import SchedulerSettings
from blockrelay.settings.worker import GraphMode, WorkerSettings

__all__ = [
    "BUNDLED_MODEL",
    "MAX_RETENTION_S",
    "GatewaySettings",
    "GraphMode",
    "SchedulerSettings",
    "Settings",
    "WorkerSettings",
    "check_names",
    "environment_for",
    "is_link",
    "problems_of",
    "read_settings",
]
