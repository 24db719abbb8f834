"""The table of what clients ask, without the clients."""

from tests.clients.table import FOLDER, clients

#: So many cases work. It grows with them, and never shrinks.
AT_LEAST = 222


def test_what_worked_once_must_work() -> None:
    works = sum(client.works for client in clients())
    assert works >= AT_LEAST, "a case of tests/clients/cases.toml that worked is said to be refused"
    assert works <= AT_LEAST, f"more of them work than ever: AT_LEAST is {works} now"


def test_every_client_can_be_run() -> None:
    for client in clients():
        language, _, name = client.by.partition("/")
        ending = {"python": ".py", "node": ".mjs"}.get(language)
        assert ending is None or (FOLDER / language / f"{name}_cases{ending}").is_file()
        assert client.versions() and client.cases
        for row in client.cases.values():
            assert ("request" in row) == (language == "curl"), "curl makes a request, clients have functions"
