"""The expiry of the certificate authorities that a service trusts, as a metric. Their files are read at each scrape."""

import ssl
from collections.abc import Iterator, Mapping
from contextlib import suppress
from urllib.parse import parse_qs, urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector


class Certificates(Collector):
    """Exports `blockrelay_certificate_end_seconds`, one series for each Redis address with `ssl_ca_certs`.

    There is no series without TLS or with the system's certificate authorities.
    """

    def __init__(self, registry: CollectorRegistry, urls: Mapping[str, str | None]) -> None:
        """`urls`: the address of each Redis by its name, which becomes the label `redis`; None where there is none."""
        self._files = {name: file for name, url in urls.items() if url and (file := authorities_of(url))}
        registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "blockrelay_certificate_end_seconds",
            "Earliest expiry of the certificate authorities in the file that a Redis address names (Unix seconds)",
            labels=["redis"],
        )
        for name, file in self._files.items():
            if (end := first_end(file)) is not None:
                family.add_metric([name], end)
        yield family


def authorities_of(url: str) -> str:
    """Returns the path in a Redis address's option `ssl_ca_certs`, or "" without it."""
    return parse_qs(urlsplit(url).query).get("ssl_ca_certs", [""])[0]


def first_end(file: str) -> float | None:
    """Returns the earliest expiry (Unix seconds) in a file of certificate authorities.

    None if the file has no certificate, or cannot be read now.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with suppress(OSError):  # ssl.SSLError too: a file that is just being written is read again at the next scrape
        context.load_verify_locations(file)
    ends = [ssl.cert_time_to_seconds(str(cert["notAfter"])) for cert in context.get_ca_certs() if "notAfter" in cert]
    return float(min(ends)) if ends else None
