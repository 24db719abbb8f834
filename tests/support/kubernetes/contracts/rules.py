"""What must hold among rendered manifests, and between them and the code: what no schema of the API can see."""

from tests.support.kubernetes.contracts import (
    identity,
    limits,
    monitoring,
    network,
    placement,
    pods,
    redis_probes,
    scaling,
)
from tests.support.kubernetes.contracts.objects import OF_THE_CLUSTER, Rule
from tests.support.kubernetes.rendering import Manifest

#: Of all objects of an overlay.
OF_AN_OVERLAY: tuple[Rule, ...] = (identity.of_today, identity.in_namespaces)
#: Of those of one namespace: what is elsewhere finds nobody here.
OF_A_NAMESPACE: tuple[Rule, ...] = (
    identity.named, identity.labelled, identity.lasting, identity.instanced, identity.selected, identity.disrupted,
    network.ports, network.closed, network.reached, network.ingress,
    pods.probed, pods.configured, pods.imaged, pods.pinned, pods.modelled, pods.mounted, pods.renewed,
    redis_probes.asked, placement.spread, placement.prioritised, placement.deadlined,
    limits.confined, limits.sized, limits.ended,
    scaling.scaled, scaling.by_unfinished_requests, scaling.by_workers_wanted,
    monitoring.scraped, monitoring.private, monitoring.exported, monitoring.alerted,
)  # fmt: skip


def complaints(objects: list[Manifest]) -> list[str]:
    """Of all rules; a sentence each."""
    said = [each for rule in OF_AN_OVERLAY for each in rule(objects)]
    of_all = [one for one in objects if one["kind"] in OF_THE_CLUSTER and one["kind"] != "Namespace"]
    near = [one for one in objects if one["kind"] not in OF_THE_CLUSTER]
    for space in sorted({str(one["metadata"].get("namespace")) for one in near}):
        inside = [one for one in near if str(one["metadata"].get("namespace")) == space] + of_all
        said += [f"{space}: {each}" for rule in OF_A_NAMESPACE for each in rule(inside)]
    return said
