"""Mistakes that people make in manifests, planted: each is found. Schemas alone find two of the first fifteen."""

from base64 import b64encode
from collections.abc import Callable
from pathlib import Path

import pytest

from blockrelay import __version__
from tests.support.kubernetes.contracts.objects import containers, kinds, one, pod_of
from tests.support.kubernetes.contracts.rules import complaints
from tests.support.kubernetes.custom_resources import custom_complaints
from tests.support.kubernetes.rendering import Manifest, schema_complaints

Render = Callable[[str], list[Manifest]]
Mistake = Callable[[list[Manifest]], None]


def gateway(objects: list[Manifest]) -> Manifest:
    return containers(one(objects, "Deployment", "gateway"))[0]


def misspelt(objects: list[Manifest]) -> None:
    one(objects, "Deployment", "gateway")["spec"]["replica"] = 3


def port_as_text(objects: list[Manifest]) -> None:
    gateway(objects)["ports"][0]["containerPort"] = "8000"


def long_port_name(objects: list[Manifest]) -> None:
    gateway(objects)["ports"][0]["name"] = "hypertext-transfer"


def other_labels(objects: list[Manifest]) -> None:
    one(objects, "Deployment", "gateway")["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"] = "gate"


def request_above_limit(objects: list[Manifest]) -> None:
    containers(one(objects, "Deployment", "worker-cpu"))[0]["resources"]["requests"]["cpu"] = "3"


def mount_without_volume(objects: list[Manifest]) -> None:
    gateway(objects)["volumeMounts"].append({"name": "models", "mountPath": "/models"})


def budget_with_both(objects: list[Manifest]) -> None:
    one(objects, "PodDisruptionBudget", "gateway")["spec"]["minAvailable"] = 1


def bad_name(objects: list[Manifest]) -> None:
    one(objects, "Service", "gateway")["metadata"]["name"] = "Blockrelay_Gateway"


def empty_image(objects: list[Manifest]) -> None:
    gateway(objects)["image"] = ""


def long_pre_stop(objects: list[Manifest]) -> None:
    """Plant a pause in `preStop` that leaves the drain no time."""
    gateway(objects)["lifecycle"] = {"preStop": {"sleep": {"seconds": 10}}}


def long_gateway_drain(objects: list[Manifest]) -> None:
    told = {each["name"]: each for each in gateway(objects)["env"]}
    told["BLOCKRELAY_GATEWAY_DRAIN_S"]["value"] = "120"


def deaf_at_once(objects: list[Manifest]) -> None:
    env = gateway(objects)["env"]
    env[:] = [each for each in env if each["name"] != "BLOCKRELAY_GATEWAY_LINGER_S"]


def shared_single_writer(objects: list[Manifest]) -> None:
    claim = one(objects, "StatefulSet", "redis-control")["spec"]["volumeClaimTemplates"][0]
    claim["spec"]["accessModes"].append("ReadWriteMany")


def port_70000(objects: list[Manifest]) -> None:
    gateway(objects)["ports"][0]["containerPort"] = 70000


def quantity(objects: list[Manifest]) -> None:
    gateway(objects)["resources"]["limits"]["memory"] = "1536Mib"


def removed_version(objects: list[Manifest]) -> None:
    one(objects, "PodDisruptionBudget", "gateway")["apiVersion"] = "policy/v1beta1"


def privileged(objects: list[Manifest]) -> None:
    gateway(objects)["securityContext"]["privileged"] = True


def elsewhere(objects: list[Manifest]) -> None:
    """As it is where a component is added to a base that has a namespace, and the overlay has none."""
    del one(objects, "Service", "gateway")["metadata"]["namespace"]


def of_another_cell(objects: list[Manifest]) -> None:
    labels = one(objects, "Deployment", "scheduler")["spec"]["template"]["metadata"]["labels"]
    labels["blockrelay.io/cell"] = "c1"


def of_another_release(objects: list[Manifest]) -> None:
    one(objects, "Deployment", "scheduler")["metadata"]["labels"]["app.kubernetes.io/version"] = "0.1.0"


