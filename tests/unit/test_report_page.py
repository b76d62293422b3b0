"""The page of `magicdec report` in a headless Chromium: no error on its console, every figure is
there and not blank, and a click on a heading sorts."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_report import FIGURES, RAW, numbers_by_hand, study
from written_records import write

from magicdec.cli.records import report

__all__ = ["numbers_by_hand"]  # a fixture of all tests here
pytestmark = pytest.mark.wide

WIDTH = 1200
HEIGHT = 12000
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
# Says where each figure is, and sorts the passes by their speedup twice. The last part of the page.
QUESTION = """<script>
const boxes = {};
for (const figure of document.querySelectorAll("figure")) {
  const at = figure.querySelector("svg").getBoundingClientRect();
  boxes[figure.id] = [at.left, at.top, at.right, at.bottom];
}
const table = document.querySelector("#passes table");
const names = [...table.querySelectorAll("th")].map((heading) => heading.textContent);
const column = names.findIndex((name) => name.startsWith("speedup"));
const order = (row) => Number(row.cells[column].dataset.order);
const shown = () => [...table.tBodies[0].rows].map(order);
table.querySelectorAll("th button")[column].click();
const rising = shown();
table.querySelectorAll("th button")[column].click();
const width = document.documentElement.scrollWidth;
document.body.dataset.answer = JSON.stringify({ boxes, rising, falling: shown(), width });
</script></body>"""


def browse(page: Path, *flags: str) -> tuple[str, list[str]]:
    """Opens a page. Returns what Chromium prints, and the lines of the page's console."""
    assert CHROMIUM is not None
    command = (
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--window-size={WIDTH},{HEIGHT}",
        "--enable-logging=stderr",
        *flags,
        page.as_uri(),
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.wide
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
def test_the_page_opens_in_a_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    write(tmp_path / "runs.jsonl", [*study(), *RAW])
    words = ["report", "runs.jsonl", "--out", "out"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit):
        report()
    page = tmp_path / "out" / "index.html"
    shot = tmp_path / "page.png"
    text = page.read_text(encoding="utf-8")
    asked = tmp_path / "out" / "asked.html"
    asked.write_text(text.replace("</body>", QUESTION), encoding="utf-8")
    dom, complaints = browse(asked, "--dump-dom")
    assert complaints == []
    found = re.search(r'data-answer="([^"]*)"', dom)
    assert found is not None
    answer: dict[str, Any] = json.loads(html.unescape(found[1]))
    assert answer["rising"] == sorted(answer["rising"]) == answer["falling"][::-1]
    assert len(set(answer["rising"])) > 5
    assert answer["width"] <= WIDTH
    assert tuple(answer["boxes"]) == FIGURES
    for width in (500, 1440):  # the narrowest window that Chromium has, and a laptop's
        dom, complaints = browse(asked, "--dump-dom", f"--window-size={width},{HEIGHT}")
        found = re.search(r'data-answer="([^"]*)"', dom)
        assert found is not None and json.loads(html.unescape(found[1]))["width"] <= width
    _, complaints = browse(page, f"--screenshot={shot}")
    assert complaints == []
    picture = Image.open(shot).convert("RGB")
    for name, box in answer["boxes"].items():
        assert box[3] < HEIGHT and box[2] - box[0] > 400 and box[3] - box[1] > 150, name
        colours = picture.crop(tuple(map(int, box))).getcolors(1 << 24)
        assert colours is not None and len(colours) > 20, f"{name} is blank"
