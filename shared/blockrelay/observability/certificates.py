"""The time at which the certificates that a service trusts end, as a metric, read from their files at each scrape."""

import ssl
from collections.abc import Iterator, Mapping
from contextlib import suppress
from urllib.parse import parse_qs, urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector


class Certificates(Collector):
    """The authorities in the addresses of Redis (`ssl_ca_certs`). Without TLS, or with the system's, there are none."""

    def __init__(self, registry: CollectorRegistry, urls: Mapping[str, str | None]) -> None:
        """`urls`: address of each server by its name."""
        self._files = {name: file for name, url in urls.items() if url and (file := authorities_of(url))}
        registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "blockrelay_certificate_end_seconds",
            "When the first of the certificate authorities ends that the addresses of Redis name (Unix seconds)",
            labels=["redis"],
        )
        for name, file in self._files.items():
            if (end := first_end(file)) is not None:
                family.add_metric([name], end)
        yield family


def authorities_of(url: str) -> str:
    """The file of certificate authorities that an address of Redis names, or ""."""
    return parse_qs(urlsplit(url).query).get("ssl_ca_certs", [""])[0]


def first_end(file: str) -> float | None:
    """When the first certificate authority of a file ends; None where it has none, or cannot be read now."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with suppress(OSError):  # an ssl.SSLError is one: it is being written, and is read again at the next scrape
        context.load_verify_locations(file)
    ends = [ssl.cert_time_to_seconds(str(one["notAfter"])) for one in context.get_ca_certs() if "notAfter" in one]
    return float(min(ends)) if ends else None
