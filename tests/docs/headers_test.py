#!/usr/bin/env python3
"""Everything in the public headers has a comment, and each parameter of a function is named in one of its header's.

Headers are installed without our pages and sources, so no comment points there. (`make docs` asks Doxygen for comments, too,
which understands more of C++ but is not needed here.)
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOT_INSTALLED = re.compile(r"\b(?:docs|csrc|kernels|oracle|tests|tools|benchmarks)/|\.md\b")
NO_COMMENT_NEEDED = re.compile(r"^(?:namespace|using [\w:]+::|(?:class|struct) \w+;|#|\}|virtual ~|~)|= delete;$")


class Header:
    def __init__(self, text):
        self.lines = text.splitlines()
        self.comments = " ".join(re.findall(r"//.*", text))

    def declarations(self):
        """(number of its first line, text without comments, whether one stands right before or beside it)"""
        text, first, commented = "", 0, False
        hidden = body = None  # the depths of a private part and of a function's body that are being skipped
        depth = 0
        for number, line in enumerate(self.lines, 1):
            code, _, comment = (part.strip() for part in line.partition("//"))
            before, depth = depth, depth + code.count("{") - code.count("}")
            if hidden is not None and (depth < hidden or code == "public:"):
                hidden = None
            if body is not None:
                body = body if depth > body else None
                continue
            if hidden is not None or re.match(r"\w+:$", code):
                hidden = depth if code in ("private:", "protected:") else hidden
                continue
            if not code and not text:  # a blank line ends what a comment is about
                commented = comment.startswith("/")
                continue
            first = first if text else number
            text = f"{text} {code}".strip()
            commented = commented or comment.startswith("/<")
            if text.startswith("template <") and text.endswith(">"):
                text = text + " "
            elif text.endswith((";", "{", "}")) and text.count("(") == text.count(")"):
                yield first, text, commented
                if depth > before and ("(" in text or text.startswith("enum ")):
                    body = before
                text, commented = "", False

    def problems(self):
        for number, line in enumerate(self.lines, 1):
            if NOT_INSTALLED.search(line):
                yield number, "points to what is not installed"
        for number, text, commented in self.declarations():
            if NO_COMMENT_NEEDED.search(text):
                continue
            if not commented:
                yield number, f"no comment: {text}"
            for parameter in parameters(text):
                if not re.search(rf"\b{parameter}\b", self.comments):
                    yield number, f"no comment names {parameter} of: {text}"


def parameters(declaration):
    """Names of a function's parameters."""
    found = re.match(r"[^({=]*\((?!\))(.*?)\)\s*(?:const|noexcept|override|=|;|\{|:|$)", declaration)
    inside = re.sub(r"<[^<>]*(?:<[^<>]*>[^<>]*)*>|\{[^}]*\}|\([^)]*\)", "", found.group(1)) if found else ""
    for parameter in inside.split(","):
        words = re.findall(r"\w+", parameter.partition("=")[0])
        if len(words) > 1 and not parameter.rstrip().endswith(("&", "&&", "*")):
            yield words[-1]


def main():
    headers = sorted((ROOT / "include").rglob("*.hpp"))
    counted, found = 0, 0
    for path in headers:
        header = Header(path.read_text())
        counted += sum(1 for _ in header.declarations())
        for number, problem in header.problems():
            print(f"{path.relative_to(ROOT)}:{number}: {problem}")
            found += 1
    print(f"{len(headers)} headers, {counted} declarations")
    return 1 if found or counted < 100 else 0


if __name__ == "__main__":
    sys.exit(main())
