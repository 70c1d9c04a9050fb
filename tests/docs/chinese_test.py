#!/usr/bin/env python3
"""docs/zh/ against docs/: a translated page has the headings, code, tables, links and identifiers of its original.

Prose is free; what a reader copies or looks up is not. The original is the page of the same name one folder up.
"""

import pathlib
import re
import sys
import unittest

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
PAGES = ("install", "bare-metal", "gke", "testbed", "launch", "doctor", "troubleshooting", "environment", "migration", "seeds")


class Page:
    def __init__(self, path):
        self.headings, self.blocks, self.rows, self.code, self.links = [], [], [], set(), set()
        block = None
        for line in path.read_text().splitlines():
            if line.lstrip().startswith("```"):
                if block is None:
                    block = []
                else:
                    self.blocks.append("\n".join(block))
                    block = None
            elif block is not None:
                # A comment is prose.
                block.append(re.sub(r"(^|\s+)#(?!!).*", "", line).rstrip())
            else:
                if match := re.match(r"(#+) ", line):
                    self.headings.append(match[1])
                if line.startswith("|"):
                    self.rows.append(line.count("|"))
                self.code.update(re.findall(r"`([^`]+)`", line))
                self.links.update(re.findall(r"\]\(([^)#]+)", line))


class Chinese(unittest.TestCase):
    def pages(self):
        for name in PAGES:
            with self.subTest(page=name):
                yield name, Page(DOCS / f"{name}.md"), Page(DOCS / "zh" / f"{name}.md")

    def test_every_page_has_its_translation(self):
        found = {path.stem for path in (DOCS / "zh").glob("*.md")} - {"index"}
        self.assertEqual(found, set(PAGES))

    def test_headings(self):
        for _, english, chinese in self.pages():
            self.assertEqual(chinese.headings, english.headings)

    def test_code_blocks(self):
        for _, english, chinese in self.pages():
            self.assertEqual(chinese.blocks, english.blocks)

    def test_tables(self):
        for _, english, chinese in self.pages():
            self.assertEqual(chinese.rows, english.rows)

    def test_identifiers(self):
        for _, english, chinese in self.pages():
            self.assertEqual(english.code - chinese.code, set(), "missing")
            self.assertEqual(chinese.code - english.code, set(), "added")

    def test_links(self):
        for _, english, chinese in self.pages():
            # Pages that are not translated are one folder up.
            expected = {link if link.startswith("http") or link.removesuffix(".md") in PAGES else f"../{link}" for link in english.links}
            self.assertEqual(chinese.links, expected)

    def test_it_is_chinese(self):
        for path in (DOCS / "zh").glob("*.md"):
            text = path.read_text()
            self.assertGreater(len(re.findall(r"[\u4e00-\u9fff]", text)), len(text) / 12, path.name)


if __name__ == "__main__":
    unittest.main()
