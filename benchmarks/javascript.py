"""Time models in onnxruntime-node and onnxruntime-web: how long they open, how fast they decode.

Run it from the repository with tq-onnx installed, Node, and a folder with the npm packages (see
tests/javascript/packages.py):

    python -m tests.javascript.packages work/node
    python benchmarks/javascript.py work/node demo/model.onnx deep/model.onnx
    python benchmarks/javascript.py work/node demo/model.onnx --runtimes node --bodies --json

Each model is measured beside its conversions, on one thread: with --target web, and with --bodies
with its function bodies, too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import machine

from tq_onnx.conversion.options import Options
from tq_onnx.conversion.pipeline import convert
from tq_onnx.targets.registry import TARGETS

PLAIN = Options(gains=False, window=0, sinks=0)
"""What models for JavaScript have, in a model with operators."""


@dataclass(frozen=True)
class Row:
    """One form of one model in one runtime at one context.

    Attributes:
        model: the original's folder.
        layers: of the model.
        runtime: node or web.
        form: original, --target web or function bodies.
        seconds_to_open: of the session.
        context: tokens in the cache.
        ms: the median step.
        times_original: how many times as fast as the original, median of pairs.
        cache_bytes: of the context, all layers.
    """

    model: str
    layers: int
    runtime: str
    form: str
    seconds_to_open: float
    context: int
    ms: float
    times_original: float
    cache_bytes: int


def _rows(original: Path, work: Path, options: argparse.Namespace) -> Iterator[Row]:
    forms = {"original": original, "--target web": work / "web.onnx"}
    report = convert(original, forms["--target web"], preset=options.preset, target=TARGETS["web"])
    head_size = report.plan.layers[0].head_size
    if options.bodies:
        forms["function bodies"] = work / "bodies.onnx"
        convert(original, forms["function bodies"], preset=options.preset, options=PLAIN)
    for runtime in options.runtimes:
        given = {
            "contexts": options.contexts,
            "steps": options.steps,
            "headSize": head_size,
            "models": [str(path) for path in forms.values()],
        }
        script = Path(__file__).with_suffix(".mjs")
        done = subprocess.run(
            ["node", str(script), str(options.packages.resolve()), runtime, json.dumps(given)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        told = json.loads(done.stdout)
        for decode in told["decode"]:
            for index, form in enumerate(forms):
                yield Row(
                    model=original.resolve().parent.name,
                    layers=len(report.plan.layers),
                    runtime=runtime,
                    form=form,
                    seconds_to_open=told["opened"][index],
                    context=decode["context"],
                    ms=decode["ms"][index],
                    times_original=decode["times_original"][index],
                    cache_bytes=decode["cache_bytes"][index],
                )


def _table(rows: list[Row]) -> Iterator[str]:
    yield (
        "| model | layers | runtime | form | opens in | context | ms a token | x original | cache |"
    )
    yield "|" + " --- |" * 9
    for row in rows:
        yield (
            f"| {row.model} | {row.layers} | {row.runtime} | {row.form} "
            f"| {row.seconds_to_open:.2f} s | {row.context:,} | {row.ms:.1f} "
            f"| {row.times_original:.2f} | {row.cache_bytes:,} |"
        )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("packages", type=Path, help="folder that node_modules is in")
    parser.add_argument("models", type=Path, nargs="+", help="original ONNX models")
    parser.add_argument("--preset", default="int4")
    parser.add_argument("--runtimes", nargs="+", choices=("node", "web"), default=["node", "web"])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1000])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--bodies", action="store_true", help="measure function bodies, too")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows: list[Row] = []
    for model in options.models:
        # Beside the original, whose weights they share.
        with tempfile.TemporaryDirectory(dir=model.resolve().parent) as work:
            rows += _rows(model, Path(work), options)
    if options.json:
        document = {"machine": machine.describe({}), "rows": [asdict(row) for row in rows]}
        json.dump(document, sys.stdout, indent=2)
        return
    print("\n".join(_table(rows)))


if __name__ == "__main__":
    main()
