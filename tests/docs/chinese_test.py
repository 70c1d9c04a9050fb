#!/usr/bin/env python3
"""docs/zh/ against docs/: what a reader copies or looks up, commands and identifiers, stands in both; prose is free."""

import pathlib
import re
import unittest

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
PAGES = {path.name: next(page for page in DOCS.rglob(path.name) if page.parent.name != "zh") for path in (DOCS / "zh").glob("*.md")}


def parts(path):
    text = path.read_text()
    blocks = re.findall(r"^\s*```.*?\n(.*?)^\s*```", text, re.M | re.S)
    commands = [re.sub(r"(^|\s+)#(?!!).*", "", line).rstrip() for block in blocks for line in block.splitlines()]
    prose = re.sub(r"^\s*```.*?^\s*```", "", text, flags=re.M | re.S)
    return commands, set(re.findall(r"`([^`\n]+)`", prose))


class Chinese(unittest.TestCase):
    def test_commands_and_identifiers(self):
        self.assertEqual(set(PAGES), {"gke.md", "install.md", "troubleshooting.md"})
        for name, page in PAGES.items():
            with self.subTest(page=name):
                (commands, code), (their_commands, their_code) = parts(page), parts(DOCS / "zh" / name)
                self.assertEqual(their_commands, commands)
                self.assertEqual(their_code, code)


if __name__ == "__main__":
    unittest.main()
