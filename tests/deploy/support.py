"""What the tests of deploy/ share: where things are, Helm's and kubectl's own renderings, stand-ins, and when to skip."""

import functools
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm/deep-ep-testbed"
SKIPPED = 77
os.environ["PATH"] = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"

for module in ("kubernetes_validate", "yaml"):
    if importlib.util.find_spec(module) is None:
        print(f"skipped: there is no Python module {module}: scripts/setup --deploy installs it")
        sys.exit(SKIPPED)

import yaml  # noqa: E402


def tool():
    """The built `deep_ep`."""
    path = os.environ.get("DEEP_EP_TOOL")
    if not path:
        raise unittest.SkipTest("DEEP_EP_TOOL does not name the built deep_ep")
    return path


def needs(*programs):
    for program in programs:
        if shutil.which(program) is None:
            raise unittest.SkipTest(f"there is no {program}: scripts/setup --deploy installs what there is for this machine")


@functools.cache
def variables():
    """The names of the library's variables."""
    table = json.loads(subprocess.run([tool(), "env", "--json"], capture_output=True, text=True, check=True).stdout)
    return {entry["name"] for entry in table}


def run(command, **arguments):
    """status, what it wrote to stdout and stderr."""
    arguments.setdefault("timeout", 60)
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, **arguments)
    return done.returncode, done.stdout, done.stderr


def load_all(text):
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [document for document in yaml.load_all(text, loader) if document is not None]


def documents(path):
    return load_all(pathlib.Path(path).read_text())


class InFolder(unittest.TestCase):
    """A test with a folder of its own."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.top = pathlib.Path(folder.name)


class Failed(Exception):
    pass


def output_of(*command):
    needs(command[0])
    status, text, errors = run(command)
    if status != 0:
        raise Failed(errors)
    return text


def render(folder):
    """The objects of a folder of kustomize."""
    return load_all(output_of("kubectl", "kustomize", folder))


def render_chart(*extras, release="testbed"):
    """The objects of the chart, with files or dictionaries of values."""
    words = ["helm", "template", release, CHART]
    for extra in extras:
        words += ["--set-json", json.dumps(extra)] if isinstance(extra, dict) else ["-f", extra]
    return load_all(output_of(*words))


def stand_in(folder, name, script):
    """A program of that name, first in the PATH of what is run with environment(folder)."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("#!/bin/bash\n" + script)
    path.chmod(0o755)
    return path


def environment(folder, **extra):
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **extra}


def main():
    program = unittest.main(exit=False, verbosity=1)
    for test, reason in program.result.skipped:
        print(f"skipped: {test.id()}: {reason}")
    if not program.result.wasSuccessful():
        sys.exit(1)
    sys.exit(SKIPPED if program.result.testsRun == len(program.result.skipped) else 0)
