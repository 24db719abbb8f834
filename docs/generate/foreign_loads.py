"""What the pages of a built site would load from other hosts.

`python -m docs.generate.foreign_loads FOLDER` fails if there is anything.

Links that people may follow are fine. Scripts are read for what they load at once, not for what they could load.
"""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

#: Relations of <link> that make a browser fetch or connect.
_FETCHED = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch", "modulepreload", "manifest"}
_ABSOLUTE = re.compile(r"\s*(?:https?:)?//", re.I)
_IN_STYLES = re.compile(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')\s]+)", re.I)


class _Loads(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        loaded = [values.get(name, "") for name in ("src", "srcset", "poster", "data")]
        if tag == "link" and _FETCHED & set(values.get("rel", "").lower().split()):
            loaded.append(values.get("href", ""))
        self.found += [url for url in loaded if _ABSOLUTE.match(url)]
        self.found += _IN_STYLES.findall(values.get("style", ""))


def foreign_loads(site: Path) -> list[str]:
    """One line for each, by file."""
    found: list[str] = []
    for file in sorted(site.rglob("*.html")):
        page = _Loads()
        page.feed(file.read_text())
        found += [f"{file}: {url}" for url in [*page.found, *_styles_in(file.read_text())]]
    for file in sorted(site.rglob("*.css")):
        found += [f"{file}: {url}" for url in _IN_STYLES.findall(file.read_text())]
    return found


def _styles_in(text: str) -> list[str]:
    return [url for style in re.findall(r"<style[^>]*>(.*?)</style>", text, re.S) for url in _IN_STYLES.findall(style)]


if __name__ == "__main__":
    (_folder,) = map(Path, sys.argv[1:])
    if not (_folder / "index.html").exists():
        sys.exit(f"{_folder} holds no site")
    if _found := foreign_loads(_folder):
        sys.exit("\n".join(["these pages load something from another host:", *_found]))
