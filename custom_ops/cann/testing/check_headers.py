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
SHIM: Final = CUSTOM_OPS / "cann" / "testing" / "shim"
REPOSITORY: Final = "https://github.com/mirror-cann/asc-devkit"
PASSES: Final = {
    "2201, vector cores": ("-D__NPU_ARCH__=2201", "-D__DAV_VEC__"),
    "2201, cube cores": ("-D__NPU_ARCH__=2201", "-D__DAV_CUBE__"),
    "2002": ("-D__NPU_ARCH__=2002",),
}
"""The passes of CANN's compiler over a file, and what each defines."""
PARTS: Final = [f"{part}/{api}" for part in ("include", "impl") for api in ("basic_api", "utils")]
FOLDERS: Final = (".", "include", "impl", *PARTS)

PRELUDE: Final = f"""\
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include "{SHIM / "core.h"}"
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
struct bfloat16_t {{
  operator float() const {{ return 0; }}
}};
namespace bisheng::cce {{
inline void metrics_prof_start() {{}}
inline void metrics_prof_stop() {{}}
}}
enum event_t {{
  EVENT_ID0, EVENT_ID1, EVENT_ID2, EVENT_ID3, EVENT_ID4, EVENT_ID5, EVENT_ID6, EVENT_ID7
}};
enum pad_t {{
  PAD_NONE, PAD_MODE1, PAD_MODE2, PAD_MODE3, PAD_MODE4, PAD_MODE5, PAD_MODE6, PAD_MODE7, PAD_MODE8
}};
// Functions that print, which differ by the address spaces of their pointers alone.
#define IMPL_UTILS_DEBUG_ASC_AICORE_DUMP_IMPL_H
namespace __asc_aicore {{
template <class... T> void asc_dump_shape_impl(T...) {{}}
template <class... T> void asc_dump_ubuf(T...) {{}}
template <class... T> void asc_dump_l1buf(T...) {{}}
template <class... T> void asc_dump_cbuf(T...) {{}}
template <class... T> void asc_dump_gm(T...) {{}}
}}
"""
UNNAMED: Final = re.compile(
    r"error: '(?:\w+::)*(\w+)' (?:was not declared in this scope|has not been declared"
    r"|does not name a type)|error: there are no arguments to '(\w+)' that depend"
)


class Headers:
    """CANN's headers, and what g++ needs to read a source with them.

    Attributes:
        overlay: a folder of ours in front of theirs.
        stubs: a declaration of each name that the compiler has built in and nobody defines.
    """

    def __init__(self, headers: Path, overlay: Path) -> None:
        """Writes the overlay."""
        parts = [path for part in PARTS for path in sorted((headers / part).rglob("*.h"))]
        self._text = "".join(path.read_text(encoding="utf-8", errors="replace") for path in parts)
        if not self._text:
            raise FileNotFoundError(
                f"{headers} has no include/basic_api: it is to be a checkout of {REPOSITORY}"
            )
        self._folders = [overlay, *(headers / folder for folder in FOLDERS)]
        self.overlay = overlay
        self.stubs = dict[str, str]()
        (overlay / "prelude.h").write_text(PRELUDE, encoding="utf-8")
        (overlay / "kernel_operator.h").write_text(
            '#pragma once\n#include "prelude.h"\n#include "stubs.h"\n'
            '#include "kernel_basic_intf.h"\n'
        )

    def errors(self, source: Path, defines: tuple[str, ...]) -> list[str]:
        """Return what g++ says of a source when every built-in name has a stub."""
        included = [f"-I{folder}" for folder in (*self._folders, CUSTOM_OPS / "include")]
        options = ["-std=c++17", "-w", "-fmax-errors=0", "-fpermissive", "-fsyntax-only", *defines]
        fresh = dict[str, str]()
        while True:
            self.stubs |= fresh
            stubs = "\n".join(["#pragma once", *self.stubs.values()])
            (self.overlay / "stubs.h").write_text(stubs, encoding="utf-8")
            done = subprocess.run(
                ["g++", *options, *included, str(source)],
                env={**os.environ, "LC_ALL": "C"},  # plain quotes
                capture_output=True,
                text=True,
                check=False,
            )
            lines = done.stderr.splitlines()
            found = {match[1] or match[2] for line in lines if (match := UNNAMED.search(line))}
            fresh = {name: declaration(name, self._text) for name in found - set(self.stubs)}
            if not fresh:
                return [line for line in lines if " error: " in line]


def declaration(name: str, headers: str) -> str:
    """Return a declaration of what the compiler has built in, by how the headers use the name."""
    if name.endswith("_t"):
        values = sorted(set(re.findall(rf"\b{name}::(\w+)", headers)))
        return f"enum class {name} {{ {', '.join(values)} }};"
    if re.search(rf"\b{name}\s*(?:<[^;()]*>)?\(", headers):
        return f"template <class... T> inline int64_t {name}(T&&...) {{ return 0; }}"
    return f"enum {{ {name} }};"


def main() -> int:
    """Check all kernels in all passes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("headers", type=Path, help="a checkout of asc-devkit")
    folder = parser.parse_args().headers.resolve()
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        try:
            headers = Headers(folder, Path(temporary))
        except FileNotFoundError as error:
            parser.error(str(error))
        kernels = Path(temporary) / "kernels.cpp"
        names = sorted(KERNELS.glob("tq_*.cpp"))
        kernels.write_text("".join(f'#include "{name}"\n' for name in names), encoding="utf-8")
        for title, defines in PASSES.items():
            errors = headers.errors(kernels, defines)
            counts = f"{len(names)} files, {len(errors)} errors; {len(headers.stubs)} stubs"
            print(f"{title}: {counts}", *errors, sep="\n  ", flush=True)
            failed |= bool(errors)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
