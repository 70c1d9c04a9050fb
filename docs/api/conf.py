"""Sphinx: our Markdown pages, and the reference of both languages. `make docs` runs it."""

import os
import pathlib
import shutil
import sys

from docutils import nodes
from docutils.parsers.rst import Directive

root = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(root / "python"))

project = "deep_ep"
copyright = "the deep_ep authors"
root_doc = "docs/index"
include_patterns = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "tests/README.md", "docs/**.md", "results/**.md", "machine/README.md", "simulation/README.md",
                    "tests/python/engines.md", "tests/mutants/README.md", "tests/rdma/review.md"]
extensions = ["myst_parser", "breathe", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "deep_ep"

# Headings as link targets. tests/docs/links_test.py checks links to files that are no pages.
myst_heading_anchors = 4
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
    """A diagram, shown as its text: the pages load nothing from elsewhere."""

    has_content = True

    def run(self):
        text = "\n".join(self.content)
        return [nodes.literal_block(text, text)]


def copy_pictures(app, error):
    """Those that pages show by HTML, which Sphinx does not look into."""
    if error is None:
        shutil.copytree(root / "docs/images", pathlib.Path(app.outdir) / "docs/images", dirs_exist_ok=True)


def setup(app):
    app.add_directive("mermaid", Mermaid)
    app.connect("build-finished", copy_pictures)
