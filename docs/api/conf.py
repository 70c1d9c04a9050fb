"""Sphinx: our Markdown pages, and the reference of both languages. `make docs` runs it."""

import html
import os
import pathlib
import sys

from docutils import nodes
from docutils.parsers.rst import Directive

root = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(root / "python"))

project = "deep_ep"
copyright = "the deep_ep authors"
root_doc = "docs/index"
include_patterns = ["README.md", "CONTRIBUTING.md", "docs/**.md", "benchmarks/README.md"]
extensions = ["myst_parser", "breathe", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "deep_ep"

# Headings as link targets. Links to files that are no pages are checked by tests/docs/links_test.py.
myst_heading_anchors = 4
suppress_warnings = ["myst.xref_missing"]
myst_fence_as_directive = ["mermaid"]

breathe_projects = {"deep_ep": os.environ["DEEP_EP_DOXYGEN_XML"]}
breathe_default_project = "deep_ep"
breathe_default_members = ("members",)

# The pages say what the module offers, not what it is built of.
autodoc_mock_imports = ["torch", "deep_ep._native"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_default_options = {"members": True, "show-inheritance": True}


class Mermaid(Directive):
    """A picture that the reader's browser draws, where it may load a script; else its text is shown."""

    has_content = True
    script = """
import mermaid from "https://cdn.jsdelivr.net/npm/mermaid@11/dist/mermaid.esm.min.mjs";
mermaid.initialize({ startOnLoad: true });
"""

    def run(self):
        text = html.escape("\n".join(self.content))
        return [nodes.raw("", f'<pre class="mermaid">{text}</pre>', format="html")]


def setup(app):
    app.add_directive("mermaid", Mermaid)
    app.add_js_file(None, body=Mermaid.script, type="module")
