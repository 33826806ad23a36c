"""Rebuild the dialect fixtures: real exports of tiny checkpoints with random weights.

Every file is what its exporter wrote, with the weights inside and without metadata. Each route runs
in its own environment (see ``make_exports``); this script itself needs onnx-ir only.

Example::

    python models/make_fixtures.py tests/fixtures
    python models/make_fixtures.py tests/fixtures --only legacy
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import make_exports
import onnx_ir as ir

TOTAL_LIMIT_BYTES = 4 << 20
#: What torch says of the modules a node comes from.
MODULE_SCOPES = "pkg.torch.onnx.name_scopes"


@dataclass(frozen=True)
class Fixture:
    """One file: the checkpoint it is made from, and how.

    Attributes:
        route: one of ``make_exports.ROUTES``.
        checkpoint: one of ``random_checkpoint.CHECKPOINTS``.
        options: of the route's recipe, as on its command line.
        file: which of the exported files, without ``.onnx``.
    """

    route: str
    checkpoint: str
    options: str = ""
    file: str = "model"


FIXTURES = {
    "dynamo-op18-sdpa": Fixture("dynamo", "qwen3-64", "--opset 18 --attention sdpa"),
    "dynamo-op18-eager": Fixture("dynamo", "qwen3-64", "--opset 18 --attention eager"),
    "dynamo-op20-sdpa": Fixture("dynamo", "qwen3-64", "--opset 20 --attention sdpa"),
    "dynamo-op20-eager": Fixture("dynamo", "qwen3-64", "--opset 20 --attention eager"),
    "dynamo-op18-sdpa-hd128-fp16": Fixture("dynamo", "qwen3-128", "--opset 18 --dtype float16"),
    "dynamo-op18-sdpa-bf16": Fixture("dynamo", "qwen3-16", "--opset 18 --dtype bfloat16"),
    "dynamo-op23-sdpa": Fixture("dynamo", "qwen3-16", "--opset 23 --attention sdpa"),
    "dynamo-op23-eager": Fixture("dynamo", "qwen3-16", "--opset 23 --attention eager"),
    "dynamo-op24-sdpa": Fixture("dynamo", "qwen3-16", "--opset 24 --attention sdpa"),
    "dynamo-gemma2": Fixture("dynamo", "gemma2", "--opset 18 --attention eager"),
    "dynamo-gemma3": Fixture("dynamo", "gemma3", "--opset 18 --attention sdpa"),
    "dynamo-qwen3-moe": Fixture("dynamo", "qwen3-moe", "--opset 18 --attention sdpa"),
    "dynamo-phi3": Fixture("dynamo", "phi3", "--opset 18 --attention sdpa"),
    "dynamo-llama": Fixture("dynamo", "llama", "--opset 18 --attention sdpa"),
    "legacy-op14-eager": Fixture("legacy", "qwen3-16", "--opset 14 --attention eager"),
    "legacy-op17-sdpa": Fixture("legacy", "qwen3-16", "--opset 17 --attention sdpa"),
    "legacy-op17-sdpa-fp16": Fixture("legacy", "qwen3-16", "--opset 17 --dtype float16"),
    "legacy-one-token": Fixture("legacy", "qwen3-16", "--opset 17 --tokens 1"),
    "optimum": Fixture("optimum", "qwen3-16"),
    "hf-prefill": Fixture("transformers", "qwen3-16", file="prefill"),
    "hf-decode": Fixture("transformers", "qwen3-16", file="decode"),
    "hf-static-decode": Fixture(
        "transformers", "qwen3-16", "--cache static --capacity 24", file="decode"
    ),
    "hf-static-prefill": Fixture(
        "transformers", "qwen3-16", "--cache static --capacity 24", file="prefill"
    ),
    "hf-static-ortcuda-decode": Fixture(
        "transformers", "qwen3-16", "--cache static --capacity 24 --fusions cuda", file="decode"
    ),
    "hf-ortcpu-prefill": Fixture("transformers", "qwen3-16", "--fusions cpu", file="prefill"),
    "hf-ortcuda-prefill": Fixture("transformers", "qwen3-16", "--fusions cuda", file="prefill"),
    "hf-ortcuda-decode": Fixture("transformers", "qwen3-16", "--fusions cuda", file="decode"),
    "genai-cpu-fp32": Fixture("genai", "qwen3-64", "--precision fp32"),
    "genai-cpu-int4": Fixture("genai", "qwen3-64", "--precision int4"),
    "genai-cpu-int4-hd128": Fixture("genai", "qwen3-128", "--precision int4"),
    "genai-cuda-fp16": Fixture("genai", "qwen3-64", "--precision fp16 --ep cuda"),
    "genai-cuda-int4": Fixture("genai", "qwen3-64", "--precision int4 --ep cuda"),
    "genai-cpu-fp16": Fixture("genai", "qwen3-16", "--precision fp16"),
    "genai-dml-fp16": Fixture("genai", "qwen3-16", "--precision fp16 --ep dml"),
    "genai-webgpu-fp16": Fixture("genai", "qwen3-16", "--precision fp16 --ep webgpu"),
    "genai09-cpu-fp32": Fixture("genai09", "qwen3-16", "--precision fp32"),
    "mobius-default": Fixture("mobius", "qwen3-16"),
    "mobius-static": Fixture("mobius", "qwen3-16", "--static-cache --max-seq-len 24"),
}


def make(selected: dict[str, Fixture], environments: Path) -> Iterator[tuple[str, ir.Model]]:
    """Yield each selected fixture's name and model, weights in memory, without metadata."""
    with tempfile.TemporaryDirectory() as temporary:
        checkpoints, exports = Path(temporary) / "checkpoints", Path(temporary) / "exports"
        torch = make_exports.prepare("torch", environments)
        names = sorted({fixture.checkpoint for fixture in selected.values()})
        make_exports.run("random_checkpoint.py", torch, *names, str(checkpoints))
        for name, fixture in selected.items():
            # The two files of one export of transformers are made once.
            options = fixture.options.split()
            folder = exports / "_".join([fixture.route, fixture.checkpoint, *options])
            if not folder.exists():
                checkpoint = checkpoints / fixture.checkpoint
                make_exports.export(
                    fixture.route, checkpoint, folder, options, environments=environments
                )
            model = ir.load(folder / f"{fixture.file}.onnx")
            ir.external_data.load_to_model(model)
            trim(model)
            yield name, model


def trim(model: ir.Model) -> None:
    """Remove what exporters write of themselves, but for torch's module scopes.

    It is larger than the graph, and some of it names files of the machine that exported.
    """
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        node.doc_string = None
        for key in set(node.metadata_props) - {MODULE_SCOPES}:
            del node.metadata_props[key]
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path, help="folder of the fixtures")
    parser.add_argument("--only", default="", help="make only names that contain this")
    parser.add_argument(
        "--environments",
        type=Path,
        default=make_exports.ENVIRONMENTS,
        help="folder of virtual environments",
    )
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    selected = {name: fixture for name, fixture in FIXTURES.items() if options.only in name}
    for name, model in make(selected, options.environments):
        path = options.output / f"{name}.onnx"
        path.parent.mkdir(exist_ok=True)
        ir.save(model, path)
        print(f"{path.name}: {path.stat().st_size:,} bytes", flush=True)
    total = sum(path.stat().st_size for path in options.output.glob("*.onnx"))
    print(f"total: {total:,} bytes")
    if total > TOTAL_LIMIT_BYTES:
        raise SystemExit(f"the fixtures are larger than {TOTAL_LIMIT_BYTES:,} bytes")


if __name__ == "__main__":
    main()
