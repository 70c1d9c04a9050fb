#!/usr/bin/env python3
"""What is copied into other programs names its licence: public headers and the Python package. REUSE.toml does it for the rest."""

import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Licence(unittest.TestCase):
    def test_files_that_travel_name_it(self):
        files = [*(ROOT / "include").rglob("*.hpp"), *(ROOT / "python/deep_ep").rglob("__init__.py")]
        self.assertGreater(len(files), 15)
        for file in files:
            with self.subTest(file.relative_to(ROOT)):
                head = re.split(r"^(?:#include|import|from) ", file.read_text(), maxsplit=1, flags=re.M)[0]
                self.assertRegex(head, r"(?m)^(?://|#) SPDX-License-" r"Identifier: MIT$")  # in two, as `reuse lint` reads it

    def test_the_text_is_the_one_that_is_named(self):
        self.assertTrue((ROOT / "LICENSE").read_text().startswith("MIT License"))
        self.assertIn('SPDX-License-Identifier = "MIT"', (ROOT / "REUSE.toml").read_text())
        self.assertEqual((ROOT / "LICENSES/MIT.txt").read_text(), (ROOT / "LICENSE").read_text())


if __name__ == "__main__":
    unittest.main()
