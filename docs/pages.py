"""The hooks of ``mkdocs.yml``: pages of the repository outside of ``docs``, and links to them.

The pages are written for the repository, where links lead to files beside them. On the site
README.md is the first page, other Markdown files stand under ``repository/``, and a link to a file
of source code is its text alone, as the site does not have it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from posixpath import normpath, relpath
from typing import TYPE_CHECKING, Any, Final

from mkdocs.structure.files import File, Files

import tq_onnx

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).resolve().parents[1]
OUTSIDE: Final = (
    *("README.md", "SECURITY.md", "SKILL.md", "CHANGELOG.md", "CONTRIBUTING.md"),
    *(f"{name}/README.md" for name in ("tests", "models", "benchmarks", "release")),
    *(
        f"examples/{name}/README.md"
        for name in ("browser", "evaluation", "node", "olive", "plugin", "serving")
    ),
    *(f"custom_ops/cann/{name}/README.md" for name in ("host", "kernels", "testing")),
)
"""Pages outside of ``docs``."""
_LINK: Final = re.compile(
    r"\[(?P<text>[^]]*)\]\((?P<to>[^)\s]+)\)|(?P<code>```.*?```|`[^`\n]*`)", re.DOTALL
)


_API: Final = re.compile(
    r"(?P<begin><!-- generated: api -->\n).*?(?P<end>\n<!-- end generated -->)", re.DOTALL
)


def _references() -> str:
    """Return what mkdocstrings replaces by the documentation of each public name."""
    names = [name for name in tq_onnx.__all__ if name not in ("__version__", "errors")]
    places = {name: room for room, members in tq_onnx.ROOMS.items() for name in members}
    paths = [f"tq_onnx.{places[name]}.{name}" for name in names]
    return "\n\n".join(f"::: {path}" for path in [*paths, "tq_onnx.errors"])


def place(path: str) -> str:
    """Return where the site has a page of the repository: README.md is an index there."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path == "README.md":
        return "index.md"
    return "repository/" + re.sub(r"README\.md$", "index.md", path)


PLACES: Final[Mapping[str, str]] = {place(path): path for path in OUTSIDE}


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Add the pages outside of ``docs``."""
    for uri, path in PLACES.items():
        files.append(File.generated(config, uri, content=(ROOT / path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_: Any) -> str:
    """Turn links of the repository into links of the site."""
    uri = page.file.src_uri
    if uri == "api.md":
        markdown = _API.sub(
            lambda block: f"{block['begin']}{_references()}{block['end']}", markdown
        )
    source = PLACES.get(uri, f"docs/{uri}")

    def rewritten(link: re.Match[str]) -> str:
        if link["code"] or re.match(r"[a-z]+:|#", link["to"]):
            return link[0]
        path, _, anchor = link["to"].partition("#")
        target = normpath(f"{Path(source).parent.as_posix()}/{path}")
        if (ROOT / target).is_dir() and (ROOT / target / "README.md").exists():
            target += "/README.md"
        place_of_target = place(target)
        file = files.get_file_from_path(place_of_target)
        if file is None or file.inclusion.is_excluded():
            return link["text"]
        to = relpath(place_of_target, Path(uri).parent.as_posix())
        return f"[{link['text']}]({to}{'#' if anchor else ''}{anchor})"

    return _LINK.sub(rewritten, markdown)
