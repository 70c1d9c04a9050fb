"""Plain words in comments and pages: patterns that make a reader stop, counted for each area. The counts may only fall.

``python3 tests/docs/language_test.py`` fails where an area has more than tests/docs/language.txt says; with ``--list
AREA`` it prints the places; with ``--update`` it writes lower counts down. CONTRIBUTING.md has the rules.
"""

import argparse
import collections
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
ALLOWED = ROOT / "tests/docs/language.txt"
AREAS = {
    "pages": ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", ".github/", "docs/", "deploy/"),
    "include": ("include/",),
    "kernels": ("kernels/", "simulation/kernels/"),
    "csrc": ("csrc/", "machine/", "simulation/"),
    "python": ("python/",),
    "tools": ("tools/", "scripts/"),
    "tests": ("tests/", "oracle/", "examples/"),
}
SKIPPED = ("docs/zh/", "tests/docs/language", "tests/mutants/README.md")
COMMENT = re.compile(r"^\s*(?://+[/<!]*|#)\s?(.*)$|(?:^|\s)(?://+[/<!]*|#)\s(.*)$")
PATTERNS = {
    "a sentence that begins with Who, Whoever or Whom": re.compile(r"(?:^|[.:;!?]\s+)(?:Who|Whoever|Whom|Whomever)\s+(?!\w+\?)[^?]*?[.,;]"),
    "whoever, somebody, nobody, everybody as actors": re.compile(r"\b(?:whoever|whomever|somebody|someone|nobody|everybody|everyone|anybody)\b", re.I),
    "a sentence that begins with What as a noun": re.compile(r"(?:^|[.!?]\s+)What\s(?!(?:is|are|does|do|did|was|were|if|happens)\b)[^?]*?[.;]"),
    "a sentence that begins with Where as a condition": re.compile(r"(?:^|[.!?]\s+)Where\s[^?]*?,"),
    "words of our own": re.compile(r"\b(?:clerk|debts?|news|speaker|journeys?|put off|makes? way|hands? out)\b", re.I),
}
# Of pages only: comments are shorter than sentences.
IN_PAGES = {
    "a heading that is a clause": re.compile(r"^#+ (?:Whose|Whom|Whoever|Where|That)\s"),
    "a verb that waits for the end of its sentence": re.compile(r"\b(?:must|shall|should|may|might|can|could|will|would) be[.;:](?:\s|$)"),
}


def area_of(path):
    if path.startswith(SKIPPED):
        return None
    return next((area for area, starts in AREAS.items() if path.startswith(starts)), None)


def prose(path, text):
    """Lines with what a reader reads: all of a page, the comments of a source."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if path.endswith(".md"):
            if line.lstrip().startswith("```"):
                fenced = not fenced
            elif not fenced:
                yield number, re.sub(r"`[^`]*`", "`code`", line)
        elif path.endswith((".cpp", ".hpp", ".cu", ".cuh", ".h", ".py", ".cmake", "CMakeLists.txt")):
            found = COMMENT.search(line)
            if found:
                yield number, found.group(1) or found.group(2) or ""


def places():
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    for path in names:
        area = area_of(path)
        if area is None or not (ROOT / path).is_file():
            continue
        for number, line in prose(path, (ROOT / path).read_text(errors="replace")):
            for name, pattern in {**PATTERNS, **(IN_PAGES if path.endswith(".md") else {})}.items():
                for found in pattern.finditer(line):
                    yield area, name, f"{path}:{number}: {found.group(0).strip()[:100]}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", metavar="AREA", choices=AREAS, help="prints all places of an area")
    parser.add_argument("--update", action="store_true", help="writes down counts that have fallen")
    arguments = parser.parse_args()
    found = collections.defaultdict(list)
    for area, name, place in places():
        found[area].append(f"{place}   ({name})")
    if arguments.list:
        print("\n".join(found[arguments.list]))
        return 0
    lines = ALLOWED.read_text().split("\n") if ALLOWED.exists() else []
    allowed = {area: int(count) for area, count in (line.split() for line in lines if line and not line.startswith("#"))}
    if arguments.update:
        head = [line for line in lines if line.startswith("#")]
        counts = [f"{area} {min(len(found[area]), allowed.get(area, len(found[area])))}" for area in AREAS]
        ALLOWED.write_text("\n".join([*head, *counts]) + "\n")
        return 0
    worse = [area for area in AREAS if len(found[area]) > allowed.get(area, 0)]
    for area in AREAS:
        print(f"{area}: {len(found[area])} places, at most {allowed.get(area, 0)}")
    for area in worse:
        print(f"{area}: more than before; python3 tests/docs/language_test.py --list {area} prints the places")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
