"""The expiry of the certificates of Redis, and of the authorities that a service trusts, as a metric.

The files of authorities are read at each scrape; the certificate of a server is that of the newest connection to it.
"""

import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from urllib.parse import parse_qs, urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector


class Certificates(Collector):
    """Exports `blockrelay_certificate_end_seconds`, one series for each Redis with a known expiry."""

    def __init__(
        self,
        registry: CollectorRegistry,
        urls: Mapping[str, str | None],
        servers: Mapping[str, Callable[[], float | None]],
    ) -> None:
        """`urls`: the address of each Redis by its name, which becomes the label `redis`; None where there is none.

        `servers`: by the same names, a function that returns when the server's certificate ends, or None while it is
        not known. The last value that was known counts.
        """
        self._files = {name: file for name, url in urls.items() if url and (file := authorities_of(url))}
        self._servers = servers
        self._known: dict[str, float] = {}
        registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "blockrelay_certificate_end_seconds",
            "Earliest expiry of the server's certificate and of the certificate authorities in the file that a Redis "
            "address names (Unix seconds)",
            labels=["redis"],
        )
        for name, server in self._servers.items():
            if (end := server()) is not None:
                self._known[name] = end
        for name in sorted(self._files.keys() | self._known.keys()):
            ends = [first_end(self._files[name]) if name in self._files else None, self._known.get(name)]
            if known := [end for end in ends if end is not None]:
                family.add_metric([name], min(known))
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
