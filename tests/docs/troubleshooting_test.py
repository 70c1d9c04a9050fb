#!/usr/bin/env python3
"""docs/reference/errors.md and the errors of the code say the same.

1. Every text in the first column of its tables is a text of the code (`...` stands for anything).
2. Every error of the code is quoted there, or is on the list of internal ones.
3. Nothing on that list is stale.
"""

import re
import sys

import errors

PAGE = errors.ROOT / "docs/reference/errors.md"
INTERNAL = errors.ROOT / "tests/docs/internal_errors.txt"


def pattern(quoted):
    return re.compile(".*".join(map(re.escape, quoted.split("..."))))


def quoted_texts():
    in_table = False
    for number, line in enumerate(PAGE.read_text().splitlines(), 1):
        if line.startswith("| text |"):
            in_table = True
        elif not line.startswith("|"):
            in_table = False
        elif in_table:
            for text in re.findall(r"`([^`]+)`", line[1:].split(" | ")[0]):
                yield number, text


def covers(quote, compiled, text):
    """A short quote says little about a long text."""
    return errors.weight(quote) >= min(16, errors.weight(text) / 4) and compiled.search(text)


def main():
    quoted = list(quoted_texts())
    patterns = [(number, text, pattern(text)) for number, text in quoted]
    thrown = sorted(set(errors.thrown()))
    existing = sorted(set(errors.everything()) | {text for _, _, text in thrown})
    internal = [line for line in INTERNAL.read_text().splitlines() if line and not line.startswith("#")]
    problems = []
    if len(quoted) < 100 or len(thrown) < 200:
        problems.append(f"only {len(quoted)} quoted texts and {len(thrown)} errors were found: is this test looking?")

    for number, text, compiled in patterns:
        if not any(compiled.search(candidate) for candidate in existing):
            problems.append(f"docs/reference/errors.md:{number}: no text of the code is like this: {text}")

    used = set()
    for where, kind, text in thrown:
        listed = [i for i in internal if f"{where}: {text}".startswith(i) or f"*: {text}".startswith(i)]
        used.update(listed)
        if not listed and not any(covers(quote, compiled, text) for _, quote, compiled in patterns):
            problems.append(f"{where}: {kind}, neither in docs/reference/errors.md nor in {INTERNAL.name}: {text}")
    problems += [f"tests/docs/{INTERNAL.name}: no error is like this any more: {i}" for i in internal if i not in used]

    print("\n".join(problems) or f"{len(thrown)} errors, {len(quoted)} quoted texts: they agree")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
