"""tests/python/engines.md is true: symbols and keywords exist, and so do the tests that it names."""

import ast
import importlib
import inspect
import pathlib
import re

from test_errors import Alone

import deep_ep
from deep_ep import Buffer, EventOverlap
from deep_ep.buffers.elastic import ElasticBuffer

HERE = pathlib.Path(__file__).resolve().parent
PAGE = HERE / "engines.md"


def rows_of_page():
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 4 and cells[0] not in ("symbol", "---"):
            yield cells


def resolve(name):
    """The object behind a dotted name of deep_ep; attributes of instances count."""
    parts, value = name.split("."), deep_ep
    for length in range(len(parts) - 1, 0, -1):
        try:
            value = importlib.import_module(".".join(["deep_ep", *parts[:length]]))
        except ModuleNotFoundError:
            continue
        parts = parts[length:]
        break
    for part in parts:
        if not hasattr(value, part) and inspect.isclass(value):
            value = {
                Buffer: lambda: Buffer(None, comm=Alone),
                ElasticBuffer: lambda: ElasticBuffer(Alone, 2 << 20),
                EventOverlap: EventOverlap,
            }[value]()
        assert hasattr(value, part), f"deep_ep.{name} does not exist"
        value = getattr(value, part)
    return value


def functions_of(file):
    return {node.name for node in ast.parse((HERE / file).read_text()).body if isinstance(node, ast.FunctionDef)}


def test_page():
    rows = list(rows_of_page())
    assert len(rows) > 60
    for what, who, here, test in rows:
        file, function = re.fullmatch(r"`(test_\w+\.py)::(test_\w+)`", test).groups()
        assert function in functions_of(file), f"{test} does not exist"
        assert here.startswith(("works", "differs")) and who, what
        head, _, keywords = what.partition(" with ")
        head = head.split(" returns ")[0]
        symbols = re.findall(r"`([^`]+)`", head)
        if what.startswith("a"):  # in words
            continue
        assert symbols, what
        for symbol in symbols:
            value = resolve(symbol)
            for keyword in re.findall(r"`([^`]+)`", keywords):
                # Several symbols share keywords where all have them.
                known = inspect.signature(value).parameters
                assert keyword in known or keyword == "None", f"{symbol} has no parameter {keyword}"
