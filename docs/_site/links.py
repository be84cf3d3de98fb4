"""Links within the built site that lead nowhere: `python docs/_site/links.py docs/_build/html`."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The places of a page that can be linked to, and where its links lead."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.places, self.links = set[str](), set[str]()
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """One element."""
        for name, value in attrs:
            if name == "id" and value:
                self.places.add(value)
            elif name in ("href", "src") and value:
                self.links.add(value)


def broken(root: Path) -> list[str]:
    """Each link that leads nowhere, behind its page."""
    pages = {file.resolve(): Page(file) for file in root.rglob("*.html")}
    found = []
    for file, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            there = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            if not there.exists() or (parts.fragment and there in pages and parts.fragment not in pages[there].places):
                found.append(f"{file.relative_to(root.resolve())}: {link}")
    print(f"{len(pages)} pages, {sum(len(page.links) for page in pages.values())} links, {len(found)} lead nowhere")
    return sorted(found)


if __name__ == "__main__":
    wrong = broken(Path(sys.argv[1]))
    print(*wrong, sep="\n")
    sys.exit(bool(wrong))
