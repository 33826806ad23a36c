"""Links and paths in the documentation lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *(path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "custom_ops").rglob("*.md"),
        *(ROOT / name / "README.md" for name in ("models", "benchmarks", "release")),
        ROOT / "tests" / "fixtures" / "README.md",
    ]
)
LINK = re.compile(r"\[[^]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
#: A path of a file or folder of the repository, in backticks.
PATH = re.compile(
    r"`((?:tq_onnx|custom_ops|tests|docs|models|benchmarks|release)/[\w./-]+|[\w-]+\.md)`",
)


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(CODE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_exist(page: Path) -> None:
    for path in PATH.findall(page.read_text()):
        if "NAME" in path:
            continue
        assert (ROOT / path).exists() or (page.parent / path).exists(), path


def test_one_hop_from_the_readme() -> None:
    """Where a model is read, attention is found, rows are laid out, kernels are chosen, Ascend."""
    links = set(LINK.findall((ROOT / "README.md").read_text()))
    assert links >= {
        "tq_onnx/files/load.py",
        "tq_onnx/recognise/match.py",
        "tq_onnx/recognise/dialects",
        "tq_onnx/codec/spec.py",
        "custom_ops/core/dispatch.cpp",
        "tq_onnx/ascend/targets.py",
        "custom_ops/cann/host/README.md",
        "docs/architecture.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
    }


def test_every_page_is_linked() -> None:
    linked = {
        (page.parent / link.partition("#")[0]).resolve()
        for page in PAGES
        for link in LINK.findall(page.read_text())
    }
    assert {page for page in PAGES if page.name != "README.md"} <= linked


def test_threats_name_tests_that_exist() -> None:
    table = (ROOT / "SECURITY.md").read_text()
    rows = [line for line in table.splitlines() if line.startswith("| **")]
    assert rows
    assert all(re.search(r"`tests/[\w/]+\.py`", row) for row in rows)
