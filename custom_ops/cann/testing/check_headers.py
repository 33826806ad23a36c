"""The kernels against CANN's own headers: does the API have every call that they make?

g++ reads ``custom_ops/cann/kernels`` with CANN's basic API in place of the shim. What CANN's
compiler has built in is declared here: keywords and types by a prelude, functions as stubs that
take anything and are added for as long as g++ names one that is not declared. So the calls of the
API are checked, the number of their arguments too; what the API hands to the compiler is not, and
nothing runs.

    git clone --depth 1 https://github.com/mirror-cann/asc-devkit
    python custom_ops/cann/testing/check_headers.py asc-devkit

Prints a line for each pass of CANN's compiler, and the errors. Exits with 1 if there are any. The
headers belong to CANN and are no part of this repository. Needs g++ 12 or later; takes minutes.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Final

CUSTOM_OPS: Final = Path(__file__).parents[2]
KERNELS: Final = CUSTOM_OPS / "cann" / "kernels"
PASSES: Final = {
    "2201, vector cores": ("-D__NPU_ARCH__=2201", "-D__DAV_VEC__"),
    "2201, cube cores": ("-D__NPU_ARCH__=2201", "-D__DAV_CUBE__"),
    "2002": ("-D__NPU_ARCH__=2002",),
}
"""The passes of CANN's compiler over a file, and what each defines."""
PARTS: Final = [f"{part}/{api}" for part in ("include", "impl") for api in ("basic_api", "utils")]
FOLDERS: Final = (".", "include", "impl", *PARTS)

PRELUDE: Final = """\
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#define __aicore__
#define __host_aicore__
#define __host__
#define __global__
#define __vector__
#define __gm__
#define __ubuf__
#define __cbuf__
#define __ca__
#define __cb__
#define __cc__
#define __fbuf__
#define __ssbuf__
#define __biasbuf__
#define __in_pipe__(...)
#define __out_pipe__(...)
#define __inout_pipe__(...)
#define __sync_noalias__
#define __sync_alias__
#define __check_sync_alias__
#define GM_ADDR uint8_t*
using half = _Float16;
struct bfloat16_t {
  operator float() const { return 0; }
};
namespace bisheng {}
enum pipe_t {
  PIPE_S, PIPE_V, PIPE_M, PIPE_MTE1, PIPE_MTE2, PIPE_MTE3, PIPE_ALL, PIPE_MTE4, PIPE_MTE5, PIPE_V2,
  PIPE_FIX
};
enum event_t {
  EVENT_ID0, EVENT_ID1, EVENT_ID2, EVENT_ID3, EVENT_ID4, EVENT_ID5, EVENT_ID6, EVENT_ID7
};
enum pad_t {
  PAD_NONE, PAD_MODE1, PAD_MODE2, PAD_MODE3, PAD_MODE4, PAD_MODE5, PAD_MODE6, PAD_MODE7, PAD_MODE8
};
"""
UNNAMED: Final = re.compile(
    r"error: '(?:\w+::)*(\w+)' (?:was not declared in this scope|has not been declared"
    r"|does not name a type)|error: there are no arguments to '(\w+)' that depend"
)


def declaration(name: str, headers: str) -> str:
    """Return a declaration of what the compiler has built in, by how the headers use the name."""
    if name.endswith("_t"):
        values = sorted(set(re.findall(rf"\b{name}::(\w+)", headers)))
        return f"enum class {name} {{ {', '.join(values)} }};"
    if re.search(rf"\b{name}\s*(?:<[^;()]*>)?\(", headers):
        return f"template <class... T> inline int64_t {name}(T&&...) {{ return 0; }}"
    return f"enum {{ {name} }};"


def compile_all(folders: list[Path], source: Path, defines: tuple[str, ...]) -> list[str]:
    """Return what g++ says of a file."""
    command = ["g++", "-std=c++17", "-w", "-fsyntax-only", "-fmax-errors=0", "-fpermissive"]
    included = [f"-I{folder}" for folder in (*folders, CUSTOM_OPS / "include")]
    done = subprocess.run(
        [*command, *defines, *included, str(source)],
        env={**os.environ, "LC_ALL": "C"},  # plain quotes
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stderr.splitlines()


def split_errors(lines: list[str]) -> tuple[list[str], list[str]]:
    """Return the errors of the kernels' own calls, and those of the headers without the kernels."""
    ours, others, is_called = [], [], False
    for line in lines:
        if " error: " in line:
            (ours if is_called or line.startswith(str(KERNELS)) else others).append(line)
            is_called = False
        elif line.startswith(str(KERNELS)) and "required from" in line:
            is_called = True
    return ours, others


def main() -> int:
    """Check all kernels in all passes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("headers", type=Path, help="a checkout of asc-devkit")
    headers = parser.parse_args().headers.resolve()
    text = "".join(
        path.read_text(encoding="utf-8", errors="replace")
        for part in PARTS
        for path in sorted((headers / part).rglob("*.h"))
    )
    if not text:
        parser.error(f"{headers} has no include/basic_api")
    failed, stubs = False, dict[str, str]()
    with tempfile.TemporaryDirectory() as temporary:
        overlay = Path(temporary)
        (overlay / "prelude.h").write_text(PRELUDE, encoding="utf-8")
        (overlay / "kernel_operator.h").write_text(
            "".join(f'#include "{name}.h"\n' for name in ("prelude", "stubs", "kernel_basic_intf"))
        )
        kernels = overlay / "kernels.cpp"
        names = sorted(KERNELS.glob("tq_*.cpp"))
        kernels.write_text("".join(f'#include "{name}"\n' for name in names), encoding="utf-8")
        folders = [overlay, *(headers / folder for folder in FOLDERS)]
        for title, defines in PASSES.items():
            fresh = dict[str, str]()
            while True:
                stubs |= fresh
                (overlay / "stubs.h").write_text("\n".join(stubs.values()), encoding="utf-8")
                lines = compile_all(folders, kernels, defines)
                found = {match[1] or match[2] for line in lines if (match := UNNAMED.search(line))}
                fresh = {name: declaration(name, text) for name in found - set(stubs)}
                if not fresh:
                    break
            ours, others = split_errors(lines)
            print(
                f"{title}: {len(names)} files, {len(ours)} errors; {len(stubs)} stubs, "
                f"{len(others)} errors of the headers without the kernels",
                *ours,
                sep="\n  ",
                flush=True,
            )
            failed |= bool(ours)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
