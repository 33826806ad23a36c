"""The mutation gate: are the kernels' synchronisation statements needed, and does the shim see it?

Each statement of ``custom_ops/cann/kernels`` that orders pipes (SetFlag, WaitFlag, PipeBarrier) is
deleted once on its own, and each flag once altogether, with all that sets it and waits for it. The
shim runs the kernels as if the statement was not there, so nothing is compiled again. A mutation is
caught if some run then has a hazard; one that is not must be explained in ``EXPLAINED``.

    python custom_ops/cann/testing/mutations.py [--build FOLDER]

prints one JSON object: how many mutations there were, how many were caught, and the others.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from simulated_kernels import (
    ARCHITECTURES,
    CUSTOM_OPS,
    INT4,
    SIGNED4,
    Kernels,
    Middle,
    build,
    rotation_of,
    row_bytes,
)
from simulator import Site
from tq_onnx.codec.kind import NORM_KEPT, NOT_CORRECTED, UNBIASED
from tq_onnx.codec.rotated import LLOYD_MAX
from tq_onnx.codec.search import gain_table
from tq_onnx.codec.spec import Codec
from tq_onnx.codec.window import window_of, write_entries

SOURCES = sorted((CUSTOM_OPS / "cann" / "kernels").glob("*.[hc]*"))
INT5 = Codec(LLOYD_MAX, 5)
"""Two planes, which 2002 can move, too."""
STATEMENT = re.compile(r"\b(SetFlag|WaitFlag|PipeBarrier)<(?:HardEvent::)?(\w+)>\((.*?)\);")

EXPLAINED: dict[tuple[str, str], str] = {}
"""Mutations that no run can catch, by file and the text of the statement's line: why."""


@dataclass(frozen=True)
class Mutation:
    """Statements that are deleted together."""

    sites: tuple[Site, ...]
    text: str


def mutations() -> list[Mutation]:
    """All mutations of the kernels' sources."""
    found = []
    for source in SOURCES:
        statements = []
        flags: dict[str, list[Site]] = {}
        for line, text in enumerate(source.read_text(encoding="utf-8").splitlines(), 1):
            match = STATEMENT.search(text)
            if match is None or text.lstrip().startswith("//"):
                continue
            kind, event, identity = match.groups()
            site = (source.name, line, kind)
            statements.append((site, event, identity))
            found.append(Mutation((site,), text.strip()))
            if kind != "PipeBarrier" and not identity.startswith("EVENT_"):
                flags.setdefault(event, []).append(site)
        for (site, *which), (after, *same) in pairwise(statements):
            event, identity = which
            is_pair = site[2] == "SetFlag" and after[2] == "WaitFlag" and same == which
            if is_pair and identity.startswith("EVENT_"):
                found.append(Mutation((site, after), f"both of {event} {identity}"))
        for event, sites in flags.items():
            found.append(Mutation(tuple(sites), f"all of {event} by tile"))
    return found


