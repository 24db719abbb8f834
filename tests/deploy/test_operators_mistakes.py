"""Mistakes that operators of a cluster find in manifests, planted: each is found.

Of selectors, zones, priorities, probes, images and metrics, and a model that nobody chose.
"""

from base64 import b64encode
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.kubernetes.contracts.objects import (
    INSTANCE,
    containers,
    found_by,
    kinds,
    one,
    pod_of,
    selectors_of,
)
from tests.support.kubernetes.contracts.rules import complaints
from tests.support.kubernetes.rendering import Manifest
from tests.support.kubernetes.variants import FAILOVER

Render = Callable[[str], list[Manifest]]
Mistake = Callable[[list[Manifest]], None]


def probe(objects: list[Manifest], name: str) -> dict[str, Any]:
    return containers(one(objects, "StatefulSet", "redis-control"))[0][name]


# Selectors that take the pods of another installation.


def service_of_any_instance(objects: list[Manifest]) -> None:
    del one(objects, "Service", "gateway")["spec"]["selector"][INSTANCE]


def deployment_of_any_instance(objects: list[Manifest]) -> None:
    del one(objects, "Deployment", "scheduler")["spec"]["selector"]["matchLabels"][INSTANCE]


def budget_of_any_instance(objects: list[Manifest]) -> None:
    del one(objects, "PodDisruptionBudget", "worker-cpu")["spec"]["selector"]["matchLabels"][INSTANCE]


def policy_of_any_instance(objects: list[Manifest]) -> None:
    del one(objects, "NetworkPolicy", "nothing")["spec"]["podSelector"]["matchLabels"][INSTANCE]


