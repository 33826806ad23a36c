"""Compare folders of onnxruntime-genai by its own Generator, token by token, as programs use them.

Every folder reads the same windows of a text. The logits of each token are compared with those of
the original folder: perplexity, KL divergence and agreement, as ``tq-onnx report`` has them. So the
figures are those of a decode loop, with the buffers that onnxruntime-genai allocates.

Example::

    python benchmarks/genai_quality.py qwen3-genai qwen3-genai-int4 --text held-out.txt
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as og

from tq_onnx.measure.divergence import QualityFigures, Sums

STRETCH = 64
"""Tokens whose logits are compared at a time."""


def figures(
    folders: list[Path], text: str, *, context: int, count: int, chunk: int, growing: bool
) -> list[QualityFigures]:
    """Return the figures of every folder but the first, which is the original.

    Args:
        folders: of onnxruntime-genai, with one tokenizer.
        text: at least ``count`` windows of ``context`` tokens.
        context: tokens of a window, read by a Generator of its own.
        count: windows.
        chunk: tokens of a call; the last one's logits are compared.
        growing: whether the converted folders' caches grow, as they do with beams.

    Raises:
        SystemExit: the text is too short.
    """
    models = [_model(folder, growing and folder != folders[0]) for folder in folders]
    tokens = np.asarray(og.Tokenizer(models[0]).encode(text), np.int32)
    if len(tokens) < context * count:
        raise SystemExit(f"the text has {len(tokens)} tokens, and {context * count} are needed")
    sums = [Sums() for _ in models[1:]]
    for number in range(count):
        window = tokens[number * context :][:context]
        generators = [og.Generator(model, og.GeneratorParams(model)) for model in models]
        rows: list[list[Any]] = [[] for _ in models]
        ends = range(chunk, context, chunk)
        places: list[int] = []
        for end in ends:
            for generator, row in zip(generators, rows, strict=True):
                generator.append_tokens(window[end - chunk : end])
                row.append(np.asarray(generator.get_logits(), np.float32).reshape(-1))
            places.append(end - 1)
            if len(places) == STRETCH or end == ends[-1]:
                at = np.array(places)
                expected = np.stack(rows[0])
                for total, row in zip(sums, rows[1:], strict=True):
                    total.add(expected, np.stack(row), window[at + 1].astype(np.int64), at)
                rows, places = [[] for _ in models], []
        print(f"window {number + 1} of {count}", file=sys.stderr, flush=True)
    return [total.figures(context, context) for total in sums]


def _model(folder: Path, growing: bool) -> Any:
    config = og.Config(str(folder))
    if growing:
        config.overlay(json.dumps({"search": {"past_present_share_buffer": False}}))
    return og.Model(config)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("original", type=Path, help="the folder before its conversion")
    parser.add_argument("converted", type=Path, nargs="+", help="folders that were converted")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--context", type=int, default=1024, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--chunk", type=int, default=1, help="tokens of a call")
    parser.add_argument("--growing", action="store_true", help="also with caches that grow")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    options = parser.parse_args()
    document: dict[str, Any] = {}
    for caches in ("shared", "growing")[: 1 + options.growing]:
        measured = figures(
            [options.original, *options.converted],
            options.text.read_text(encoding="utf-8"),
            context=options.context,
            count=options.windows,
            chunk=options.chunk,
            growing=caches == "growing",
        )
        for folder, entry in zip(options.converted, measured, strict=True):
            document.setdefault(caches, {})[folder.name] = asdict(entry)
            print(
                f"{folder.name}, {caches} caches: perplexity {100 * entry.perplexity_change:+.2f} "
                f"% +- {100 * entry.perplexity_change_error:.2f}, KL {entry.kl_mean:.4f} "
                f"+- {entry.kl_error:.4f} nats, the same first choice {entry.top1_agreement:.1%}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
