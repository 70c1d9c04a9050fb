#!/usr/bin/env python3
"""scripts/mutate: how mistakes are planted, and what is made of tests that pass, fail, crash and hang."""

import importlib.machinery
import importlib.util
import json
import pathlib
import stat
import sys
import tempfile
import unittest

LOADER = importlib.machinery.SourceFileLoader("mutate", str(pathlib.Path(__file__).resolve().parents[2] / "scripts/mutate"))
mutate = importlib.util.module_from_spec(importlib.util.spec_from_loader("mutate", LOADER))
sys.modules["mutate"] = mutate
LOADER.exec_module(mutate)

PROGRAM = """#!{python}
import os, signal, time
print("[ RUN      ] S.Test", flush=True)
which = int(os.environ["DEEP_EP_MUTANT"])
if which == {crash}: os.kill(os.getpid(), signal.SIGSEGV)
if which == {hang}: time.sleep(60)
print("[  FAILED  ] S.Test" if which == {fail} else "[       OK ] S.Test", flush=True)
raise SystemExit(1 if which == {fail} else 0)
"""


def mutant(original, mutated, around="", id="m"):
    return mutate.Mutant(id, "area", "f.cpp", "unit", "*", "host", around, original, mutated)


class Plant(unittest.TestCase):
    def planted(self, source, *mutants):
        return mutate.plant(source, list(mutants)).split("#line 1\n")[1]

    def on(self, one):
        return f"::deep_ep_mutants::on({one.number})"

    def test_an_expression(self):
        one = mutant("a <  b", "a <= b")
        self.assertEqual(self.planted("if (a\n< b) f();", one), f"if (({self.on(one)} ? (a <= b) : (a\n< b))) f();")

    def test_statements(self):
        one = mutant("f(); g();", "")
        self.assertEqual(self.planted("x(); f();\n g();", one), f"x(); if ({self.on(one)}) {{  }} else {{ f();\n g(); }}")

    def test_words_are_whole(self):
        self.assertEqual(mutate.occurrences("a < b", "aa < bb; xa < b; a < b; a < b2"), [(17, 22)])

    def test_the_one_in_its_surroundings(self):
        one = mutant("f();", "", around="y(); f();")
        self.assertEqual(self.planted("f(); y(); f();", one), f"f(); y(); if ({self.on(one)}) {{  }} else {{ f(); }}")

    def test_one_inside_another(self):
        outer, inner = mutant("f(a + b);", "", id="outer"), mutant("a + b", "a - b", id="inner")
        self.assertEqual(self.planted("f(a + b);", inner, outer),
                         f"if ({self.on(outer)}) {{  }} else {{ f(({self.on(inner)} ? (a - b) : (a + b))); }}")

    def test_two_of_the_same(self):
        first, second = mutant("a", "b", id="first"), mutant("a", "c", id="second")
        self.assertEqual(self.planted("f(a)", first, second),
                         f"f(({self.on(first)} ? (b) : (({self.on(second)} ? (c) : (a)))))")

    def test_what_is_not_there_once_is_refused(self):
        for source in ("", "f(); f();"):
            with self.assertRaises(mutate.ListError):
                self.planted(source, mutant("f();", ""))

    def test_what_would_not_compile_is_refused(self):
        for source, original in (("if (a) {}", "if (a) {"), ("f(a) < b", "a) < b"), ("const int a = 1;", "const int a = 1;"),
                                 ("a.b + c", "b"), ("f(a, b)", "a, b")):
            with self.assertRaises(mutate.ListError):
                self.planted(source, mutant(original, "0"))

    def test_across_an_edge_is_refused(self):
        with self.assertRaises(mutate.ListError):
            self.planted("a + b + c", mutant("a + b", "1", id="left"), mutant("b + c", "1", id="right"))


class Run(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        root = pathlib.Path(self.folder.name)
        mutate.ROOT, mutate.WORK, mutate.SOURCE = root, root, root
        mutate.RESULTS, mutate.TABLE = root / "results.json", root / "table.md"
        mutate.LEAST_LIMIT, mutate.LEAST_SILENCE = 60, 2
        self.mutants = [mutant("a", "b", id=id) for id in ("fail", "crash", "hang", "nothing")]
        program = root / "build/host/bin/deep_ep_unit_tests"
        program.parent.mkdir(parents=True)
        numbers = {m.id: m.number for m in self.mutants}
        program.write_text(PROGRAM.format(python=sys.executable, **numbers))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        (root / "host.json").write_text(json.dumps({m.id: m.change for m in self.mutants}))

    def test_what_is_caught_and_how(self):
        self.assertFalse(mutate.run(self.mutants, [], 4))
        results = json.loads(mutate.RESULTS.read_text())
        self.assertLess(results["hang"]["seconds"], 30, "it is silent, and may take 60 s")
        self.assertEqual({id: (result["state"], result["how"]) for id, result in results.items()},
                         {"fail": ("caught", "failed: S.Test"), "crash": ("caught", "SIGSEGV: S.Test"),
                          "hang": ("caught", "no end: S.Test"), "nothing": ("survived", "")})
        mutate.table(self.mutants)
        self.assertIn("4 mistakes, 4 of them run: 3 caught (75.0 %).", mutate.TABLE.read_text())

    def test_survivors_may_be_explained(self):
        self.mutants[3].survives = "nobody minds"
        self.assertTrue(mutate.run(self.mutants, ["fail", "nothing"], 1))

    def test_a_change_since_the_build_is_not_run(self):
        self.mutants[0].mutated = "c"
        mutate.run(self.mutants, ["fail"], 1)
        self.assertEqual(json.loads(mutate.RESULTS.read_text() if mutate.RESULTS.is_file() else "{}"), {})

    def test_unknown_ids_are_refused(self):
        with self.assertRaises(mutate.ListError):
            mutate.run(self.mutants, ["other"], 1)


if __name__ == "__main__":
    unittest.main()
