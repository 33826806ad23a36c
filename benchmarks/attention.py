"""Decode attention of one layer: the TurboQuant operators against ONNX Runtime's own cache ops.

Run it from the repository with tq-onnx installed:

    python benchmarks/attention.py
    python benchmarks/attention.py --contexts 4096 --threads 1 --json

Each contender does what one layer does in one decode step: append one token to a cache of fixed
capacity, in place, and attend to all of it. The method is in README.md of this folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

import onnxruntime as ort
from peers import HEAD_SIZE, PEERS, YARDSTICK, Shape
from timing import Result, measure

from tq_onnx.runtime.library import library_info


def _shapes(text: str) -> list[tuple[int, int]]:
    pairs = []
    for item in text.split(","):
        query_heads, kv_heads = (int(part) for part in item.split("/"))
        pairs.append((query_heads, kv_heads))
    return pairs


def _integers(text: str) -> list[int]:
    return [int(item) for item in text.split(",")]


def main() -> None:
    """Prints a table, or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", type=_shapes, default=[(16, 8), (40, 8)], metavar="H/N,...")
    parser.add_argument("--contexts", type=_integers, default=[1024, 4096, 16384])
    parser.add_argument("--threads", type=_integers, default=[1, 2])
    parser.add_argument("--only", default="", help="contenders whose name contains this")
    parser.add_argument("--cold-mb", type=int, default=128, help="caches of a contender in all")
    parser.add_argument("--seconds", type=float, default=1.0, help="per contender and shape")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    peers = [peer for peer in PEERS if arguments.only in peer.name or peer.name == YARDSTICK]
    info = library_info()
    if not arguments.json:
        print(f"onnxruntime {ort.__version__}, tq-onnx {info.version} ({info.isa})")
        print(
            f"{'heads':>7} {'context':>8} {'threads':>7}  {'contender':<28} "
            f"{'ms':>8} {'fastest':>8} {'x f32':>6}"
        )
    results = []
    for query_heads, kv_heads in arguments.shapes:
        for context in arguments.contexts:
            for threads in arguments.threads:
                some = measure(
                    Shape(query_heads, kv_heads, context),
                    threads,
                    peers,
                    cold_mb=arguments.cold_mb,
                    seconds=arguments.seconds,
                )
                results += some
                if not arguments.json:
                    for result in some:
                        _print(result)
    if arguments.json:
        rows = [{k: v for k, v in asdict(r).items() if k != "samples"} for r in results]
        document = {"onnxruntime": ort.__version__, "tq_onnx": info.version, "isa": info.isa,
                    "head_size": HEAD_SIZE, "results": rows}  # fmt: skip
        json.dump(document, sys.stdout, indent=2)
        print()


def _print(result: Result) -> None:
    where = f"{result.query_heads}/{result.kv_heads}"
    left = f"{where:>7} {result.context:>8} {result.threads:>7}  {result.name:<28}"
    if result.milliseconds is None:
        print(f"{left} missing: {result.reason}", flush=True)
        return
    ratio = f"{result.times_float32_gqa:6.2f}" if result.times_float32_gqa else "     -"
    print(f"{left} {result.milliseconds:8.3f} {result.fastest_ms:8.3f} {ratio}", flush=True)


if __name__ == "__main__":
    main()
