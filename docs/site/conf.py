"""How `make docs` makes a site of the Markdown files and of docstrings, with Sphinx.

The Markdown files stay as they are: the site has the folders of the repository, so that a link
between two files is one between two pages. A link that leads nowhere fails the build. The order of
the pages is that of the index, docs/README.md."""

import importlib.metadata
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import download_reference
from sphinx.application import Sphinx

from magicdec.config.setting import declared

sys.path.insert(0, str(Path(__file__).parent))
import properties_page

ROOT = Path(__file__).parents[2]
FRONT = "README"
INDEX = "docs/README"
LOG = "docs/log/README"
PROPERTIES = "docs/site/properties"
STUDY = "results/cpu/report"  # a page with its files, which the site has as they are

project = "magicdec"
author = ""
copyright = "the authors of magicdec; Apache-2.0"
release = importlib.metadata.version("magicdec").partition("+")[0]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = FRONT
include_patterns = [
    "*.md",
    "docs/**.md",
    "docs/site/*.rst",
    "results/**.md",
    "magicdec/**/*.md",
    "scripts/dev/*.md",
]
exclude_patterns = [".*"]
myst_heading_anchors = 4
highlight_language = "none"
autodoc_member_order = "bysource"
default_role = "code"  # a word in backticks in a docstring
smartquotes = False  # they make a dash of the two of a flag
python_maximum_signature_line_length = 80
html_theme = "furo"
html_title = "magicdec"
html_static_path = html_css_files = ["site.css"]
html_copy_source = html_show_sphinx = False


def linked_pages(page: str) -> list[str]:
    """The Markdown files that a page links to, without their suffix, in the order of the links."""
    path = ROOT / f"{page}.md"
    links = re.findall(r"\]\(([^):#]+)\.md\)", path.read_text(encoding="utf-8"))
    return [str((path.parent / link).resolve().relative_to(ROOT)) for link in dict.fromkeys(links)]


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Append the entries of the sidebar to the pages that are indices, and the properties."""
    log = linked_pages(LOG)
    pages = {LOG: log, FRONT: [p for p in linked_pages(INDEX) if p not in (FRONT, *log)]}
    if page == FRONT:
        site = [f"docs/site/{name}" for name in ("api", "gallery", "report", "properties")]
        pages[FRONT] = [INDEX, *site, *pages[FRONT]]
    if page == PROPERTIES:
        source[0] += properties_page.table()
    if page in pages:
        lines = "\n".join(f"/{other}" for other in pages[page])
        source[0] += f"\n\n```{{toctree}}\n:hidden:\n\n{lines}\n```\n"


def link_to_pages(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """A link to a file of the study opens it; other files that are no pages of the site are
    downloads."""
    for node in list(doctree.findall(download_reference)):
        target = str((ROOT / page).parent.joinpath(node["reftarget"]).resolve().relative_to(ROOT))
        if target.startswith(STUDY):
            uri = "../" * page.count("/") + target
            node.replace_self(nodes.reference("", "", *node.children, refuri=uri))


def add_meanings(
    app: Sphinx, what: str, name: str, section: Any, options: Any, lines: list[str]
) -> None:
    """The settings of a section as the parameters of its class."""
    if what == "class" and name.endswith("Section"):
        fields = declared(section).items()
        lines[:] = [
            "",
            *(f":param {field}: {declaration.setting.help}" for field, declaration in fields),
        ]


def finish(app: Sphinx, error: Exception | None) -> None:
    if error is None:
        shutil.copytree(ROOT / STUDY, app.outdir / STUDY, dirs_exist_ok=True)
        shutil.copy(app.outdir / f"{FRONT}.html", app.outdir / "index.html")


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_contents)
    app.connect("doctree-resolved", link_to_pages)
    app.connect("autodoc-process-docstring", add_meanings)
    app.connect("build-finished", finish)
