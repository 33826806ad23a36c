"""Time models in onnxruntime-node and onnxruntime-web: how long they open, how fast they decode.

Run it from the repository with tq-onnx installed, Node, and a folder with the npm packages (see
tests/javascript/packages.py):

    python -m tests.javascript.packages work/node
    python benchmarks/javascript.py work/node demo/model.onnx deep/model.onnx
    python benchmarks/javascript.py work/node demo/model.onnx --presets int4 k5v3 --runtimes node
    python benchmarks/javascript.py work/node demo/model.onnx --runtimes node --bodies --json

Each model is measured beside its conversions with --target web, one for each preset, on one thread;
with --bodies beside conversions with function bodies, too. docs/measurements/javascript.json is
such a document.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import machine
from report import document_text

from tq_onnx.conversion.options import Options
from tq_onnx.conversion.pipeline import convert
from tq_onnx.targets.registry import TARGETS

PLAIN = Options(gains=False, residual_length=0, sink_tokens=0)
"""What models for JavaScript have, in a model with operators."""


@dataclass(frozen=True)
class Row:
    """One form of one model in one runtime at one context.

    Attributes:
        model: the original's folder.
        layers: of the model.
        runtime: node or web.
        form: original, --target web or function bodies.
        preset: of the conversion; None of the original.
        seconds_to_open: of the session; the median of three.
        context: tokens in the cache.
        ms: the median step.
        times_original: how many times as fast as the original, median of pairs.
        cache_bytes: after the timed steps, all layers.
    """

    model: str
    layers: int
    runtime: str
    form: str
    preset: str | None
    seconds_to_open: float
    context: int
    ms: float
    times_original: float
    cache_bytes: int


Form = tuple[str, str | None]
"""The form and the preset of a file."""
ORIGINAL: Final[Form] = ("original", None)


def _rows(original: Path, work: Path, options: argparse.Namespace) -> Iterator[Row]:
    files: dict[Form, Path] = {ORIGINAL: original}
    for preset in options.presets:
        files["--target web", preset] = path = work / f"web-{preset}.onnx"
        plan = convert(original, path, preset=preset, target=TARGETS["web"]).plan
        if options.bodies:
            files["function bodies", preset] = path = work / f"bodies-{preset}.onnx"
            convert(original, path, preset=preset, options=PLAIN)
    for runtime in options.runtimes:
        request = {
            "contexts": options.contexts,
            "steps": options.steps,
            "headSize": plan.layers[0].head_size,
            "models": [str(path) for path in files.values()],
        }
        script = Path(__file__).with_suffix(".mjs")
        process = subprocess.run(
            ["node", str(script), str(options.packages.resolve()), runtime, json.dumps(request)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        answer = json.loads(process.stdout)
        for decode in answer["decode"]:
            for index, (form, preset) in enumerate(files):
                yield Row(
                    model=original.resolve().parent.name,
                    layers=len(plan.layers),
                    runtime=runtime,
                    form=form,
                    preset=preset,
                    seconds_to_open=answer["opened"][index],
                    context=decode["context"],
                    ms=decode["ms"][index],
                    times_original=decode["times_original"][index],
                    cache_bytes=decode["cache_bytes"][index],
                )


def _versions(packages: Path) -> dict[str, str]:
    packages_found = {
        name: json.loads((packages / "node_modules" / name / "package.json").read_text())["version"]
        for name in ("onnxruntime-node", "onnxruntime-web")
    }
    node = subprocess.run(["node", "--version"], stdout=subprocess.PIPE, text=True, check=True)
    return {"node": node.stdout.strip().removeprefix("v"), **packages_found}


def _line(row: Row) -> str:
    form = row.form if row.preset is None else f"{row.form} {row.preset}"
    return (
        f"{row.model:<16} {row.runtime:<5} {form:<22} opens in {row.seconds_to_open:5.2f} s, "
        f"{row.context:>6,} tokens: {row.ms:7.1f} ms, x original {row.times_original:.2f}, "
        f"cache {row.cache_bytes:,}"
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("packages", type=Path, help="folder that node_modules is in")
    parser.add_argument("models", type=Path, nargs="+", help="original ONNX models")
    parser.add_argument("--presets", nargs="+", default=["int4"])
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
        facts = machine.describe(_versions(options.packages))
        print(document_text({"machine": facts, "rows": [asdict(row) for row in rows]}))
        return
    print("\n".join(map(_line, rows)))


if __name__ == "__main__":
    main()
