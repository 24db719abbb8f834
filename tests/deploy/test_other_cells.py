"""What pods of a cell reach in another cell's namespace, by the policies of both: what they need, and nothing else."""

from collections.abc import Callable, Iterator

import pytest

from tests.support.kubernetes.contracts.objects import WORKLOADS, containers, kinds, labels_of, matches, one
from tests.support.kubernetes.rendering import Manifest

Render = Callable[[str], list[Manifest]]
Mistake = Callable[[list[Manifest]], None]
#: Overlay -> who reaches whom at which port. With Sentinels the peer cell asks those first.
REDIS = {("gateway", "redis-control", "redis"), ("gateway", "redis-payload", "redis")}
EXPECTED = {
    "with-other-cells": REDIS,
    "with-sentinels-gpus-and-cells": REDIS | {("gateway", "sentinel", "sentinel")},
    "with-sentinels": set[tuple[str, str, str]](),
}
#: Of the namespace that both cells stand in the same way.
CELL = {"blockrelay.io/cell": "c1", "kubernetes.io/metadata.name": "c1"}
COMPONENT = "app.kubernetes.io/component"


def lets(policies: list[Manifest], workload: Manifest, peer: Manifest, port: Manifest, *, way: str) -> bool:
    """Returns whether a policy of the workload allows traffic with the peer, which is in another cell's namespace."""
    of = [one for one in policies if matches(one["spec"]["podSelector"], labels_of(workload))]
    for rule in (rule for policy in of for rule in policy["spec"].get(way, [])):
        named = [each["port"] for each in rule.get("ports", [])]
        peers = rule.get("to" if way == "egress" else "from")
        met = peers is None or any(
            "namespaceSelector" in each
            and matches(each["namespaceSelector"], CELL)
            and matches(each.get("podSelector", {}), labels_of(peer))
            for each in peers
        )
        if met and (not named or {port["name"], port["containerPort"]} & {*named}):
            return True
    return False


def reached(objects: list[Manifest]) -> Iterator[tuple[str, str, str]]:
    """Yields client, server and port of all traffic that the policies allow from one cell to another."""
    policies, workloads = kinds(objects, "NetworkPolicy"), kinds(objects, *WORKLOADS)
    for client in workloads:
        for server in workloads:
            for port in (port for container in containers(server) for port in container.get("ports", [])):
                if lets(policies, client, server, port, way="egress") and lets(
                    policies, server, client, port, way="ingress"
                ):
                    yield labels_of(client)[COMPONENT], labels_of(server)[COMPONENT], port["name"]


@pytest.mark.parametrize("variant", EXPECTED)
def test_a_peer_cell_is_reached_where_it_must_be_and_nowhere_else(render: Render, variant: str) -> None:
    assert {*reached(render(variant))} == EXPECTED[variant]


def sentinels_stay_shut(objects: list[Manifest]) -> None:
    one(objects, "NetworkPolicy", "redis-of-cells")["spec"]["podSelector"]["matchExpressions"][0]["values"].remove(
        "sentinel"
    )


def nobody_asks_them(objects: list[Manifest]) -> None:
    one(objects, "NetworkPolicy", "other-cells")["spec"]["egress"][0]["ports"].pop()


def workers_come_too(objects: list[Manifest]) -> None:
    for name, way, peers in (("other-cells", "egress", "to"), ("redis-of-cells", "ingress", "from")):
        policy = one(objects, "NetworkPolicy", name)["spec"]
        policy[way][0][peers][0]["podSelector"] = {}
        if way == "egress":
            policy["podSelector"] = {}


@pytest.mark.parametrize("mistake", [sentinels_stay_shut, nobody_asks_them, workers_come_too])
def test_a_way_that_is_shut_or_too_wide_is_seen(render: Render, mistake: Mistake) -> None:
    objects = render("with-sentinels-gpus-and-cells")
    mistake(objects)
    assert {*reached(objects)} != EXPECTED["with-sentinels-gpus-and-cells"]
