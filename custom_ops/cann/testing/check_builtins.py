"""The kernels on CANN's own headers, run on this machine: do they compute what they do on our shim?

Our shim (``shim/``) is what we believe the Ascend C API to do. Here CANN's own C++ takes its place.
It makes addresses, masks, counts and strides of instructions from the calls of the kernels, and
``second_shim/builtins.h`` below it has these instructions. Both get the same launches. They must
write the same bytes and ask as much of each core, and break no rule of the shim's for memory and
order.

    git clone --depth 1 https://github.com/mirror-cann/asc-devkit
    python custom_ops/cann/testing/check_builtins.py asc-devkit

Prints a line for each launch, and exits with 1 if any differs. The headers belong to CANN and are
no part of this repository. Needs g++ 12 or later; takes minutes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from check_headers import ABSENT, KERNELS, PASSES, SHIM, Headers
from simulated_kernels import (
    CODECS,
    SIGNED4,
    SIMULATOR,
    Kernels,
    Middle,
    build,
    has_kernels,
    rotation_of,
    row_bytes,
)
from simulator import CoreCounts
from tq_onnx.codec.spec import Codec
from tq_onnx.codec.window import Window, window_of

BUILTINS: Final = Path(__file__).parent / "second_shim"
DEFINES: Final = {2201: PASSES["2201, vector cores"], 2002: PASSES["2002"]}
Case = Callable[[Kernels], np.ndarray]


def run(command: list[str]) -> str:
    """Return what a command prints; ends the program with its errors."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command[0]} failed: {done.stderr}")
    return done.stdout


def build_on_headers(arch: int, folder: Path, cann: Path) -> tuple[Path, list[str]]:
    """Compile the kernels with CANN's headers, and name the built-in functions nobody defines."""
    overlay = folder / f"overlay_{arch}"
    overlay.mkdir()
    before, behind = (f'#include "{BUILTINS / name}.h"' for name in ("builtins", "launches"))
    headers = Headers(cann, overlay, before=before, behind=behind)
    source, defines = KERNELS / "library.cpp", (*DEFINES[arch], "-DSHIM_BELOW_CANN")
    if errors := headers.errors(source, defines):
        sys.exit("\n".join(errors))
    objects, library = overlay / "kernels.o", overlay / "libkernels.so"
    options = ["-O1", "-fPIC", "-fno-gnu-unique"]
    run([*headers.command(source, defines), *options, "-c", "-o", str(objects)])
    unresolved = run(["nm", "-u", str(objects)]).split()
    missing = [name[len(ABSENT) :] for name in unresolved if name.startswith(ABSENT)]
    stubs = overlay / "absent.cpp"
    lines = [f'long {ABSENT}{name}() {{ return below::absent("{name}"); }}' for name in missing]
    text = "\n".join([f'#include "{SHIM / "core.h"}"', before, 'extern "C" {', *lines, "}"])
    stubs.write_text(text, encoding="utf-8")
    sources = [str(stubs), *(str(SHIM / name) for name in SIMULATOR)]
    command = ["g++", "-std=c++17", "-w", *defines, *options, "-shared", str(objects), *sources]
    run([*command, "-ldl", "-o", str(library)])
    return library, missing


def cases(arch: int) -> Iterator[tuple[str, bool, Case]]:
    """Name launches, whether caches lie in planes, and what makes them."""
    for size in (64, 128):
        for dtype in (np.float32, np.float16):
            kind = f"{dtype.__name__} D={size}"
            for codec in CODECS:
                if not has_kernels(arch, codec, size):
                    continue
                for in_planes in (False, True) if codec == SIGNED4 else (False,):
                    name = f"{kind} {codec} {'planes' if in_planes else 'rows'}"
                    yield f"encode {name}", in_planes, partial(encoded, size, dtype, codec)
                    yield f"attention {name}", in_planes, partial(attended, size, dtype, codec)
                    yield f"window {name}", in_planes, partial(windowed, size, dtype, codec)
            yield f"joined {kind}", True, partial(joined, size, dtype)
            yield f"rotary embedding {kind}", False, partial(rotated, size, dtype)


