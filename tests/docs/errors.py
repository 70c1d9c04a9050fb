"""Every error text of the sources, found where it is thrown.

An error is a `fail<Type>("...")` or a `throw Type("...")` in csrc/, kernels/, machine/,
simulation/, python/bindings/ or tools/; a
`raise Type("...")`, an `assert ..., "..."` or a `require(..., "...")` in python/deep_ep/; or a text of the files that
put what a kernel met, or what a NIC answered, into words (DESCRIBED).
"""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Errors of the library and of the command. Others (std::logic_error, ...) are for programmers of the library.
TYPES = "Error|InvalidArgument|RankMismatch|OutOfMemory|TimeoutError|UseAfterDestroy|SystemError|Unsupported"
THROWN = re.compile(rf"\b(?:fail<(?:\w+::)*({TYPES})>|throw (?:\w+::)*({TYPES}|py::\w+))\s*\(")
TOKEN = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|[()]')
DESCRIBED = re.compile(r"(^|/)(fault\w*|failure|syndrome)\.[ch]pp$")
ESCAPES = {r"\"": '"', r"\\": "\\", r"\n": " "}


def normal(text):
    """Placeholders as `...`, spaces single: the way docs/reference/errors.md quotes."""
    text = re.sub(r"\{\{", "\0", re.sub(r"\}\}", "\1", text))
    text = re.sub(r"\{[^{}]*\}", "...", text).replace("\0", "{").replace("\1", "}")
    return re.sub(r"\s+", " ", text).strip()


def weight(text):
    """How many characters a text has of its own."""
    return len(re.sub(r"[\s.]", "", text))


def unescaped(literal):
    return re.sub(r"\\.", lambda match: ESCAPES.get(match.group(), match.group()), literal[1:-1])


def literals(source, begin=0, balanced=False):
    """Runs of adjacent string literals from `begin` on; when balanced, up to the closing parenthesis."""
    runs, end, depth = [], None, 1
    for token in TOKEN.finditer(source, begin):
        text = token.group()
        if text == "(":
            depth += 1
        elif text == ")":
            depth -= 1
            if balanced and depth == 0:
                break
        elif text.startswith('"'):
            if end is not None and not source[end : token.start()].strip():
                runs[-1] += unescaped(text)
            else:
                runs.append(unescaped(text))
            end = token.end()
    return runs


def sources():
    for folder in ("csrc", "kernels", "machine", "simulation", "python/bindings", "tools"):
        yield from sorted(path for path in (ROOT / folder).rglob("*") if path.suffix in (".cpp", ".hpp"))


def thrown():
    """(where, type, text) of every error that is thrown with a text of its own."""
    for path in sources():
        source, where = path.read_text(), str(path.relative_to(ROOT))
        for match in THROWN.finditer(source):
            runs = literals(source, match.end(), balanced=True)
            # A pattern and its arguments, or pieces that are joined.
            first = source[match.end() :].lstrip()
            joined = not match.group().startswith("fail") and not first.startswith("fmt::format")
            text = normal("{}".join(runs) if joined else "".join(runs[:1]))
            if text.strip(". "):
                yield where, match.group(1) or match.group(2), text
        if DESCRIBED.search(where):
            for run in literals(source):
                if weight(normal(run)) >= 14 and " " in run:  # others are pieces
                    yield where, "described", normal(run)
    for path in sorted((ROOT / "python/deep_ep").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            text, name = "", ""
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                text, name = text_of(node.exc.args[0]), ast.unparse(node.exc.func)
            elif isinstance(node, ast.Assert) and node.msg is not None:
                text, name = text_of(node.msg), "AssertionError"
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "require":
                text, name = text_of(node.args[1]), "InvalidArgument"
            if text.strip("{}. "):
                yield str(path.relative_to(ROOT)), name, normal(text)


def text_of(node):
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values)
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    return "{}"


def everything():
    """Every string of the sources: what may be quoted."""
    for path in sources():
        yield from map(normal, literals(path.read_text()))
    for path in sorted((ROOT / "python/deep_ep").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Constant, ast.JoinedStr)):
                yield normal(text_of(node))


if __name__ == "__main__":
    for where, kind, text in thrown():
        print(f"{where}: {kind}: {text}")
