#!/usr/bin/env python3
"""What our Markdown points at is there: linked files and headings, and files and folders that are named as code.

Pages of measurements tell of the sources as they were; of those only links are checked.
"""

import functools
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"build"}
CODE_BLOCK = re.compile(r"^```.*?^```", re.M | re.S)
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED = re.compile(r"`([\w.]+(?:/[\w.*<>-]+)+/?)`")


def pages():
    yield from sorted(ROOT.glob("*.md"))
    for folder in sorted(FOLDERS - {".git"}):
        yield from sorted((ROOT / folder).rglob("*.md"))


@functools.cache
def anchors(page):
    """As GitHub and MyST make them of headings."""
    text = CODE_BLOCK.sub("", page.read_text())
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def problems_of(page):
    text = CODE_BLOCK.sub("", page.read_text())
    for target in LINK.findall(text):
        if re.match(r"\w+:", target):
            continue
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        if not linked.exists():
            yield f"there is no {target}"
        elif anchor and linked.suffix == ".md" and anchor not in anchors(linked):
            yield f"no heading makes {target}"
    if page.parent.name == "measurements":
        return
    for name in NAMED.findall(text):
        if name.split("/")[0] not in FOLDERS or name.startswith("build/"):
            continue
        wanted = re.sub(r"<[^>]*>", "*", name).rstrip("/")
        if not any(ROOT.glob(wanted)) and not any(ROOT.glob(wanted + ".*")):
            yield f"there is no {name}"


def main():
    found = [(page, problem) for page in pages() for problem in problems_of(page)]
    for page, problem in found:
        print(f"{page.relative_to(ROOT)}: {problem}")
    print(f"{len(list(pages()))} pages")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