def vectors_of(shape: tuple[int, ...], dtype: type, seed: int = 1) -> np.ndarray:
    """Return normal numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def cache_of(size: int, codec: Codec, slots: int) -> np.ndarray:
    """Return a cache for two sequences of two heads, with something in it."""
    shape = (2, 2, slots, row_bytes(size, codec))
    return np.random.default_rng(2).integers(0, 256, shape, np.uint8)


def encoded(size: int, dtype: type, codec: Codec, kernels: Kernels) -> np.ndarray:
    """Encode plainly, and with a search over gains, an offset and a length for each sequence."""
    gains = np.linspace(0.9, 1.1, 3, dtype=np.float32)
    offset = vectors_of((5, 2, size), np.float32, 3) / 4
    cache = cache_of(size, codec, 48)
    plain = kernels.encode(
        vectors_of((2, 2, 11, size), dtype), cache, 3, rotation_of(size), codec=codec
    )
    searched = kernels.encode(
        vectors_of((2, 2, 19, size), dtype),
        cache,
        np.array([5, 0]),
        rotation_of(size),
        codec=codec,
        norm_correction=2,
        gains=gains,
        offset=offset,
    )
    return np.concatenate([plain, searched])


def attended(size: int, dtype: type, codec: Codec, kernels: Kernels) -> np.ndarray:
    """Attend over what the kernels encoded, in one part and in two that are merged."""
    tokens, past = 3, 97
    rotations = (rotation_of(size), rotation_of(size, 1))
    rows = [
        kernels.encode(
            vectors_of((2, 2, past + tokens, size), dtype, seed),
            cache_of(size, codec, 112),
            0,
            rotation,
            codec=codec,
        )
        for seed, rotation in zip((4, 5), rotations, strict=True)
    ]
    query = vectors_of((2, 6, tokens, size), dtype, 6)
    attend = partial(
        kernels.attention, query, *rows, past, rotations, scale=size**-0.5, codecs=(codec, codec)
    )
    sinks = vectors_of((6,), dtype, 7)
    return np.stack(
        [attend(), attend(part_tokens=64), attend(sliding_window=50, softcap=5.0, sinks=sinks)]
    )


def in_window(
    kernels: Kernels, tokens: np.ndarray, past: int, codec: Codec, window: Window
) -> tuple[np.ndarray, Callable[..., np.ndarray]]:
    """Encode two chunks of the tokens with a window's entries, and make attention to them."""
    size = tokens.shape[-1]
    rotation = rotation_of(size)
    cache = cache_of(size, codec, window.overlay_rows + tokens.shape[2] + 9)
    chunks = np.split(tokens, [past], axis=2)
    for start, chunk in zip((0, past), chunks, strict=True):
        cache = kernels.encode(chunk, cache, start, rotation, codec=codec, window=window)
    query = vectors_of((2, 6, chunk.shape[2], size), tokens.dtype.type, 9)
    return cache, partial(
        kernels.attention,
        query,
        cache,
        cache,
        past,
        (rotation, rotation),
        scale=size**-0.5,
        codecs=(codec, codec),
        window=window,
        new=(chunk, chunk),
    )


def windowed(size: int, dtype: type, codec: Codec, kernels: Kernels) -> np.ndarray:
    """Encode two chunks with the entries of a window, and attend to them."""
    window = window_of(4, 2, [(size, row_bytes(size, codec))])
    cache, attend = in_window(kernels, vectors_of((2, 2, 40, size), dtype), 37, codec, window)
    output = attend(offsets=(vectors_of((5, 2, size), np.float32, 10),) * 2)
    return np.concatenate([part.reshape(-1).view(np.uint8) for part in (cache, output)])


def joined(size: int, dtype: type, kernels: Kernels) -> np.ndarray:
    """Attend with a token to what lies around the slots that another attention had."""
    recent, past = 70, 150
    window = window_of(recent, 2, [(size, row_bytes(size, SIGNED4))])
    tokens = vectors_of((2, 2, past + 1, size), dtype)
    _, attend = in_window(kernels, tokens, past, SIGNED4, window)
    averages = vectors_of((2, 6, size), np.float16, 10)
    logs = vectors_of((2, 6), np.float32, 11)
    return attend(middle=Middle(2, past + 1 - recent, averages, logs))


def rotated(size: int, dtype: type, kernels: Kernels) -> np.ndarray:
    """Rotate some of the tokens."""
    angles = vectors_of((40, size // 2), np.float32, 8)
    tables = (np.cos(angles), np.sin(angles))
    return kernels.rotary_embedding(vectors_of((3, 9, size), dtype), tables, 7, first=1)


def asked(core: CoreCounts) -> dict[str, int]:
    """Return how much of everything a core was asked to do."""
    return {
        "vector instructions": sum(one.instructions for one in core.vector),
        "repeats": sum(one.repeats for one in core.vector),
        **{f"{name} in": count for name, count in asdict(core.moved_in).items()},
        **{f"{name} out": count for name, count in asdict(core.moved_out).items()},
        **{"barriers": core.barriers, "flags": core.flags_waited},
    }


def compare(case: Case, first: Kernels, second: Kernels) -> list[str]:
    """Return what is wrong with a launch, in sentences."""
    results, counts, wrong = [], [], []
    for title, kernels in (("our shim", first), ("on CANN's headers", second)):
        kernels.reset()
        with kernels.counted() as launches:
            results.append(case(kernels).view(np.uint8))
        counts.append([asked(core) for launch in launches for core in launch.cores])
        wrong += [f"{title}: {message}" for message in kernels.messages()]
    if differing := np.count_nonzero(results[0] != results[1]):
        wrong.append(f"{differing} of {results[0].nbytes} bytes differ")
    for ours, theirs in zip(*counts, strict=True):
        wrong += [
            f"{count} {name} of a core in our shim, {theirs[name]} on CANN's headers"
            for name, count in ours.items()
            if count != theirs[name]
        ]
    return wrong


def main() -> int:
    """Compare all launches on both architectures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("headers", type=Path, help="a checkout of asc-devkit")
    parser.add_argument("-k", default="", help="only launches with this text in their names")
    arguments = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for arch in DEFINES:
            try:
                library, missing = build_on_headers(arch, folder, arguments.headers.resolve())
            except FileNotFoundError as error:
                parser.error(str(error))
            first, second = Kernels(build(arch, folder)), Kernels(library)
            print(f"{arch}: reached and not there: {', '.join(missing) or 'none'}", flush=True)
            for name, in_planes, case in cases(arch):
                if arguments.k not in name:
                    continue
                first.in_planes = second.in_planes = in_planes
                wrong = compare(case, first, second)
                print(f"{arch} {name}: {'; '.join(wrong) or 'the same'}", flush=True)
                failed += bool(wrong)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
