"""What all unit tests share."""

from pathlib import Path

import certifi
import pytest


@pytest.fixture(scope="session")
def one_authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first certificate of the list that httpx reads."""
    first, end, _ = Path(certifi.where()).read_text().partition("-----END CERTIFICATE-----\n")
    file = tmp_path_factory.mktemp("authorities") / "one.pem"
    file.write_text(first + end)
    return file


@pytest.fixture(autouse=True)
def few_authorities(one_authority: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """httpx reads the certificates of every public authority for each client, which takes 40 ms; unit tests speak to
    this machine alone, most without TLS. Those with it name the authority that they have made."""
    monkeypatch.setenv("SSL_CERT_FILE", str(one_authority))
