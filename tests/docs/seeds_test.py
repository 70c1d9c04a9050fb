#!/usr/bin/env python3
"""docs/seeds.md answers every step of the documents, in order, and what it names as a test, file or command exists.

usage: seeds_test.py [BUILD]   with the build folder, names of tests are looked up in it
"""

import pathlib
import re
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = sys.argv.pop() if len(sys.argv) > 1 else None
ROW = re.compile(r"\| ([A-E]\d+) \|(.*)\|(.*)\|(.*)\|$")
# Steps of each document.
STEPS = {"A": 23, "B": 23, "C": 11, "E": 15}
# What may stand instead of a test.
NO_TEST = ("not needed", "by reading", "needs a cluster", "needs GPUs", "needs NICs")


def rows():
    found = [ROW.match(line) for line in (ROOT / "docs/seeds.md").read_text().splitlines()]
    return [tuple(cell.strip() for cell in match.groups()) for match in found if match]


def tests_of(build):
    listing = subprocess.run(["ctest", "--test-dir", build, "-N"], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"Test +#\d+: (\S+)", listing))


class Seeds(unittest.TestCase):
    def test_every_step_is_answered_once_in_order(self):
        wanted = [f"{document}{step}" for document, steps in STEPS.items() for step in range(1, steps + 1)]
        self.assertEqual([row[0] for row in rows()], wanted)

    def test_what_shows_it_exists(self):
        tests = tests_of(BUILD) if BUILD else None
        for item, _, _, shown in rows():
            with self.subTest(item):
                named = re.findall(r"`([^`]+)`", shown)
                if not named:
                    self.assertTrue(shown.startswith(NO_TEST), f"neither a test nor one of {NO_TEST}: {shown}")
                for name in named:
                    if "/" in name:
                        self.assertTrue((ROOT / name).exists(), f"there is no {name}")
                    elif tests is not None:
                        self.assertTrue(name in tests, f"no test is called {name}")

    def test_files_and_commands_exist(self):
        for item, _, here, _ in rows():
            with self.subTest(item):
                for name in re.findall(r"\]\(([^)#]+)", here):
                    self.assertTrue((ROOT / "docs" / name).exists(), f"there is no {name}")
                for name in re.findall(r"`((?:deploy|image|results|scripts)/[^` ]+|install\.sh)`", here):
                    self.assertTrue((ROOT / name).exists(), f"there is no {name}")


if __name__ == "__main__":
    unittest.main()
