"""How many values a decode step leaves out, on real text.

A converted model reads a text and then takes single steps. For each layer and KV head, the weights
of all keys are computed from the query and the decoded rows, and blocks are left out as kernels
leave them out (``TQ_ONNX_SKIP_BELOW``): where no weight of any query head of the group is as much
as ``--below`` of the largest so far, of the tokens that are exact and of the range of keys up to
two blocks before.

    python benchmarks/skipped.py smollm2/int4.onnx --text wikitext2-valid.txt --contexts 4096,8192
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from tq_onnx.integrations.tokens import model_tokens
from tq_onnx.measure.expose_internals import expose_internals
from tq_onnx.measure.probe import LayerNames, Probe
from tq_onnx.measure.reconstruction import decoded_rows
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.generate import PROMPT_PIECE

BLOCK: Final = 128
RANGE: Final = 512  # keys of a task of short and middling contexts
WAITING: Final = 2  # blocks whose values have not been added yet
FROM: Final = 4096  # tokens up to which nothing is left out


def left_out(weights: npt.NDArray[np.float64], sinks: int, recent: int, below: float) -> float:
    """Return the part of the values that a KV head leaves out.

    Args:
        weights: of all keys, ``[G, S]``, up to a factor of each query.
        sinks: first tokens that are exact.
        recent: newest tokens that are exact.
        below: share of the largest weight.
    """
    low, high = sinks, weights.shape[1] - recent
    exact = np.concatenate([weights[:, :low], weights[:, high:]], axis=1)
    start = exact.max(axis=1, initial=0.0)
    skipped = 0
    for first in range(0, high, RANGE):
        known = [start] * (1 + WAITING)  # the largest weight, of blocks whose values were added
        end = min(first + RANGE, high)
        for at in range(max(first, low), end - BLOCK + 1, BLOCK):
            block = weights[:, at : at + BLOCK].max(axis=1)
            skipped += BLOCK * bool((block < below * known[-1 - WAITING]).all())
            known.append(np.maximum(known[-1], block))
    return skipped / weights.shape[1]


def of_layer(decoder: Decoder, layer: LayerNames, below: float) -> float:
    """Return the mean over the KV heads of a layer, of the decoder's last step."""
    plan, names = layer.plan, layer.key
    window = decoder.signature.window_of(plan)
    [index] = [
        at
        for at, spec in enumerate(decoder.signature.caches)
        if spec.pair.present == plan.key.present
    ]
    rows = decoder.signature.caches[index].of_tokens(decoder.plane(index))[0]
    keys = decoded_rows(rows, names, plan.dtype)
    keys += names.offsets((1, *keys.shape), np.zeros(1, np.int64))[0]
    query = decoder.watched[layer.query][0, :, -1].astype(np.float64)
    group = len(query) // len(keys)
    parts = []
    for head, head_keys in enumerate(keys):
        scores = plan.scale * query[head * group : (head + 1) * group] @ head_keys.T
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        parts.append(left_out(weights, window.sinks, window.recent, below))
    return float(np.mean(parts))


def measure(
    probe: Probe, text: npt.NDArray[np.int64], contexts: list[int], steps: int, below: float
) -> Iterator[list[float]]:
    """Yield the mean part of each layer over the steps before each context, which rise."""
    decoder, begin = probe.decoder(library=True), 0
    for context in contexts:
        unread = text[None, begin : context - steps]
        for piece in decoder.calls(unread.shape[1], PROMPT_PIECE):
            decoder.prefill(unread[:, piece])
        parts = []
        for at in range(context - steps, context):
            decoder.step([int(text[at])])
            parts.append([of_layer(decoder, layer, below) for layer in probe.layers])
        begin = context
        yield np.mean(parts, axis=0).tolist()


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--contexts", default="8192")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--below", type=float, default=1e-4)
    options = parser.parse_args()
    contexts = sorted(int(part) for part in options.contexts.split(","))
    text, source = model_tokens((options.model,), options.text, max(contexts), None)
    if isinstance(text, int) or len(text) < max(contexts):
        raise SystemExit(f"{source}: too few tokens")
    ids = np.asarray(text, np.int64)
    print("| tokens | values left out | of the layer with the fewest | with the most |")
    print("|---:|---:|---:|---:|")
    if contexts[0] - options.steps < FROM:
        raise SystemExit(f"up to {FROM:,} tokens nothing is left out")
    measured = measure(expose_internals(options.model), ids, contexts, options.steps, options.below)
    for context, shares in zip(contexts, measured, strict=True):
        shown = (f"{100 * part:.1f} %" for part in (np.mean(shares), min(shares), max(shares)))
        print(f"| {context:,} | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
