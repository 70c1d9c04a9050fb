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
import unittest.mock

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

    def test_what_it_makes(self):
        one = mutant("a <  b", "a <= b")
        self.assertEqual(self.planted("if (a\n< b) f();", one), f"if (({self.on(one)} ? (a <= b) : (a\n< b))) f();")
        one = mutant("f(); g();", "")
        self.assertEqual(self.planted("x(); f();\n g();", one), f"x(); if ({self.on(one)}) {{  }} else {{ f();\n g(); }}")
        one = mutant("f();", "", around="y(); f();")
        self.assertEqual(self.planted("f(); y(); f();", one), f"f(); y(); if ({self.on(one)}) {{  }} else {{ f(); }}")
        outer, inner = mutant("f(a + b);", "", id="outer"), mutant("a + b", "a - b", id="inner")
        self.assertEqual(self.planted("f(a + b);", inner, outer),
                         f"if ({self.on(outer)}) {{  }} else {{ f(({self.on(inner)} ? (a - b) : (a + b))); }}")
        self.assertEqual(mutate.occurrences("a < b", "aa < bb; xa < b; a < b; a < b2"), [(17, 22)])

    def test_what_is_not_there_once_is_refused(self):
        for source in ("", "f(); f();"):
            with self.assertRaises(mutate.ListError):
                self.planted(source, mutant("f();", ""))

    def test_what_would_not_compile_is_refused(self):
        for source, original in (("if (a) {}", "if (a) {"), ("f(a) < b", "a) < b"), ("const int a = 1;", "const int a = 1;"),
                                 ("a.b + c", "b"), ("f(a, b)", "a, b"),
                                 ("for (f(); a < b; ++a) c();", "a < b;"), ("for (int k = 0; k < b; ++k) c();", "int k = 0; k < b"),
                                 ("int a = b, c = d;", "c = d"), ("a = {b};", "{b}"), ("f([](int a) { return a; });", "{ return a; }"),
                                 ("a && b", "a &&"), ("a && b", "&& b")):
            with self.assertRaises(mutate.ListError):
                self.planted(source, mutant(original, "0"))


class SourceFiles(unittest.TestCase):
    def test_of_a_tree_without_git(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name in ("csrc/a.cpp", "build/host/b.cpp", "scripts/__pycache__/c.pyc", ".clang-format"):
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).touch()
            with unittest.mock.patch.object(mutate, "ROOT", root):
                self.assertEqual(mutate.source_files(), {"csrc/a.cpp", ".clang-format"})


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
        mutate.TABLE.write_text(f"old\n\n{mutate.HISTORY}\n\nMuch.\n")
        mutate.table(self.mutants)
        page = mutate.TABLE.read_text()
        for row in ("area", "in all"):
            self.assertIn(f"| {row} | 4 | 4 | 3 | 0 | 1 |", page)
        self.assertIn("| nothing | `f.cpp` | **Not known.** |", page)
        self.assertNotIn("| fail |", page, "the lists have those that are caught")
        self.assertTrue(page.endswith(f"\n{mutate.HISTORY}\n\nMuch.\n") and "old" not in page, "history, and only that, is kept")

    def test_the_table_says_what_was_not_run_and_what_is_not_as_the_list_says(self):
        mutate.run(self.mutants, ["fail", "nothing"], 1)
        self.mutants[0].survives = self.mutants[3].survives = "nobody minds"
        mutate.table(self.mutants)
        page = mutate.TABLE.read_text()
        self.assertIn("| in all | 4 | 2 | 1 | 1 | 0 |", page)
        self.assertIn("| fail | `f.cpp` | nobody minds (But it was caught.) |", page)
        self.assertIn("| nothing | `f.cpp` | nobody minds |", page)
        self.assertIn("\ncrash, hang.\n", page)

    def test_an_interrupted_run_keeps_results_of_this_one_and_of_earlier_ones(self):
        mutate.run(self.mutants, ["nothing", "fail"], 1)
        write = mutate.write_if_new

        def interrupted(path, data):
            write(path, data)
            raise KeyboardInterrupt

        mutate.write_if_new = interrupted
        self.addCleanup(setattr, mutate, "write_if_new", write)
        with self.assertRaises(KeyboardInterrupt):
            mutate.run(self.mutants, ["crash", "nothing"], 1)
        self.assertEqual(set(mutate.read_json(mutate.RESULTS)), {"nothing", "fail", "crash"})

    def chosen(self, ids=(), preset=None):
        return [m.id for m in mutate.choose(self.mutants, ids, preset, True, mutate.read_json(mutate.RESULTS))[0]]


if __name__ == "__main__":
    unittest.main()