def claims_of_a_release(objects: list[Manifest]) -> None:
    (claim,) = one(objects, "StatefulSet", "redis-control")["spec"]["volumeClaimTemplates"]
    claim["metadata"].setdefault("labels", {})["app.kubernetes.io/version"] = __version__


def redis_of_a_release(objects: list[Manifest]) -> None:
    labels = one(objects, "Deployment", "redis-payload")["spec"]["template"]["metadata"]["labels"]
    labels["app.kubernetes.io/version"] = __version__


def cell_by_hand(objects: list[Manifest]) -> None:
    container = containers(one(objects, "Deployment", "scheduler"))[0]
    container["env"] = [each for each in container["env"] if each["name"] != "BLOCKRELAY_CELL"]


def unknown_setting(objects: list[Manifest]) -> None:
    containers(one(objects, "Deployment", "worker-cpu"))[0]["env"].append({"name": "BLOCKRELAY_TREADS", "value": "2"})


def service_links(objects: list[Manifest]) -> None:
    del pod_of(one(objects, "Deployment", "gateway"))["enableServiceLinks"]


def drain_without_time(objects: list[Manifest]) -> None:
    pod_of(one(objects, "Deployment", "worker-cpu"))["terminationGracePeriodSeconds"] = 30


def policy_for_nobody(objects: list[Manifest]) -> None:
    one(objects, "NetworkPolicy", "redis")["spec"]["ingress"][0]["ports"][0]["port"] = "http"


def no_policies(objects: list[Manifest]) -> None:
    objects[:] = [each for each in objects if each["kind"] != "NetworkPolicy"]


def no_way_to_names(objects: list[Manifest]) -> None:
    del one(objects, "NetworkPolicy", "services")["spec"]["egress"][1]


def misspelt_worker(objects: list[Manifest]) -> None:
    one(objects, "NetworkPolicy", "services")["spec"]["podSelector"]["matchExpressions"][0]["values"][2] = "worker"


def nobody_may_come(objects: list[Manifest]) -> None:
    came = one(objects, "NetworkPolicy", "redis")["spec"]["ingress"][0]["from"][0]["podSelector"]
    came["matchExpressions"][0]["values"] = ["gateway"]


def misspelt_redis(objects: list[Manifest]) -> None:
    secret = next(each for each in kinds(objects, "Secret") if "worker" in each["metadata"]["name"])
    secret["data"]["BLOCKRELAY_REDIS_URL"] = b64encode(b"redis://blockrelay-redis:6379/0").decode()


def nobody_may_go(objects: list[Manifest]) -> None:
    one(objects, "PodDisruptionBudget", "gateway")["spec"]["maxUnavailable"] = 0


def last_one_must_stay(objects: list[Manifest]) -> None:
    budget = one(objects, "PodDisruptionBudget", "redis-control")["spec"]
    del budget["maxUnavailable"]
    budget["minAvailable"] = 1


def volume_of_root(objects: list[Manifest]) -> None:
    del pod_of(one(objects, "StatefulSet", "redis-control"))["securityContext"]["fsGroup"]


def scaler(objects: list[Manifest]) -> Manifest:
    return one(objects, "ScaledObject", "worker-cpu")["spec"]


def trigger_of_another_cell(objects: list[Manifest]) -> None:
    scaler(objects)["triggers"][0]["metadata"]["listName"] = "{c1}:running"


def trigger_of_a_queue(objects: list[Manifest]) -> None:
    scaler(objects)["triggers"][0]["metadata"]["listName"] = "{c0}:queue:model:cpu"


def misspelt_parameter(objects: list[Manifest]) -> None:
    scaler(objects)["triggers"][0]["metadata"]["listLenght"] = "16"


def scaler_of_nobody(objects: list[Manifest]) -> None:
    scaler(objects)["scaleTargetRef"]["name"] = "blockrelay-worker"


def number_is_set_back(objects: list[Manifest]) -> None:
    one(objects, "Deployment", "worker-cpu")["spec"]["replicas"] = 2


def scaler_elsewhere(objects: list[Manifest]) -> None:
    del one(objects, "ScaledObject", "worker-cpu")["metadata"]["namespace"]


