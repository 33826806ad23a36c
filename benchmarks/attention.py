"""Decode attention of one layer against its memory floor: TurboQuant and other caches.

Run it from the repository with tq-onnx installed:

    python benchmarks/attention.py
    python benchmarks/attention.py --contexts 4096,16384 --shapes 16/8,40/8 --threads 1,2 --json
    python benchmarks/attention.py --contexts "" --prefill 512,2048 --peers tq-onnx,ort

Each contender does what one layer does in one step of decode: append one token to a cache of fixed
capacity and attend to all of it. The method is in README.md of this folder.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import registry
from bandwidth import NoCompilerError, compile_probe
from contender import Step
from machine import describe
from processes import WorkerError, WorkerProcess
from registry import Named
from report import Row, decode_rows, document_text, prefill_rows, table
from timing import Limits, Timing, measure

from tq_onnx.codec.presets import PRESETS
from tq_onnx.codec.window import MAX_ENTRIES


class Benchmark:
    """The workers of one run."""

    def __init__(self, options: argparse.Namespace, stack: ExitStack) -> None:
        """Starts a process per contender; ``stack`` ends them."""
        self._options = options
        self._limits = Limits(options.seconds, options.cold_mb << 20, int(options.max_memory * 1e9))
        self._probe: str | None = None
        try:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            self._probe = str(compile_probe(Path(folder)))
        except NoCompilerError as error:
            print(error, file=sys.stderr)
        chosen = _chosen(options)
        pythons = options.peer_python
        self._named = {named.name: named for named in chosen}
        started = {}
        for named in chosen:
            python = pythons.get(named.family, sys.executable)
            started[named.name] = WorkerProcess(named, python)
            stack.callback(started[named.name].close)
        self._missing: dict[str, str] = {}
        self.versions: dict[str, str] = {}
        self._workers: dict[str, WorkerProcess] = {}
        for name, worker in started.items():
            try:
                version = worker.open()
            except WorkerError as error:
                self._missing[name] = str(error)
                continue
            self._workers[name] = worker
            if version:
                family = {"ort": "onnxruntime"}.get(worker.named.family, worker.named.family)
                self.versions[family] = version

    def decode(self, step: Step, threads: int) -> list[Row]:
        """Times one decode step, of those that take part."""
        names = [name for name, named in self._named.items() if named.decode]
        workers = {name: self._workers[name] for name in names if name in self._workers}
        timings, rate = measure(workers, step, threads, self._limits, probe=self._probe)
        return decode_rows(step, threads, self._complete(timings, names), rate)

    def prefill(self, step: Step, threads: int) -> list[Row]:
        """Times one prompt, of those that take part."""
        names = [name for name, named in self._named.items() if named.prefill]
        workers = {name: self._workers[name] for name in names if name in self._workers}
        timings, _ = measure(workers, step, threads, self._limits, probe=None)
        return prefill_rows(step, threads, self._complete(timings, names))

    def _complete(self, timings: dict[str, Timing], names: Sequence[str]) -> dict[str, Timing]:
        gone = {name: Timing(missing=self._missing[name]) for name in names if name not in timings}
        return {name: (timings | gone)[name] for name in names}


def _chosen(options: argparse.Namespace) -> list[Named]:
    ours = registry.ours(
        options.presets,
        options.products,
        options.windows,
        options.libraries,
        options.pages,
        turning=options.turning,
    )
    every = [*ours, *registry.PEERS]
    return [named for named in every if any(part in named.name for part in options.peers)]


def _shapes(text: str) -> list[tuple[int, int]]:
    pairs = []
    for item in text.split(","):
        try:
            query_heads, kv_heads = (int(part) for part in item.split("/"))
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{item!r} is not like 16/8") from error
        if kv_heads < 1 or query_heads < 1 or query_heads % kv_heads:
            raise argparse.ArgumentTypeError(f"{item}: the first must be a multiple of the second")
        pairs.append((query_heads, kv_heads))
    return pairs


def _integers(text: str, least: int = 1) -> list[int]:
    try:
        numbers = [int(item) for item in text.split(",") if item]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 1,2") from error
    if any(number < least for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r} has a number below {least}")
    return numbers


def _words(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _presets(text: str) -> list[str]:
    names = _words(text)
    for name in names:
        if name not in PRESETS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(PRESETS)}")
    return names


def _windows(text: str) -> list[tuple[int, int]]:
    windows = []
    for item in _words(text):
        recent, _, sinks = item.partition("+")
        try:
            windows.append((int(recent), int(sinks or 0)))
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{item!r} is not like 32+4") from error
        if min(windows[-1]) < 0 or sum(windows[-1]) > MAX_ENTRIES:
            raise argparse.ArgumentTypeError(f"{item}: no window has so many tokens")
    return windows


def _libraries(text: str) -> dict[str, str]:
    libraries = {}
    for item in _words(text):
        label, _, path = item.partition("=")
        if not Path(path).is_file():
            raise argparse.ArgumentTypeError(f"{item!r} is not like old=/path/to/library")
        libraries[label] = path
    return libraries


def _pythons(text: str) -> dict[str, str]:
    pythons = {}
    for item in _words(text):
        family, _, path = item.partition("=")
        if shutil.which(path) is None:
            raise argparse.ArgumentTypeError(f"{item!r} is not like torch=/path/to/python")
        pythons[family] = path
    return pythons


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--shapes", type=_shapes, default=[(16, 8), (40, 8)], metavar="H/N,...", help="heads")
    add("--contexts", type=_integers, default=[1024, 4096, 16384], help="tokens of the cache")
    add("--prefill", type=_integers, default=[], metavar="T,...", help="prompts, also")
    add(
        "--past",
        type=partial(_integers, least=0),
        default=[0],
        metavar="T,...",
        help="prompts, behind so many tokens of the cache: a long one that is read in pieces",
    )
    add("--threads", type=_integers, default=[1, 2])
    add("--batch", type=_integers, default=[1])
    add("--head-size", type=int, default=128)
    add("--presets", type=_presets, default=["int4"], help="ours")
    add("--products", type=_words, default=[], metavar="8,float", help="ours, with each of them")
    add(
        "--windows",
        type=_windows,
        default=[],
        metavar="0,32+4,...",
        help="ours, with so many of the newest tokens and of the first ones exact",
    )
    add("--turning", action="store_true", help="ours, also with offsets of keys that turn")
    add("--pages", type=_integers, default=[], metavar="16,128,...", help="ours, in pages, also")
    add(
        "--libraries",
        type=_libraries,
        default={},
        metavar="LABEL=PATH,...",
        help="ours, with each of these operator libraries",
    )
    add("--peers", type=_words, default=[""], help="contenders whose name contains one of these")
    add(
        "--peer-python",
        type=_pythons,
        default={},
        metavar="torch=PATH,...",
        help="another python for a family of peers",
    )
    add("--seconds", type=float, default=1.0, help="per contender and step")
    add("--cold-mb", type=int, default=128, help="copies of a contender's caches together")
    add("--max-memory", type=float, default=8.0, help="GB of caches at one time")
    add("--json", action="store_true", help="one document in place of tables")
    return parser


def main() -> None:
    """Prints tables, or one JSON document."""
    options = _parser().parse_args()
    with ExitStack() as stack:
        benchmark = Benchmark(options, stack)
        document: dict[str, object] = {"machine": describe(benchmark.versions)}
        if not options.json:
            print(json.dumps(document["machine"], indent=1), end="\n\n")
        rows: dict[str, list[Row]] = {"rows": [], "prefill": []}
        kinds = {"rows": options.contexts, "prefill": options.prefill}
        for kind, tokens in kinds.items():
            for (heads, kv_heads), batch, past, count, threads in itertools.product(
                options.shapes,
                options.batch,
                options.past if kind == "prefill" else [0],
                tokens,
                options.threads,
            ):
                new = 1 if kind == "rows" else count
                step = Step(heads, kv_heads, options.head_size, batch, past + count, new)
                what = (
                    f"{heads}/{kv_heads}, batch {batch}, {past + count} tokens, {threads} threads"
                )
                print(f"{'decode' if new == 1 else 'prefill'} {what}", file=sys.stderr, flush=True)
                time = benchmark.decode if kind == "rows" else benchmark.prefill
                measured = time(step, threads)
                rows[kind] += measured
                if not options.json and measured:
                    print(table(measured), flush=True)
        if options.json:
            print(document_text(document | rows))


if __name__ == "__main__":
    main()