def cases(seed: int = 0) -> list[Callable[[Kernels], object]]:
    """Runs that together reach every statement, the cheap ones first."""
    rng = np.random.default_rng(seed)

    def encode(
        size: int, dtype: str, codec: Codec = INT4, **options: Any
    ) -> Callable[[Kernels], object]:
        vectors = rng.standard_normal((1, 2, 9, size)).astype(dtype)
        vectors[0, 0, 1] = np.inf
        cache = np.zeros((1, 2, 12, row_bytes(size, codec)), np.uint8)
        return lambda kernels: kernels.encode(
            vectors, cache, 3, rotation_of(size), codec=codec, cores=1, **options
        )

    def attend(
        size: int, dtype: str, codec: Codec = INT4, **options: Any
    ) -> Callable[[Kernels], object]:
        query = rng.standard_normal((1, 4, 5, size)).astype(dtype)
        cache = rng.integers(0, 60, (1, 2, 135, row_bytes(size, codec))).astype(np.uint8)
        rotations = (rotation_of(size), rotation_of(size, 1))
        return lambda kernels: kernels.attention(
            query, cache, cache, 130, rotations,
            scale=0.1, codecs=(codec, codec), cores=1, **options,
        )  # fmt: skip

    def offset(count: int, size: int) -> np.ndarray:
        return rng.standard_normal((count, 2, size)).astype(np.float32)

    def attend_in_parts(size: int, dtype: str, **options: Any) -> Callable[[Kernels], object]:
        query = rng.standard_normal((1, 4, 5, size)).astype(dtype)
        cache = rng.integers(0, 60, (1, 1, 260, row_bytes(size))).astype(np.uint8)
        rotations = (rotation_of(size), rotation_of(size, 1))
        return lambda kernels: kernels.attention(
            query, cache, cache, 255, rotations, scale=0.1, cores=1, part_tokens=64, **options
        )

    def bounded(dtype: str) -> dict[str, Any]:
        return {"sliding_window": 100, "softcap": 9.0, "sinks": np.ones(4, dtype)}

    def rotate(size: int, dtype: str) -> Callable[[Kernels], object]:
        x = rng.standard_normal((20, 18, size)).astype(dtype)
        table = rng.standard_normal((20, size // 2)).astype(np.float32)
        return lambda kernels: kernels.rotary_embedding(x, (table, table), 2, cores=1)

    def encode_entries(size: int, dtype: str) -> Callable[[Kernels], object]:
        vectors = rng.standard_normal((1, 2, 17, size)).astype(dtype)
        vectors[0, 0, 9] = np.inf
        window = window_of(9, 20, [(size, row_bytes(size))])
        cache = np.zeros((1, 2, window.overlay_rows + 17, row_bytes(size)), np.uint8)
        return lambda kernels: kernels.encode(
            vectors, cache, 0, rotation_of(size), window=window, cores=1
        )

    def attend_exactly(size: int, dtype: str, **options: Any) -> Callable[[Kernels], object]:
        """Sinks, entries and tokens of the call."""
        window = window_of(4, 2, [(size, row_bytes(size))])
        query, keys, values = (
            rng.standard_normal((1, heads, 7, size)).astype(dtype) for heads in (4, 2, 2)
        )
        values[0, 0, 1] = np.inf
        cache = rng.integers(0, 60, (1, 2, window.overlay_rows + 80, row_bytes(size)))
        cache = cache.astype(np.uint8)
        vectors = rng.standard_normal((1, 2, 70, size))
        write_entries(cache, vectors, np.zeros(1, np.int64), window)
        rotations = (rotation_of(size), rotation_of(size, 1))
        return lambda kernels: kernels.attention(
            query, cache, cache, 70, rotations,
            scale=0.1, window=window, new=(keys, values), cores=1, **options,
        )  # fmt: skip

    def join(size: int, dtype: str, first: int, end: int) -> Callable[[Kernels], object]:
        """What another attention gave over these slots, and exact tokens."""
        window = window_of(4, 2, [(size, row_bytes(size))])
        query, keys, values = (
            rng.standard_normal((1, heads, 1, size)).astype(dtype) for heads in (6, 3, 3)
        )
        cache = rng.integers(0, 60, (1, 3, window.overlay_rows + 71, row_bytes(size)))
        cache = cache.astype(np.uint8)
        averages, logs = rng.standard_normal((1, 6, size)), rng.standard_normal((1, 6))
        middle = Middle(first, end, averages.astype(np.float16), logs.astype(np.float32))
        return lambda kernels: kernels.attention(
            query, cache, cache, 70, (rotation_of(size), rotation_of(size, 1)),
            scale=0.1, window=window, new=(keys, values), cores=1, middle=middle,
        )  # fmt: skip

    def in_planes(run: Callable[[Kernels], object]) -> Callable[[Kernels], object]:
        def laid_apart(kernels: Kernels) -> None:
            kernels.in_planes = True
            run(kernels)
            kernels.in_planes = False

        return laid_apart

    # Every place of a kernel that has two is used twice: three pieces at least on the one core.
    return [
        rotate(64, "float32"), rotate(64, "float16"),
        encode(64, "float32"), attend(64, "float32"), encode(64, "float16", gains=gain_table()),
        encode(128, "float32"), attend(64, "float16"), attend(128, "float32"),
        attend_in_parts(64, "float32"), attend_in_parts(64, "float16"),
        *(attend(64, dtype, **bounded(dtype)) for dtype in ("float32", "float16")),
        *(attend_in_parts(64, dtype, **bounded(dtype)) for dtype in ("float32", "float16")),
        *(encode(128, dtype, INT5, gains=gain_table(2), norm_correction=correction,
                 offset=offset(7, 128))
          for dtype, correction in (("float32", UNBIASED), ("float16", NOT_CORRECTED))),
        *(attend(128, dtype, INT5, offsets=(offset(7, 128), offset(7, 128)))
          for dtype in ("float32", "float16")),
        *(encode(64, "float32", SIGNED4, norm_correction=correction)
          for correction in (NORM_KEPT, NOT_CORRECTED)),
        attend(64, "float32", SIGNED4),
        *map(in_planes, (encode(64, "float32", SIGNED4), attend(64, "float32", SIGNED4))),
        encode_entries(64, "float32"), encode_entries(128, "float16"),
        attend_exactly(64, "float32"), attend_exactly(64, "float16"),
        attend_exactly(64, "float32", offsets=(offset(7, 64), offset(7, 64))),
        attend_exactly(64, "float32", part_tokens=64),
        attend_exactly(64, "float32", first_slot=77),  # padding alone
        # Rows on both sides of the slots, and none.
        *(join(64, dtype, *slots)
          for dtype in ("float32", "float16") for slots in ((2, 67), (0, 71))),
    ]  # fmt: skip


def is_caught(
    kernels: Kernels, mutation: Mutation, runs: Iterable[Callable[[Kernels], object]]
) -> bool:
    """Whether some run has a hazard without the statements of the mutation."""
    with kernels.without(mutation.sites):
        for run in runs:
            kernels.reset()
            run(kernels)
            if kernels.hazards:
                return True
    return False


def _reached(kernels: Kernels, run: Callable[[Kernels], object]) -> set[Site]:
    before = kernels.sites()
    kernels.reset()
    run(kernels)
    assert not kernels.hazards, kernels.messages()
    return {site for site, count in kernels.sites().items() if count > before.get(site, 0)}


def gate(libraries: Mapping[int, Kernels]) -> dict[str, object]:
    """Runs all mutations on all architectures.

    Raises:
        AssertionError: there are hazards without any mutation, or a statement never runs.
    """
    runs = cases()
    by_run = {arch: [_reached(kernels, run) for run in runs] for arch, kernels in libraries.items()}
    by_arch = {arch: set().union(*sites) for arch, sites in by_run.items()}
    reached = set().union(*by_arch.values())
    caught, total, explained, missed = 0, 0, [], []
    for mutation in mutations():
        assert reached >= set(mutation.sites), f"{mutation} never runs"
        for arch, kernels in libraries.items():
            if not by_arch[arch] >= set(mutation.sites):
                continue  # the other architecture's
            total += 1
            touched = zip(runs, by_run[arch], strict=True)
            if is_caught(
                kernels, mutation, (run for run, sites in touched if sites & set(mutation.sites))
            ):
                caught += 1
                continue
            file, line, _ = mutation.sites[0]
            entry = {"arch": arch, "file": file, "line": line, "text": mutation.text}
            reason = EXPLAINED.get((file, mutation.text))
            (missed if reason is None else explained).append({**entry, "reason": reason})
    for kernels in libraries.values():
        kernels.reset()
    return {
        "mutations_total": total,
        "mutations_caught": caught,
        "explained": explained,
        "missed": missed,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, help="keep the libraries here")
    folder = parser.parse_args().build
    with tempfile.TemporaryDirectory() as temporary:
        place = folder or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        result = gate({arch: Kernels(build(arch, place)) for arch in ARCHITECTURES})
    print(json.dumps(result))
    return 1 if result["missed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
