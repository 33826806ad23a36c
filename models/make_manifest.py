"""Write ``models/manifest.json``: sizes and SHA-256 of the committed models and exports.

Example::

    python models/make_manifest.py            # write
    python models/make_manifest.py --check    # fail if a file differs from the manifest
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MANIFEST = ROOT / "models" / "manifest.json"
PATTERNS = ("models/qwen3-tiny/*", "tests/fixtures/*.onnx")


def describe() -> dict[str, dict[str, int | str]]:
    """Return size and SHA-256 of every file, by its path in the repository, in order."""
    files = sorted(path for pattern in PATTERNS for path in ROOT.glob(pattern) if path.is_file())
    return {
        path.relative_to(ROOT).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in files
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    files = describe()
    if check:
        recorded = json.loads(MANIFEST.read_text(encoding="utf-8"))
        changed = sorted(
            name for name in files.keys() | recorded.keys() if files.get(name) != recorded.get(name)
        )
        if changed:
            raise SystemExit(f"not as in {MANIFEST.name}: {', '.join(changed)}")
    else:
        text = json.dumps(files, indent=2) + "\n"
        MANIFEST.write_text(text, encoding="utf-8", newline="\n")
    total = sum(int(entry["bytes"]) for entry in files.values())
    print(f"{MANIFEST.name}: {len(files)} files, {total:,} bytes")


if __name__ == "__main__":
    main()
