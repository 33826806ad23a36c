"""Unpacks the headers, and nothing else, of the wheel in a folder.

Usage: unpack_headers.py FOLDER_WITH_WHEEL TARGET. The target then has acl/acl.h.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path, PurePosixPath

INCLUDE = PurePosixPath("torch_npu/include")


def unpack(wheel: Path, target: Path) -> int:
    """Writes the headers below ``target``; returns how many."""
    count = 0
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            path = PurePosixPath(name)
            if path.suffix != ".h" or not path.is_relative_to(INCLUDE) or ".." in path.parts:
                continue
            file = target / path.relative_to(INCLUDE)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(archive.read(name))
            count += 1
    return count


def main() -> None:
    folder, target = Path(sys.argv[1]), Path(sys.argv[2])
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        sys.exit(f"{folder} has {len(wheels)} wheels instead of 1")
    if unpack(wheels[0], target) == 0 or not (target / "acl" / "acl.h").is_file():
        sys.exit(f"{wheels[0].name} has no {INCLUDE}/acl/acl.h")


if __name__ == "__main__":
    main()