def policy_for_anybody_here(objects: list[Manifest]) -> None:
    del one(objects, "NetworkPolicy", "redis")["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]


def spread_over_any_instance(objects: list[Manifest]) -> None:
    spread = pod_of(one(objects, "Deployment", "gateway"))["topologySpreadConstraints"]
    del spread[1]["labelSelector"]["matchLabels"][INSTANCE]


def pods_of_another_instance(objects: list[Manifest]) -> None:
    one(objects, "Deployment", "gateway")["spec"]["template"]["metadata"]["labels"][INSTANCE] = "another"


def monitor_of_any_instance(objects: list[Manifest]) -> None:
    del one(objects, "PodMonitor", "tenants")["spec"]["selector"]["matchLabels"][INSTANCE]


# Where pods go, and who is moved away.


def one_zone(objects: list[Manifest]) -> None:
    spread = pod_of(one(objects, "Deployment", "scheduler"))["topologySpreadConstraints"]
    spread[:] = [each for each in spread if "zone" not in each["topologyKey"]]


def one_host(objects: list[Manifest]) -> None:
    del pod_of(one(objects, "Deployment", "worker-cpu"))["topologySpreadConstraints"][0]


def redis_without_priority(objects: list[Manifest]) -> None:
    del pod_of(one(objects, "StatefulSet", "redis-control"))["priorityClassName"]


def redis_below_services(objects: list[Manifest]) -> None:
    one(objects, "PriorityClass", "redis")["value"] = 1


def priority_that_is_not_there(objects: list[Manifest]) -> None:
    objects.remove(one(objects, "PriorityClass", "services"))


def priority_in_a_namespace(objects: list[Manifest]) -> None:
    one(objects, "PriorityClass", "redis")["metadata"]["namespace"] = "blockrelay"


# Probes and deadlines.


def redis_that_only_listens(objects: list[Manifest]) -> None:
    lives = probe(objects, "livenessProbe")
    del lives["exec"]
    lives["tcpSocket"] = {"port": "redis"}


def redis_that_reads_is_ended(objects: list[Manifest]) -> None:
    probe(objects, "livenessProbe")["exec"] = probe(objects, "readinessProbe")["exec"]


def redis_that_reads_is_no_start(objects: list[Manifest]) -> None:
    probe(objects, "startupProbe")["exec"] = probe(objects, "readinessProbe")["exec"]


def redis_that_reads_is_ready(objects: list[Manifest]) -> None:
    probe(objects, "readinessProbe")["exec"] = probe(objects, "livenessProbe")["exec"]


def impatient_with_redis(objects: list[Manifest]) -> None:
    probe(objects, "livenessProbe")["failureThreshold"] = 2


def probe_without_tls(objects: list[Manifest]) -> None:
    probe(objects, "livenessProbe")["exec"] = {"command": ["redis-cli", "ping"]}


def deadline_before_the_start(objects: list[Manifest]) -> None:
    del one(objects, "Deployment", "worker-cpu")["spec"]["progressDeadlineSeconds"]


# Metrics.


def metrics_where_clients_are(objects: list[Manifest]) -> None:
    (gateway,) = containers(one(objects, "Deployment", "gateway"))
    gateway["env"] = [each for each in gateway["env"] if each["name"] != "BLOCKRELAY_METRICS_PORT"]
    gateway["ports"] = [each for each in gateway["ports"] if each["name"] != "metrics"]


def metrics_at_another_port(objects: list[Manifest]) -> None:
    (gateway,) = containers(one(objects, "Deployment", "gateway"))
    gateway["ports"][1]["containerPort"] = 9999


def metrics_for_everybody(objects: list[Manifest]) -> None:
    one(objects, "NetworkPolicy", "clients")["spec"]["ingress"][0]["ports"].append({"port": "metrics"})


def every_port_for_everybody(objects: list[Manifest]) -> None:
    one(objects, "NetworkPolicy", "clients")["spec"]["ingress"] = [{}]


def exporter_without_tls(objects: list[Manifest]) -> None:
    monitor = one(objects, "PodMonitor", "redis")["spec"]["podMetricsEndpoints"]
    monitor[0]["params"]["target"] = ["redis://blockrelay-redis-control:6379"]


def exporter_of_one_server(objects: list[Manifest]) -> None:
    del one(objects, "PodMonitor", "redis")["spec"]["podMetricsEndpoints"][1]


def exporter_is_shut_out(objects: list[Manifest]) -> None:
    came = one(objects, "NetworkPolicy", "redis")["spec"]["ingress"][0]["from"][0]["podSelector"]["matchExpressions"]
    came[0]["values"].remove("redis-exporter")


def exporter_of_another_job(objects: list[Manifest]) -> None:
    one(objects, "PodMonitor", "redis")["spec"]["podMetricsEndpoints"][0]["relabelings"][0]["replacement"] = "redis"


def exporter_believes_nobody(objects: list[Manifest]) -> None:
    (exporter,) = containers(one(objects, "Deployment", "redis-exporter"))
    exporter["env"] = [each for each in exporter["env"] if "TLS" not in each["name"]]


# Images and the model.


def redis_by_tag(objects: list[Manifest]) -> None:
    containers(one(objects, "StatefulSet", "redis-control"))[0]["image"] = "redis:7.4"


def half_a_digest(objects: list[Manifest]) -> None:
    containers(one(objects, "Deployment", "gateway"))[0]["image"] = "registry.example/blockrelay/gateway@sha256:0000"


def no_volume_for_the_model(objects: list[Manifest]) -> None:
    worker = containers(one(objects, "Deployment", "worker-cpu"))[0]
    worker["volumeMounts"] = [each for each in worker["volumeMounts"] if each["name"] != "model"]


def bundled_model(objects: list[Manifest]) -> None:
    for each in ("gateway", "scheduler", "worker-cpu"):
        container = containers(one(objects, "Deployment", each))[0]
        container["env"] = [variable for variable in container["env"] if variable["name"] != "BLOCKRELAY_MODEL"]


def two_models(objects: list[Manifest]) -> None:
    container = containers(one(objects, "Deployment", "scheduler"))[0]
    container["env"] = [variable for variable in container["env"] if variable["name"] != "BLOCKRELAY_MODEL"]


MISTAKES: tuple[Mistake, ...] = (
    service_of_any_instance, deployment_of_any_instance, budget_of_any_instance, policy_of_any_instance,
    policy_for_anybody_here, spread_over_any_instance, pods_of_another_instance, one_zone, one_host,
    redis_that_only_listens, redis_that_reads_is_ended, redis_that_reads_is_no_start, redis_that_reads_is_ready,
    impatient_with_redis, deadline_before_the_start, metrics_where_clients_are, metrics_at_another_port,
    metrics_for_everybody, every_port_for_everybody,
)  # fmt: skip
OF_PRODUCTION: tuple[Mistake, ...] = (
    monitor_of_any_instance, redis_without_priority, redis_below_services, priority_that_is_not_there,
    priority_in_a_namespace, probe_without_tls, exporter_without_tls, exporter_of_one_server, exporter_is_shut_out,
    exporter_of_another_job, exporter_believes_nobody, redis_by_tag, half_a_digest, no_volume_for_the_model,
    bundled_model, two_models,
)  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_an_operator_would_find_is_found(render: Render, mistake: Mistake) -> None:
    objects = render("demo")
    mistake(objects)
    assert complaints(objects)


@pytest.mark.parametrize("mistake", OF_PRODUCTION)
def test_what_an_operator_would_find_in_production_is_found(render: Render, mistake: Mistake) -> None:
    objects = render("production")
    mistake(objects)
    assert complaints(objects)


def nowhere(rule: dict[str, Any]) -> None:
    rule["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]["port"]["name"] = "https"


def without_tls(rule: dict[str, Any]) -> None:
    del rule["spec"]["tls"]


def buffered(rule: dict[str, Any]) -> None:
    del rule["metadata"]["annotations"]["nginx.ingress.kubernetes.io/proxy-buffering"]


def impatient(rule: dict[str, Any]) -> None:
    del rule["metadata"]["annotations"]["nginx.ingress.kubernetes.io/proxy-read-timeout"]


def small(rule: dict[str, Any]) -> None:
    rule["metadata"]["annotations"]["nginx.ingress.kubernetes.io/proxy-body-size"] = "1m"


@pytest.mark.parametrize("mistake", [nowhere, without_tls, buffered, impatient, small])
def test_an_ingress_that_stops_streams_is_found(render: Render, mistake: Callable[[dict[str, Any]], None]) -> None:
    objects = render("with-an-ingress")
    (found,) = kinds(objects, "Ingress")
    mistake(found)
    assert complaints(objects)


def test_another_installation_finds_nothing_of_ours(render: Render) -> None:
    """One namespace, two installations: no selector of either finds a pod of the other."""
    ours, theirs = render("demo"), render("another-instance")
    pods = [each for each in theirs if each["kind"] in ("Deployment", "StatefulSet")]
    assert pods and {each["spec"]["template"]["metadata"]["labels"][INSTANCE] for each in pods} == {"another"}
    for first, second in ((ours, theirs), (theirs, ours)):
        for each in first:
            for selector in selectors_of(each):
                assert found_by(selector, first) and not found_by(selector, second), each["metadata"]["name"]


# A control Redis that fails over.


def one_master_for_ever(objects: list[Manifest]) -> None:
    (secret,) = [each for each in kinds(objects, "Secret") if "redis-worker" in each["metadata"]["name"]]
    url = b"rediss://worker:x@blockrelay-redis-control-0.blockrelay-redis-pods:6379/0"
    secret["data"]["BLOCKRELAY_PAYLOAD_REDIS_URL"] = b64encode(url.replace(b"-pods", b"-podz")).decode()


def sentinels_on_one_host(objects: list[Manifest]) -> None:
    del pod_of(one(objects, "StatefulSet", "sentinel"))["affinity"]


def sentinels_without_tls(objects: list[Manifest]) -> None:
    args = containers(one(objects, "StatefulSet", "sentinel"))[0]["args"]
    args[args.index("--tls-port")] = "--port"


def sentinels_are_shut_out(objects: list[Manifest]) -> None:
    objects.remove(one(objects, "NetworkPolicy", "sentinels"))


def nobody_goes_to_sentinels(objects: list[Manifest]) -> None:
    objects.remove(one(objects, "NetworkPolicy", "to-sentinels"))


def sentinels_without_names(objects: list[Manifest]) -> None:
    del one(objects, "Service", "sentinel")["spec"]["clusterIP"]


def two_sentinels(objects: list[Manifest]) -> None:
    one(objects, "StatefulSet", "sentinel")["spec"]["replicas"] = 2


def keda_asks_one_server(objects: list[Manifest]) -> None:
    one(objects, "ScaledObject", "worker-cpu")["spec"]["triggers"][0]["type"] = "redis"


def keda_asks_for_another_master(objects: list[Manifest]) -> None:
    trigger = one(objects, "ScaledObject", "worker-cpu")["spec"]["triggers"][0]
    trigger["metadata"]["sentinelMaster"] = "mymaster"


def keda_gets_to_no_sentinel(objects: list[Manifest]) -> None:
    one(objects, "NetworkPolicy", "keda")["spec"]["podSelector"]["matchExpressions"][0]["values"] = ["redis-control"]


def exporter_of_the_first_alone(objects: list[Manifest]) -> None:
    del one(objects, "PodMonitor", "redis")["spec"]["podMetricsEndpoints"][-1]


def users_of_sentinels_left_out(objects: list[Manifest]) -> None:
    objects[:] = [each for each in objects if "sentinel-users" not in each["metadata"]["name"]]


@pytest.mark.parametrize(
    "mistake",
    [
        one_master_for_ever, sentinels_on_one_host, sentinels_without_tls, sentinels_are_shut_out,
        nobody_goes_to_sentinels, sentinels_without_names, two_sentinels, keda_asks_one_server,
        keda_asks_for_another_master, keda_gets_to_no_sentinel, exporter_of_the_first_alone,
        users_of_sentinels_left_out,
    ],
)  # fmt: skip
def test_what_would_stop_a_failover_is_found(render: Render, mistake: Mistake) -> None:
    objects = render(FAILOVER)
    mistake(objects)
    assert complaints(objects)
