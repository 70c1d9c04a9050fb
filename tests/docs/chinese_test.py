#!/usr/bin/env python3
"""docs/zh/ against the English pages: headings, commands and identifiers stand in both; prose is free.

The Chinese README is shorter: it leaves out blocks of code, and has none of its own.
"""

import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
ZH = ROOT / "docs/zh"
TRANSLATED = {"README.md", "first-hour.md", "gke.md", "install.md", "troubleshooting.md"}


def parts(path):
    """Levels of headings; commands of each block without comments; identifiers."""
    text = path.read_text()
    blocks = re.findall(r"^\s*```.*?\n(.*?)^\s*```", text, re.M | re.S)
    commands = [[re.sub(r"(^|\s+)#(?!!).*", "", line).rstrip() for line in block.splitlines()] for block in blocks]
    prose = re.sub(r"^\s*```.*?^\s*```", "", text, flags=re.M | re.S)
    return re.findall(r"^(#+) ", prose, re.M), commands, set(re.findall(r"`([^`\n]+)`", prose))


class Chinese(unittest.TestCase):
    maxDiff = None

    def test_the_pages_that_a_first_day_needs(self):
        self.assertEqual({path.name for path in ZH.glob("*.md")}, TRANSLATED)

    def test_headings_commands_and_identifiers(self):
        for name in sorted(TRANSLATED - {"README.md"}):
            with self.subTest(page=name):
                self.assertEqual(parts(ZH / name), parts(ROOT / "docs/how-to" / name))

    def test_readme(self):
        headings, commands, code = parts(ROOT / "README.md")
        their_headings, their_commands, their_code = parts(ZH / "README.md")
        self.assertEqual(their_headings, headings)
        self.assertEqual(their_commands, [block for block in commands if block in their_commands])
        self.assertGreaterEqual(len(their_commands), 3)
        self.assertLessEqual(their_code, code)


if __name__ == "__main__":
    unittest.main()
