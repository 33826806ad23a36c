"""Rebuild the dialect fixtures: real exports of a tiny Qwen3 with random weights.

Every file is what its exporter wrote, with the weights inside and without the nodes' bulky metadata
(see ``export_dynamo.trim_metadata``). The weights are drawn from fixed seeds and the norm weights
are not 1, so that folding them away wrongly changes the result.

Example::

    python models/make_fixtures.py tests/dialects/fixtures
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

import export_dynamo
import export_genai
import onnx_ir as ir
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

TOTAL_LIMIT_BYTES = 3 << 20


@dataclass(frozen=True)
class Fixture:
    """One export: its name, the checkpoint it is made from, and how.

    Attributes:
        name: file name without ``.onnx``.
        head_dim: which of the two checkpoints.
        opset: of the dynamo exporter; 0 for the genai builder.
        form: attention form (dynamo) or execution provider (genai).
        precision: dtype (dynamo) or precision (genai).
    """

    name: str
    head_dim: int
    opset: int
    form: str
    precision: str


FIXTURES = (
    Fixture("dynamo-op18-sdpa", 64, 18, "sdpa", "float32"),
    Fixture("dynamo-op18-eager", 64, 18, "eager", "float32"),
    Fixture("dynamo-op20-sdpa", 64, 20, "sdpa", "float32"),
    Fixture("dynamo-op20-eager", 64, 20, "eager", "float32"),
    Fixture("dynamo-op18-sdpa-hd128-fp16", 128, 18, "sdpa", "float16"),
    Fixture("genai-cpu-fp32", 64, 0, "cpu", "fp32"),
    Fixture("genai-cpu-int4", 64, 0, "cpu", "int4"),
    Fixture("genai-cpu-int4-hd128", 128, 0, "cpu", "int4"),
    Fixture("genai-cuda-fp16", 64, 0, "cuda", "fp16"),
    Fixture("genai-cuda-int4", 64, 0, "cuda", "int4"),
)


def make_checkpoint(directory: Path, head_dim: int) -> None:
    """Save a Qwen3 of two layers with random weights.

    No Linear has as many outputs as there are tokens: the genai builder would take such a layer for
    the language-model head.
    """
    torch.manual_seed(head_dim)
    config = Qwen3Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=256,
        rope_theta=1e6,
        tie_word_embeddings=head_dim == 128,
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)


def make(fixture: Fixture, checkpoint: Path, output: Path) -> None:
    """Export one fixture and write it as a single file."""
    with tempfile.TemporaryDirectory() as temporary:
        exported = Path(temporary) / "model.onnx"
        if fixture.opset:
            export_dynamo.export(
                checkpoint,
                exported,
                opset=fixture.opset,
                attention=fixture.form,
                dtype=fixture.precision,
            )
        else:
            export_genai.export(
                checkpoint, exported.parent, precision=fixture.precision, ep=fixture.form
            )
        model = ir.load(exported)
        ir.external_data.load_to_model(model)
        ir.save(model, output)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path, help="folder of the fixtures")
    parser.add_argument("--only", help="make only names that contain this")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        for head_dim in sorted({fixture.head_dim for fixture in FIXTURES}):
            make_checkpoint(Path(temporary) / str(head_dim), head_dim)
        for fixture in FIXTURES:
            if options.only and options.only not in fixture.name:
                continue
            path = options.output / f"{fixture.name}.onnx"
            make(fixture, Path(temporary) / str(fixture.head_dim), path)
            print(f"{path.name}: {path.stat().st_size:,} bytes", flush=True)
    total = sum(path.stat().st_size for path in options.output.glob("*.onnx"))
    print(f"total: {total:,} bytes")
    if total > TOTAL_LIMIT_BYTES:
        raise SystemExit(f"the fixtures are larger than {TOTAL_LIMIT_BYTES:,} bytes")


if __name__ == "__main__":
    main()
