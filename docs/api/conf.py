"""Sphinx: our Markdown pages, and the reference of both languages. `make docs` runs it."""

import os
import pathlib
import posixpath
import re
import shutil
import sys

from docutils import nodes
from sphinx.ext.autodoc.mock import _MockObject

root = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(root / "python"))

project = "deep_ep"
copyright = "the deep_ep authors"
root_doc = "docs/index"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "tests/README.md", "docs/**.md", "results/**.md", "machine/README.md", "simulation/README.md",
                    "tests/python/engines.md", "tests/mutants/README.md", "tests/rdma/review.md"]
extensions = ["myst_parser", "breathe", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
highlight_language = "none"  # of blocks without a language: what commands print
html_theme = "furo"
html_title = "deep_ep"
html_static_path = ["style"]
html_css_files = ["pages.css"]

# Headings as link targets. tests/docs/links_test.py checks links to files that are no pages.
myst_heading_anchors = 4

breathe_projects = {"deep_ep": os.environ["DEEP_EP_DOXYGEN_XML"]}
breathe_default_project = "deep_ep"
breathe_default_members = ("members",)

# The pages say what the module offers, not what it is built of.
autodoc_mock_imports = ["torch", "deep_ep._native"]
_MockObject.apply = None  # deep_ep.ops registers that of classes derived from torch.autograd.Function
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_default_options = {"members": True, "show-inheritance": True}


def one_picture(app, docname, source):
    """The theme's switch, not the system's setting, decides what is dark here: pages show the picture for light ones, on white."""
    source[0] = re.sub(r"<source media=.*?>\n?", "", source[0])


def name_links(app, doctree, docname):
    """A link that says "launch.md" in a checkout says the page's title here."""
    for link in doctree.findall(nodes.reference):
        if re.fullmatch(r"[\w./-]+\.md", link.astext()) and link.get("refuri", "").partition("#")[0].endswith(".html"):
            uri = link["refuri"].partition("#")[0].removesuffix(".html")
            title = app.env.titles.get(posixpath.normpath(posixpath.join(posixpath.dirname(docname), uri)))
            if title is not None:
                link.clear()
                link += nodes.inline("", title.astext())


def copy_pictures(app, error):
    """Those that pages show by HTML, which Sphinx does not look into."""
    if error is None:
        shutil.copytree(root / "docs/images", pathlib.Path(app.outdir) / "docs/images", dirs_exist_ok=True)


def setup(app):
    app.connect("source-read", one_picture)
    app.connect("doctree-resolved", name_links)
    app.connect("build-finished", copy_pictures)
