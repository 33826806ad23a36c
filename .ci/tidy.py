"""Run clang-tidy on the C++ sources that have changed: ``tidy.py CLANG_TIDY BUILD``.

A source has changed if it or a header that it includes is not as it was when it last passed. What
passed is kept in the folder that TQ_TIDY_CACHE names; without one, what the commits of the last
day and the working tree touch is checked. With TQ_EVERYTHING=1 every source is.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
SOURCES: Final = (":(glob)custom_ops/core/*.cpp", ":(glob)custom_ops/ort/*.cpp")
RECENT: Final = 24 * 3600
"""Seconds before the last commit."""
JOBS: Final = 2


def lines_of(*command: str, cwd: Path = ROOT) -> list[str]:
    """Return what a command prints."""
    process = subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True)
    return process.stdout.splitlines()


def headers(build: Path) -> dict[Path, list[Path]]:
    """Return the files of this repository that each source includes, itself first."""
    sources = {}
    for entry in json.loads((build / "compile_commands.json").read_text(encoding="utf-8")):
        words = shlex.split(entry["command"])
        output = words.index("-o")
        command = [*words[:output], "-MM", *words[words.index("-c") :]]
        rule = " ".join(lines_of(*command, cwd=Path(entry["directory"]))).replace("\\", " ")
        files = [Path(name).resolve() for name in rule.split()[1:]]
        sources[Path(entry["file"]).resolve()] = [file for file in files if ROOT in file.parents]
    return sources


def state(files: list[Path], version: str) -> str:
    """Return a digest of files, of the rules, and of clang-tidy."""
    digest = hashlib.sha256(version.encode())
    for file in (*files, ROOT / "custom_ops" / ".clang-tidy"):
        digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return digest.hexdigest()


def recent() -> set[Path]:
    """Return the files that the last commits and the working tree touch."""
    (last,) = lines_of("git", "log", "-1", "--format=%ct")
    since = f"--since=@{int(last) - RECENT}"
    log = lines_of("git", "log", since, "--name-only", "--format=")
    return {
        (ROOT / name).resolve() for name in (*log, *lines_of("git", "diff", "HEAD", "--name-only"))
    }


def main() -> int:
    """Check, and remember what passed."""
    tidy, build = sys.argv[1], Path(sys.argv[2])
    cache = os.environ.get("TQ_TIDY_CACHE")
    passed = Path(cache) if cache else None
    version = "".join(lines_of(tidy, "--version"))
    included = headers(build)
    sources = [(ROOT / name).resolve() for name in lines_of("git", "ls-files", *SOURCES)]
    for source in sources:
        included.setdefault(source, [source])  # not part of this build
    states = {source: state(included[source], version) for source in sources}
    changed = sources
    if not os.environ.get("TQ_EVERYTHING"):
        if passed is not None:
            changed = [source for source in sources if not (passed / states[source]).exists()]
        else:
            touched = recent()
            changed = [source for source in sources if touched.intersection(included[source])]
    print(f"clang-tidy: {len(changed)} of {len(sources)} sources", flush=True)

    def check(source: Path) -> int:
        process = subprocess.run([tidy, "-p", str(build), "--quiet", str(source)], check=False)
        if process.returncode == 0 and passed is not None:
            passed.mkdir(parents=True, exist_ok=True)
            (passed / states[source]).touch()
        return process.returncode

    with ThreadPoolExecutor(JOBS) as pool:
        return int(any(list(pool.map(check, changed))))


if __name__ == "__main__":
    sys.exit(main())
