"""The files of deploy/k8s besides those that kustomize renders: generated files, values for charts, made secrets."""

import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import promql_parser
import pytest
import yaml

from blockrelay.auth.password_file import read_password, with_password_file
from blockrelay.redis.address import parse_address
from blockrelay.redis.users import ROLES, rules
from deploy.manifests import FILES
from tests.support.kubernetes.contracts.limits import ended
from tests.support.project import ROOT
from tests.support.promql import registered, selectors

K8S = ROOT / "deploy" / "k8s"


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_is_committed_is_what_the_sources_say(path: Path) -> None:
    assert path.read_text() == FILES[path](), "make manifests writes it anew"


def test_every_service_has_time_to_end_what_it_has_begun() -> None:
    files = [*(K8S / "base").glob("*.yaml"), *(K8S / "components" / "worker-gpu").glob("*.yaml")]
    objects = [each for file in files for each in yaml.safe_load_all(file.read_text())]
    (gateway,) = [o for o in objects if o["kind"] == "Deployment" and o["metadata"]["name"] == "blockrelay-gateway"]
    pod = gateway["spec"]["template"]["spec"]
    pod["containers"][0]["image"] += ":1"  # overlays say the version
    assert not list(ended(objects))
    pod["terminationGracePeriodSeconds"] = 60
    assert "does not end within 60 s" in "".join(ended(objects))


def test_every_dashboard_becomes_a_config_map() -> None:
    generated = read(ROOT / "deploy" / "grafana" / "kustomization.yaml")["configMapGenerator"]
    files = [file for one in generated for file in one["files"]]
    assert sorted(files) == sorted(f"dashboards/{path.name}" for path in (ROOT / "deploy/grafana/dashboards").iterdir())


def test_the_adapter_serves_what_the_autoscaler_asks_for() -> None:
    (rule,) = read(K8S / "charts" / "prometheus-adapter.yaml")["rules"]["external"]
    autoscaler = read(K8S / "components" / "hpa" / "autoscaler.yaml")
    wanted = autoscaler["spec"]["metrics"][0]["external"]["metric"]
    (series,) = selectors(promql_parser.parse(rule["seriesQuery"]))
    asked = {matcher.name for matcher in series.matchers.matchers}
    assert series.name == wanted["name"] and asked <= registered()[wanted["name"]] | {"namespace"}
    labels = ",".join(f'{name}="{value}"' for name, value in wanted["selector"]["matchLabels"].items())
    query = rule["metricsQuery"].replace("<<.Series>>", series.name).replace("<<.LabelMatchers>>", labels)
    assert promql_parser.parse(query.replace("<<.GroupBy>>", "namespace"))


def test_valkey_keeps_what_the_control_redis_keeps() -> None:
    """The chart's configuration says what the arguments of the base say, and has the users of deploy/redis."""
    values = read(K8S / "charts" / "valkey.yaml")
    told = {f"--{name}": value.strip('"') for name, value in map(str.split, values["extraConfig"].splitlines())}
    (control,) = [
        o for o in yaml.safe_load_all((K8S / "base/redis-control.yaml").read_text()) if o["kind"] == "StatefulSet"
    ]
    arguments: list[str] = control["spec"]["template"]["spec"]["containers"][0]["args"]
    options = dict(zip(arguments[1::2], arguments[2::2], strict=True))
    del options["--dir"]  # the chart's own
    assert told == options
    users = read(K8S / "charts" / "valkey-users.yaml")["auth"]["aclUsers"]
    assert users.keys() == set(ROLES) - {"reloader"}, "the chart has the server read its users in a way of its own"
    lines = [line for line in rules("control") if line.split()[1] in users]
    assert lines == [f"user {name} on #{name.upper()}_SHA256 {one['permissions']}" for name, one in users.items()]
    assert values["sentinel"]["masterSet"] == "blockrelay" and values["replica"]["replicas"] == 3


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    make(tmp_path / "secrets")
    return tmp_path / "secrets"


def make(folder: Path, *more: str, script: str = "make-secrets") -> None:
    subprocess.run([K8S / script, folder, *more], check=True, capture_output=True)


