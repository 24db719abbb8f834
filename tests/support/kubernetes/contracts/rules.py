"""What must hold among rendered manifests, and between them and the code: what no schema of the API can see."""

from tests.support.kubernetes.contracts import identity, limits, monitoring, network, pods, scaling
from tests.support.kubernetes.contracts.objects import Rule
from tests.support.kubernetes.rendering import Manifest

#: Of all objects of an overlay.
OF_AN_OVERLAY: tuple[Rule, ...] = (identity.of_today, identity.in_namespaces)
#: Of those of one namespace: what is elsewhere finds nobody here.
OF_A_NAMESPACE: tuple[Rule, ...] = (
    identity.named, identity.labelled, identity.selected, identity.disrupted,
    network.ports, network.closed, network.reached,
    pods.probed, pods.configured, pods.imaged, pods.mounted, pods.renewed,
    limits.confined, limits.sized, limits.ended,
    scaling.scaled, scaling.by_unfinished_requests, scaling.by_workers_wanted,
    monitoring.scraped, monitoring.alerted,
)  # fmt: skip


def complaints(objects: list[Manifest]) -> list[str]:
    """Of all rules; a sentence each."""
    said = [each for rule in OF_AN_OVERLAY for each in rule(objects)]
    for space in sorted({str(one["metadata"].get("namespace")) for one in objects if one["kind"] != "Namespace"}):
        inside = [one for one in objects if str(one["metadata"].get("namespace")) == space]
        said += [f"{space}: {each}" for rule in OF_A_NAMESPACE for each in rule(inside)]
    return said
