"""The expiry of certificates: the earliest of a file counts, and the server's; an unreadable file has no series."""

from pathlib import Path

from prometheus_client import CollectorRegistry

from blockrelay.observability.certificates import Certificates, authorities_of

#: Two authorities, and when they end (openssl x509 -enddate).
LATE, LATE_ENDS = (
    """\
-----BEGIN CERTIFICATE-----
MIIBiTCCAS+gAwIBAgIUG2TyVbtTGUka43HesU9AYjplM0AwCgYIKoZIzj0EAwIw
GTEXMBUGA1UEAwwOdGVzdCBhdXRob3JpdHkwIBcNMjYxMTI3MDI0ODQ3WhgPMjEy
NjExMDMwMjQ4NDdaMBkxFzAVBgNVBAMMDnRlc3QgYXV0aG9yaXR5MFkwEwYHKoZI
zj0CAQYIKoZIzj0DAQcDQgAEpoBmzfgSdUCcXEZnGNsJEiBb9fOOX4pmqKW2hZ1S
Nf16I/o4Li5nVQ27uKygKnFhH71MtSQlGwtQhelDFZq4d6NTMFEwHQYDVR0OBBYE
FAFHF9hYe32WwG6MBDSlL6BGHzBvMB8GA1UdIwQYMBaAFAFHF9hYe32WwG6MBDSl
L6BGHzBvMA8GA1UdEwEB/wQFMAMBAf8wCgYIKoZIzj0EAwIDSAAwRQIhAMf6QIk8
rz+eErZv+l/741GD4CIj3xEUHMgC+pHZZ0a+AiAh+09vtKoDT3YgJaSwt5POh5af
ZlwOaLpuyePWkl6W7g==
-----END CERTIFICATE-----
""",
    4949347727,
)
EARLY, EARLY_ENDS = (
    """\
-----BEGIN CERTIFICATE-----
MIIBeTCCAR+gAwIBAgIUUqTrlEeQA1PBMH6VpRXhadZhSBMwCgYIKoZIzj0EAwIw
EjEQMA4GA1UEAwwHYW5vdGhlcjAeFw0yNjExMjcwMjQ4NDhaFw0zNjExMjQwMjQ4
NDhaMBIxEDAOBgNVBAMMB2Fub3RoZXIwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNC
AAQRjcs7ImmYaquYLg/puwVSzXTWIiNsmF2RWpjXmGXHEflW08j7nQZk3hPsB10j
CxotimcydeHPmdrqlWdXBL8po1MwUTAdBgNVHQ4EFgQU/hGhN2SUTH3qhK4uhhh7
p00NvnIwHwYDVR0jBBgwFoAU/hGhN2SUTH3qhK4uhhh7p00NvnIwDwYDVR0TAQH/
BAUwAwEB/zAKBggqhkjOPQQDAgNIADBFAiAcrdHWHgAQbZ6Ro22VOPQhPGinZWby
YaoNYL2uIN7OnAIhAJFxCWUQxkRzGEXR/2KOsprFo1brm/4v3HtpU52atVm/
-----END CERTIFICATE-----
""",
    2111107728,
)


def test_the_first_end_of_a_file_is_told_and_read_again_when_it_changes(tmp_path: Path) -> None:
    registry, file = CollectorRegistry(), tmp_path / "ca.crt"
    Certificates(
        registry, {"control": f"rediss+sentinel://u:p@a,b/blockrelay/0?ssl_ca_certs={file}", "payload": None}, {}
    )

    def told() -> float | None:
        return registry.get_sample_value("blockrelay_certificate_end_seconds", {"redis": "control"})

    assert told() is None, "it is not there yet"
    file.write_text(LATE)
    assert told() == LATE_ENDS
    file.write_text(LATE + EARLY)
    assert told() == EARLY_ENDS
    file.write_text("no certificate")
    assert told() is None


def test_the_certificate_of_a_server_counts_too_and_stays_known_while_no_connection_shows_it(tmp_path: Path) -> None:
    registry, file = CollectorRegistry(), tmp_path / "ca.crt"
    file.write_text(EARLY)
    seen: list[float | None] = [None, 2_000_000_000.0, None, 3_000_000_000.0]
    address = {"control": f"rediss://a/0?ssl_ca_certs={file}"}
    Certificates(registry, address, {"control": lambda: seen.pop(0)})
    ends = [registry.get_sample_value("blockrelay_certificate_end_seconds", {"redis": "control"}) for _ in list(seen)]
    assert ends == [EARLY_ENDS, 2_000_000_000.0, 2_000_000_000.0, EARLY_ENDS]


def test_an_address_without_tls_names_none() -> None:
    assert authorities_of("redis://localhost:6379/0") == "" and authorities_of("unix:///run/redis.sock") == ""
    registry = CollectorRegistry()
    Certificates(registry, {"control": "redis://localhost:6379/0"}, {"control": lambda: None})
    assert not [sample for family in registry.collect() for sample in family.samples]
