"""A page that would load something from another host is found in a built site."""

from pathlib import Path

import pytest

from docs.generate.foreign_loads import foreign_loads


@pytest.mark.parametrize(
    "text",
    [
        '<link rel="stylesheet" href="https://fonts.example/css?family=Roboto">',
        '<link rel="preconnect" href="//fonts.example" crossorigin>',
        '<script src="https://cdn.example/x.js"></script>',
        '<img src="http://pictures.example/x.png">',
        "<style>body { background: url('https://pictures.example/x.png') }</style>",
        '<p style="background: url(//pictures.example/x.png)">',
    ],
)
def test_what_is_loaded_from_another_host_is_found(tmp_path: Path, text: str) -> None:
    (tmp_path / "index.html").write_text(f"<html>{text}</html>")
    assert len(foreign_loads(tmp_path)) == 1


def test_links_and_files_of_the_site_are_fine(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(
        '<a href="https://example.org">x</a><script src="assets/x.js"></script><link rel="canonical" href="https://x.example">'
    )
    (tmp_path / "x.css").write_text("@import 'own.css'; a { background: url(data:image/svg+xml;x) }")
    assert not foreign_loads(tmp_path)
    (tmp_path / "x.css").write_text("@import url(https://fonts.example/x.css);")
    assert foreign_loads(tmp_path)