def test_secrets_that_are_there_stay(secrets: Path) -> None:
    before = {path: path.read_bytes() for path in secrets.rglob("*") if path.is_file()}
    make(secrets)
    assert {path: path.read_bytes() for path in secrets.rglob("*") if path.is_file()} == before


def test_nobody_else_may_read_them(secrets: Path) -> None:
    assert not [path for path in (secrets, *secrets.rglob("*")) if path.stat().st_mode & 0o077]


def test_a_second_password_works_beside_the_first_until_that_is_taken_away(secrets: Path) -> None:
    """And which one comes first changes nothing of what Redis reads."""
    before, control = (secrets / "gateway.env").read_text(), (secrets / "control.acl").read_text()
    file = secrets / "passwords" / "gateway"
    old = file.read_text().strip()
    assert read_password(file) == old and old not in before, "what a change of would replace the pods"
    file.write_text(f"{old}\nanother\n")
    make(secrets)
    both = (secrets / "control.acl").read_text()
    assert read_password(file) == old, "the first is still the one that gateways use"
    assert both != control and both.count(" #") == control.count(" #") + 1
    file.write_text(f"another\n{old}\n")
    make(secrets)
    assert (secrets / "control.acl").read_text() == both and read_password(file) == "another"
    file.write_text("another\n")
    make(secrets)
    assert (secrets / "control.acl").read_text() not in (both, control)
    assert (secrets / "gateway.env").read_text() == before


def test_a_cell_and_a_namespace_of_another_name(tmp_path: Path) -> None:
    make(tmp_path / "s", "models", "c7")
    acl = (tmp_path / "s" / "control.acl").read_text()
    assert "~{c7}:running" in acl and "{c0}" not in acl and "_SHA256" not in acl
    assert "address=blockrelay-redis-control.models.svc:6379\n" in (tmp_path / "s" / "keda.env").read_text()


def test_a_cell_whose_name_cannot_be_one_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    command = [K8S / "make-secrets", tmp_path / "s", "models", "a/b"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "a/b" in done.stderr
    assert not (tmp_path / "s").exists()


def test_secrets_of_sentinels_stand_on_the_others_and_stay(secrets: Path) -> None:
    make(secrets, script="make-sentinel-secrets")
    before = {path: path.read_bytes() for path in secrets.rglob("*") if path.is_file()}
    control = (secrets / "control.acl").read_text()
    assert control.count("user replica on #") == control.count("user sentinel on #") == 1
    assert "_SHA256" not in control + (secrets / "sentinel.acl").read_text()
    for role in ("gateway", "scheduler", "worker"):
        told = dict(line.split("=", 1) for line in (secrets / f"{role}.env").read_text().splitlines())
        file = told["BLOCKRELAY_REDIS_PASSWORD_FILE"]
        found = parse_address(with_password_file(told["BLOCKRELAY_REDIS_URL"], file))
        assert found is not None and [seed.port for seed in found.seeds] == [26379] * 3
        server, seed = (urlsplit(url(found.seeds[0])) for url in (found.server_url, found.seed_url))
        assert server.username == role and server.password is None and parse_qs(server.query)["password_file"] == [file]
        reader = (secrets / "passwords" / "reader").read_text().strip()
        assert (seed.username, seed.password) == ("reader", reader) and "password_file" not in seed.query
        for asked in (server, seed):
            assert parse_qs(asked.query)["ssl_ca_certs"] == ["/etc/blockrelay/redis/ca.crt"]
    for script in ("make-secrets", "make-sentinel-secrets"):
        make(secrets, script=script)
        assert {path: path.read_bytes() for path in secrets.rglob("*") if path.is_file()} == before
    (secrets / "tls.crt").unlink()
    make(secrets)
    asked = ["openssl", "verify", "-CAfile", secrets / "ca.crt", "-verify_hostname"]
    for name in ("blockrelay-sentinel-2.blockrelay-sentinel.blockrelay.svc", "blockrelay-redis-payload"):
        subprocess.run([*asked, name, secrets / "tls.crt"], check=True, capture_output=True)


def test_secrets_of_sentinels_want_the_others_first(tmp_path: Path) -> None:
    done = subprocess.run([K8S / "make-sentinel-secrets", tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "run make-secrets first" in done.stderr
