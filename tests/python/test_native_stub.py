"""deep_ep/_native.pyi says what the module has: an argument added to a binding alone is reported here by name."""

import difflib
import importlib.machinery
import importlib.util
import pathlib

import deep_ep
from deep_ep import _native

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "native_stub"


def test_stub_is_the_modules():
    loader = importlib.machinery.SourceFileLoader("native_stub", str(SCRIPT))
    native_stub = importlib.util.module_from_spec(importlib.util.spec_from_loader("native_stub", loader))
    loader.exec_module(native_stub)
    written = (pathlib.Path(deep_ep.__file__).parent / "_native.pyi").read_text().splitlines()
    current = native_stub.stub(_native).splitlines()
    changes = [line for line in difflib.unified_diff(written, current, "_native.pyi", "the module", n=1, lineterm="")]
    assert not changes, "run scripts/native_stub and commit what it prints:\n" + "\n".join(changes)
