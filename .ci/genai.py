"""Print what changed in onnxruntime-genai since the pinned release; always return 0.

    python .ci/genai.py FOLDER      FOLDER: of another release, made by pip install --target

Compared are the names and signatures of the Python API, and the keys that genai_config.json may
have. onnxruntime-genai refuses unknown keys, so each text of its library and of its model builder
is tried as a key of each section.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

TEXTS: Final = re.compile(rb"(?<=[\x00\"'])([a-z][a-z0-9]*(?:_[a-z0-9]+)*)(?=[\x00\"'])")
VALUES: Final[tuple[Any, ...]] = (1, {}, "x", True, [])
UNKNOWN: Final = "Unknown value"
DEEPEST: Final = 2
"""Sections in sections."""


def texts(package: Path) -> set[str]:
    """Return texts of a package that may be keys of its configuration."""
    files = [*package.glob("*.so*"), *package.glob("*.dll"), *package.rglob("models/**/*.py")]
    matches = {match for file in files for match in TEXTS.findall(file.read_bytes())}
    return {text.decode() for text in matches if 3 <= len(text) < 40}


def api(module: Any) -> Iterator[str]:
    """Yield the names of a module, with the signatures of functions and the values of enums."""
    for name, value in vars(module).items():
        if name.startswith("_") or type(value) is type(os):
            continue
        yield f"{name}{_signature(value)}"
        if isinstance(value, type):
            for member in dir(value):
                if not member.startswith("_") or member == "__init__":
                    yield f"{name}.{member}{_signature(getattr(value, member))}"


def _signature(value: Any) -> str:
    if isinstance(getattr(value, "value", None), int):
        return f" = {value.value}"
    if not callable(value) or isinstance(value, type):
        return ""
    match = re.match(r"\w+(\(.*)", value.__doc__ or "")
    return match[1] if match else ""


def keys(config: Any, names: set[str], place: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the keys that a section of a configuration may have, and those of its sections."""
    # The outermost section takes any name that has no section, and those of providers any at all.
    telling = [value for value in VALUES if not _takes(config, (*place, "zz"), value)]
    if not telling:
        yield ":".join((*place, "*"))
        return
    for name in sorted(names):
        accepted = [value for value in telling if _takes(config, (*place, name), value)]
        if accepted:
            yield ":".join((*place, name))
        if {} in accepted and len(place) < DEEPEST:
            yield from keys(config, names, (*place, name))


def _takes(config: Any, place: tuple[str, ...], value: Any) -> bool:
    for name in reversed(place):
        value = {name: value}
    try:
        config.overlay(json.dumps(value))
    except RuntimeError as error:
        return UNKNOWN not in str(error)
    return True


def describe(names: set[str]) -> list[str]:
    """Return the lines of the installed release, of which others are compared."""
    import onnxruntime_genai

    with tempfile.TemporaryDirectory() as folder:
        model = {"type": "qwen3", "context_length": 8, "vocab_size": 8}
        (Path(folder) / "genai_config.json").write_text(json.dumps({"model": model}))
        config = onnxruntime_genai.Config(folder)
        lines = [f"genai_config.json {key}" for key in keys(config, names)]
    return [*api(onnxruntime_genai), *lines, f"version {onnxruntime_genai.__version__}"]


def main() -> None:
    """Compare the release of this Python with the one in a folder."""
    release = Path(sys.argv[1])
    import onnxruntime_genai

    packages = (Path(onnxruntime_genai.__file__).parent, release / "onnxruntime_genai")
    pinned = onnxruntime_genai.__version__
    if (release / f"onnxruntime_genai-{pinned}.dist-info").is_dir():
        print(f"{pinned} is the newest release")
        return
    names = set[str]().union(*map(texts, packages))
    code = "import genai, json, sys; print(json.dumps(genai.describe(set(json.load(sys.stdin)))))"
    lines = []
    for folders in ((), (release,)):
        path = os.pathsep.join(map(str, (*folders, Path(__file__).parent)))
        run = subprocess.run(
            [sys.executable, "-c", code],
            input=json.dumps(sorted(names)),
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode:
            print(f"a release cannot be described: {run.stderr[-2000:]}")
            return
        lines.append(set(json.loads(run.stdout)))
    before, after = lines
    for mark, differences in (("-", before - after), ("+", after - before)):
        print(*(f"{mark} {line}" for line in sorted(differences)), sep="\n")
    print(f"{len(before & after)} names and keys are the same")


if __name__ == "__main__":
    main()
