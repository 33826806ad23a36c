"""Run clang-tidy on the C++ sources of a build that have changed: ``tidy.py CLANG_TIDY BUILD``.

A source has changed if it, a header that it includes, the rules or its compiler's options are not
as they were when it last passed. What passed is kept in the folder that TQ_TIDY_CACHE names. Where
that is missing, what differs from origin/main is checked or, on main itself, what the commits of
the last day touch; and the working tree. With TQ_ALL=1 every source is.
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
SOURCES: Final = (":(glob)custom_ops/core/**/*.cpp", ":(glob)custom_ops/ort/*.cpp")
RULES: Final = ROOT / "custom_ops" / ".clang-tidy"
RECENT: Final = 24 * 3600
"""Seconds before the last commit."""
JOBS: Final = 2


def lines_of(*command: str, cwd: Path = ROOT) -> list[str]:
    """Return what a command prints."""
    process = subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True)
    return process.stdout.splitlines()


def compiled(build: Path) -> dict[Path, dict[str, str]]:
    """Return how each source is compiled."""
    entries = json.loads((build / "compile_commands.json").read_text(encoding="utf-8"))
    return {Path(entry["file"]).resolve(): entry for entry in entries}


def headers(entries: dict[Path, dict[str, str]]) -> dict[Path, list[Path]]:
    """Return what each source depends on in this repository, itself first."""
    sources = {}
    for source, entry in entries.items():
        words = shlex.split(entry["command"])
        output = words.index("-o")
        command = [*words[:output], "-MM", *words[words.index("-c") :]]
        rule = " ".join(lines_of(*command, cwd=Path(entry["directory"]))).replace("\\", " ")
        files = [Path(name).resolve() for name in rule.split()[1:]]
        sources[source] = [*(file for file in files if ROOT in file.parents), RULES]
    return sources


def state(files: list[Path], command: str) -> str:
    """Return a digest of files and of how they are checked."""
    digest = hashlib.sha256(command.replace(str(ROOT), "").encode())
    for file in files:
        digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return digest.hexdigest()


def recent() -> set[Path]:
    """Return the files that this branch or else the last commits, and the working tree touch."""
    head, last = lines_of("git", "log", "-1", "--format=%H%n%ct")
    main = lines_of("git", "for-each-ref", "refs/remotes/origin/main")
    base = lines_of("git", "merge-base", "HEAD", "origin/main")[0] if main else head
    if base != head:
        names = lines_of("git", "diff", base, "--name-only")
    else:
        since = f"--since=@{int(last) - RECENT}"
        names = lines_of("git", "log", since, "--name-only", "--format=")
        names += lines_of("git", "diff", "HEAD", "--name-only")
    return {(ROOT / name).resolve() for name in names}


def main() -> int:
    """Check, and remember what passed."""
    tidy, build = sys.argv[1], Path(sys.argv[2])
    cache = os.environ.get("TQ_TIDY_CACHE")
    passed = Path(cache) if cache else None
    version = "".join(lines_of(tidy, "--version"))
    entries = compiled(build)
    included = headers(entries)
    listed = [(ROOT / name).resolve() for name in lines_of("git", "ls-files", *SOURCES)]
    sources = [source for source in listed if source in entries]
    commands = {source: entries[source]["command"] for source in sources}
    states = {source: state(included[source], version + commands[source]) for source in sources}
    changed = sources
    if not os.environ.get("TQ_ALL"):
        if passed is not None and passed.is_dir():
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
