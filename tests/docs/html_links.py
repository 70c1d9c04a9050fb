#!/usr/bin/env python3
"""Every link of the built pages leads somewhere, and nothing is loaded from elsewhere.

usage: html_links.py FOLDER    scripts/docs runs it
"""

import html.parser
import pathlib
import sys
import urllib.parse

LOADED = {"img": "src", "script": "src", "link": "href", "source": "srcset", "iframe": "src"}


class Page(html.parser.HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.anchors, self.links, self.loaded = {""}, [], []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.anchors.add(attributes.get("id") or attributes.get("name") or "")
        target = attributes.get(LOADED.get(tag, "href")) or ""
        if tag == "link" and attributes.get("rel") not in ("stylesheet", "icon"):
            return
        (self.loaded if tag in LOADED else self.links).append(target)


def main():
    top = pathlib.Path(sys.argv[1]).resolve()
    pages = {path: Page(path) for path in sorted(top.rglob("*.html"))}
    problems, links = [], 0
    for path, page in pages.items():
        where = path.relative_to(top)
        for target in page.links + page.loaded:
            parts = urllib.parse.urlsplit(target)
            if parts.scheme or parts.netloc:
                if target in page.loaded and parts.scheme != "data":
                    problems.append(f"{where}: loads {target}")
                continue
            links += 1
            linked = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
            if not linked.exists():
                problems.append(f"{where}: there is no {target}")
            elif linked in pages and urllib.parse.unquote(parts.fragment) not in pages[linked].anchors:
                problems.append(f"{where}: no heading makes {target}")
    print("\n".join(problems) or f"{len(pages)} pages, {links} links: all lead somewhere")
    return 1 if problems or len(pages) < 20 else 0


if __name__ == "__main__":
    sys.exit(main())