def scaled_twice(objects: list[Manifest]) -> None:
    again = {"scaleTargetRef": scaler(objects)["scaleTargetRef"], "minReplicas": 1, "maxReplicas": 8, "metrics": []}
    first = one(objects, "ScaledObject", "worker-cpu")
    objects.append({**first, "apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "spec": again})


def keda_without_a_password(objects: list[Manifest]) -> None:
    (secret,) = [each for each in kinds(objects, "Secret") if each["metadata"]["name"] == "blockrelay-redis-keda"]
    del secret["data"]["password"]


def keda_is_shut_out(objects: list[Manifest]) -> None:
    objects.remove(one(objects, "NetworkPolicy", "keda"))


def address_of_our_namespace_only(objects: list[Manifest]) -> None:
    (secret,) = [each for each in kinds(objects, "Secret") if each["metadata"]["name"] == "blockrelay-redis-keda"]
    secret["data"]["address"] = b64encode(b"blockrelay-redis-control:6379").decode()


def url_without_tls(objects: list[Manifest]) -> None:
    (secret,) = [each for each in kinds(objects, "Secret") if "redis-worker" in each["metadata"]["name"]]
    secret["data"]["BLOCKRELAY_REDIS_URL"] = b64encode(b"redis://worker:x@blockrelay-redis-control:6379/0").decode()


def nobody_to_believe(objects: list[Manifest]) -> None:
    containers(one(objects, "Deployment", "worker-cpu"))[0]["volumeMounts"][0]["mountPath"] = "/etc/redis"


def password_elsewhere(objects: list[Manifest]) -> None:
    containers(one(objects, "Deployment", "gateway"))[0]["volumeMounts"] = [
        each for each in gateway(objects)["volumeMounts"] if each["name"] != "redis-password"
    ]
    pod_of(one(objects, "Deployment", "gateway"))["volumes"] = [
        each for each in pod_of(one(objects, "Deployment", "gateway"))["volumes"] if each["name"] != "redis-password"
    ]


def keys_as_one_file(objects: list[Manifest]) -> None:
    (mount,) = [each for each in gateway(objects)["volumeMounts"] if each["name"] == "api-keys"]
    mount |= {"mountPath": f"{mount['mountPath']}/api-keys.json", "subPath": "api-keys.json"}


def keys_under_new_names(objects: list[Manifest]) -> None:
    (secret,) = [each for each in kinds(objects, "Secret") if each["metadata"]["name"] == "blockrelay-api-keys"]
    (volume,) = [
        each for each in pod_of(one(objects, "Deployment", "gateway"))["volumes"] if each["name"] == "api-keys"
    ]
    secret["metadata"]["name"] = volume["secret"]["secretName"] = "blockrelay-api-keys-7k2h9dt6mc"


def users_without_a_file(objects: list[Manifest]) -> None:
    (secret,) = [each for each in kinds(objects, "Secret") if "redis-users" in each["metadata"]["name"]]
    del secret["data"]["payload.acl"]


def monitor_of_another_port(objects: list[Manifest]) -> None:
    (monitor,) = [each for each in kinds(objects, "PodMonitor") if each["metadata"]["name"] == "blockrelay"]
    monitor["spec"]["podMetricsEndpoints"][0]["port"] = "http"


def jobs_of_another_name(objects: list[Manifest]) -> None:
    one(objects, "PodMonitor", "tenants")["spec"]["podMetricsEndpoints"][0]["relabelings"][0]["replacement"] = "tenants"


def prometheus_is_shut_out(objects: list[Manifest]) -> None:
    objects.remove(one(objects, "NetworkPolicy", "metrics"))


def stale_alerts(objects: list[Manifest]) -> None:
    (rule,) = kinds(objects, "PrometheusRule")
    rule["spec"]["groups"][0]["rules"].pop()


def dashboard_left_out(objects: list[Manifest]) -> None:
    objects.remove(one(objects, "ConfigMap", "dashboard-system"))


def misspelt_interval(objects: list[Manifest]) -> None:
    scaler(objects)["pollingIntervall"] = 5


def interval_as_text(objects: list[Manifest]) -> None:
    scaler(objects)["pollingInterval"] = "5"


def interval_without_unit(objects: list[Manifest]) -> None:
    one(objects, "PodMonitor", "tenants")["spec"]["podMetricsEndpoints"][0]["interval"] = "5"


#: Those that schemas see.
SEEN_BY_SCHEMA: tuple[Mistake, ...] = (misspelt, port_as_text)
SEEN_BY_SCHEMA_OF_OTHERS: tuple[Mistake, ...] = (misspelt_interval, interval_as_text, interval_without_unit)
#: Of the overlay demo.
MISTAKES: tuple[Mistake, ...] = (
    long_port_name, other_labels, request_above_limit, mount_without_volume, budget_with_both, bad_name, empty_image,
    long_pre_stop, long_gateway_drain, deaf_at_once, shared_single_writer, port_70000, quantity, removed_version,
    privileged, elsewhere, unknown_setting,
    service_links, drain_without_time, policy_for_nobody, no_policies, no_way_to_names, misspelt_worker,
    nobody_may_come, misspelt_redis, nobody_may_go, last_one_must_stay, volume_of_root, of_another_cell,
    of_another_release, claims_of_a_release, redis_of_a_release, cell_by_hand,
)  # fmt: skip
#: Of components, in the overlay production.
OF_COMPONENTS: tuple[Mistake, ...] = (
    trigger_of_another_cell, trigger_of_a_queue, misspelt_parameter, scaler_of_nobody, number_is_set_back,
    scaler_elsewhere, scaled_twice, keda_without_a_password, keda_is_shut_out, address_of_our_namespace_only,
    url_without_tls, nobody_to_believe, password_elsewhere, keys_as_one_file, keys_under_new_names,
    users_without_a_file, monitor_of_another_port, jobs_of_another_name,
    prometheus_is_shut_out, stale_alerts, dashboard_left_out,
)  # fmt: skip


def wanted_by_another_cell(metric: Manifest) -> None:
    metric["metric"]["selector"]["matchLabels"]["cell"] = "c1"


def wanted_under_another_name(metric: Manifest) -> None:
    metric["metric"]["name"] = "blockrelay_worker_wanted"


def wanted_by_each(metric: Manifest) -> None:
    metric["target"]["averageValue"] = "16"


@pytest.mark.parametrize("mistake", SEEN_BY_SCHEMA)
def test_the_schema_finds_what_it_can(render: Render, mistake: Mistake, tmp_path: Path) -> None:
    objects = render("demo")
    mistake(objects)
    assert schema_complaints(objects, "1.37", tmp_path)


@pytest.mark.parametrize("mistake", SEEN_BY_SCHEMA_OF_OTHERS)
def test_the_types_of_operators_find_what_they_can(render: Render, mistake: Mistake, tmp_path: Path) -> None:
    objects = render("production")
    mistake(objects)
    assert custom_complaints(objects, tmp_path)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_contracts_find_the_rest(render: Render, mistake: Mistake) -> None:
    objects = render("demo")
    mistake(objects)
    assert complaints(objects)


@pytest.mark.parametrize("mistake", OF_COMPONENTS)
def test_the_contracts_find_mistakes_of_components(render: Render, mistake: Mistake) -> None:
    objects = render("production")
    mistake(objects)
    assert complaints(objects)


@pytest.mark.parametrize("mistake", [wanted_by_another_cell, wanted_under_another_name, wanted_by_each])
def test_an_autoscaler_that_asks_for_something_else_is_found(
    render: Render, mistake: Callable[[Manifest], None]
) -> None:
    objects = render("with-hpa")
    mistake(one(objects, "HorizontalPodAutoscaler", "worker-cpu")["spec"]["metrics"][0]["external"])
    assert complaints(objects)


def test_a_route_to_nowhere_is_found(render: Render) -> None:
    objects = render("with-gateway-api")
    (route,) = kinds(objects, "HTTPRoute")
    route["spec"]["rules"][0]["backendRefs"][0]["port"] = 8000
    assert complaints(objects)


def test_sentinels_that_no_policy_opens_are_found(render: Render) -> None:
    objects = render("with-valkey")
    objects.remove(one(objects, "NetworkPolicy", "to-valkey"))
    assert complaints(objects)
