"""Tokens per second of a whole model: its own cache, ONNX Runtime's others, and TurboQuant's.

Run it from the repository with tq-onnx installed; the folder gets the models, once (see
whole_models.py for what that needs):

    python benchmarks/end_to_end.py work
    python benchmarks/end_to_end.py work --weights int4 --contexts 4096 --threads 1 --json
    python benchmarks/end_to_end.py --model qwen3-genai/model.onnx    # one of your own

The method is in README.md of this folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import machine
import onnxruntime
from whole_models import QWEN3_06B, WEIGHTS, make_model, with_cache

from tq_onnx.errors import TqOnnxError
from tq_onnx.runtime.model import OpenModel
from tq_onnx.runtime.opening import open_conversion, open_original
from tq_onnx.speed.timing import measure

ORT_CACHES = ("float16", "int8", "int4")
YARDSTICK = "ort gqa float32"


@dataclass(frozen=True)
class Row:
    """One cache at one context.

    Attributes:
        weights: type of the model's weights.
        context: tokens in the cache.
        threads: threads within an operator.
        peer: the cache.
        tokens_per_second: in decode, from the median step.
        ms: the median step.
        fastest_ms: the least disturbed step.
        yardstick_ms: the median step of the original, measured in turns with this one.
        times_original: how many times as fast as the original that is.
        cache_bytes: of the context, all layers.
        reason: why there are no figures.
    """

    weights: str
    context: int
    threads: int
    peer: str
    tokens_per_second: float | None = None
    ms: float | None = None
    fastest_ms: float | None = None
    yardstick_ms: float | None = None
    times_original: float | None = None
    cache_bytes: int | None = None
    reason: str = ""


def _rows(path: Path, weights: str, options: argparse.Namespace) -> Iterator[Row]:
    """Every cache against the original, in pairs: two models at a time fit into memory."""
    for threads in options.threads:
        original = open_original(path, threads=threads)
        for peer, opens in _peers(original, options.presets, threads).items():
            if options.only not in peer:
                continue
            try:
                contender = opens()
            except TqOnnxError as error:
                for context in options.contexts:
                    yield Row(weights, context, threads, peer, reason=str(error))
                continue
            for context in options.contexts:
                yield _measured(original, contender, Row(weights, context, threads, peer), options)
            del contender


def _peers(
    original: OpenModel, presets: list[str], threads: int
) -> dict[str, Callable[[], OpenModel]]:
    openers: dict[str, Callable[[], OpenModel]] = {}
    for preset in presets:
        openers[f"tq-onnx {preset}"] = lambda preset=preset: open_conversion(
            original.path, preset=preset, threads=threads
        )
    for cache in ORT_CACHES:
        openers[f"ort gqa {cache}"] = lambda cache=cache: _ort(original, cache, threads)
    return openers


def _ort(original: OpenModel, cache: str, threads: int) -> OpenModel:
    if cache == "float16":
        raise TqOnnxError("on the CPU a float32 model has no float16 cache")
    return with_cache(original, cache, threads=threads)


def _measured(
    original: OpenModel, contender: OpenModel, row: Row, options: argparse.Namespace
) -> Row:
    try:
        before, after = measure(
            (original, contender),
            row.context,
            tokens=options.tokens,
            prompt=False,
            pause=row.threads != 1,
        )
    except TqOnnxError as error:
        return Row(row.weights, row.context, row.threads, row.peer, reason=str(error))
    return Row(
        row.weights,
        row.context,
        row.threads,
        row.peer,
        tokens_per_second=after.tokens_per_second,
        ms=after.step_seconds * 1e3,
        fastest_ms=after.fastest_step_seconds * 1e3,
        yardstick_ms=before.step_seconds * 1e3,
        times_original=before.step_seconds / after.step_seconds,
        cache_bytes=after.cache_bytes,
    )


def _print(row: Row) -> None:
    beginning = f"{row.weights:>8} {row.context:>8,} {row.threads:>7}  {row.peer:<18}"
    if row.ms is None or row.yardstick_ms is None or row.cache_bytes is None:
        print(f"{beginning} missing: {row.reason}", flush=True)
        return
    print(
        f"{beginning} {row.tokens_per_second:9.2f} {1e3 / row.yardstick_ms:9.2f} "
        f"{row.times_original:6.2f} {row.cache_bytes / 2**20:9.1f}",
        flush=True,
    )


def _integers(text: str) -> list[int]:
    return [int(item) for item in text.split(",")]


def _names(text: str) -> list[str]:
    return text.split(",")


def main() -> None:
    """Prints a table, or one JSON document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", type=Path, nargs="?", help="folder for the models")
    parser.add_argument("--model", type=Path, help="a float32-cache model of the genai builder")
    parser.add_argument("--weights", type=_names, default=list(WEIGHTS), metavar="NAME,...")
    parser.add_argument("--layers", type=int, default=QWEN3_06B["num_hidden_layers"])
    parser.add_argument("--contexts", type=_integers, default=[1024, 4096, 16384, 32768])
    parser.add_argument("--threads", type=_integers, default=[2])
    parser.add_argument("--tokens", type=int, default=32, help="timed steps of each")
    parser.add_argument("--presets", type=_names, default=["int4", "k8v4"], metavar="NAME,...")
    parser.add_argument("--only", default="", help="contenders whose name contains this")
    parser.add_argument("--make-only", action="store_true", help="make the models, and stop")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if (options.work is None) == (options.model is None):
        parser.error("give a folder for the models, or --model")
    if options.model is not None:
        paths = {"own": options.model}
    else:
        paths = {name: make_model(options.work, name, options.layers) for name in options.weights}
    if options.make_only:
        return
    measured = []
    if not options.json:
        print(
            f"{'weights':>8} {'context':>8} {'threads':>7}  {'cache':<18} {'tokens/s':>9} "
            f"{'float32':>9} {'times':>6} {'MiB':>9}"
        )
    for weights, path in paths.items():
        for row in _rows(path, weights, options):
            measured.append(row)
            if not options.json:
                _print(row)
    if options.json:
        about = machine.describe({"onnxruntime": onnxruntime.__version__})
        about.pop("pages", None)  # that is how attention.py gets its caches
        rows = [asdict(row) for row in measured]
        layers = options.layers if options.model is None else None
        document = {
            "machine": about,
            "yardstick": YARDSTICK,
            "layers": layers,
            "tokens": options.tokens,
            "rows": rows,
        }
        json.dump(document, sys.stdout, indent=2)
        print()


if __name__ == "__main__":
    main()
