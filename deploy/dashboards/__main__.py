"""`python -m deploy.dashboards`: writes the Grafana dashboards, deploy/grafana/dashboards/*.json."""

from pathlib import Path

from deploy.dashboards.build import to_json
from deploy.dashboards.devices import DEVICES
from deploy.dashboards.kv_cache import KV_CACHE
from deploy.dashboards.panel import Dashboard
from deploy.dashboards.pipeline import PIPELINE
from deploy.dashboards.recovery import RECOVERY
from deploy.dashboards.redis import REDIS
from deploy.dashboards.requests import REQUESTS
from deploy.dashboards.system import SYSTEM
from deploy.dashboards.tenants import TENANTS

DASHBOARDS: tuple[Dashboard, ...] = (SYSTEM, PIPELINE, REQUESTS, KV_CACHE, RECOVERY, DEVICES, TENANTS, REDIS)
FOLDER = Path(__file__).resolve().parents[1] / "grafana" / "dashboards"


def main() -> None:
    """Writes the file of every dashboard, and deletes other JSON files from the folder."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    files = {FOLDER / f"{one.name}.json": to_json(one) for one in DASHBOARDS}
    for stray in set(FOLDER.glob("*.json")) - files.keys():
        stray.unlink()
    for path, content in files.items():
        path.write_text(content)


if __name__ == "__main__":
    main()
