"""What products of 8 bits cost a decode step: KL divergence from the original, in pairs.

Caches that are written with other products hold other codes, and one code that tips moves the
divergence by more than the products do. So the caches are frozen here: a session with
floating-point products reads each window and writes all rows. Every few tokens, each kind of
products takes the same single decode step from a copy of the same cache, and the divergences of
those steps are compared in pairs.

    python benchmarks/products.py model.onnx model.int4.onnx
    python benchmarks/products.py smollm2/model.onnx smollm2/int4.onnx --text wikitext2-valid.txt
    python benchmarks/products.py model.onnx model.int4.onnx --free

With ``--free`` each kind of products decodes the windows token by token with caches of its own, so
that what its steps write counts, too. That takes as many steps as there are tokens, and the
differences scatter more.

A kind of products passes where the mean divergence is at most 1 % of that with floating-point
products plus 0.0002 larger. Kinds that give the same logits to the bit are an error: this
instruction set, or this codec, has not both, and nothing would have been compared.

All windows of a model take their steps together, as one batch. The original's logits are kept in
memory: predictions x vocabulary x 4 bytes, 400 MB for 2,048 predictions of a vocabulary of 49,152.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import machine
import numpy as np
import numpy.typing as npt
import onnxruntime

from tq_onnx.conversion.branches import load_decoder
from tq_onnx.errors import TqOnnxError
from tq_onnx.integrations.tokens import model_tokens
from tq_onnx.measure.divergence import Floats, log_softmax
from tq_onnx.measure.windows import Ids
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.model import OpenModel
from tq_onnx.runtime.opening import open_converted, open_original
from tq_onnx.runtime.session import setting
from tq_onnx.runtime.variables import PRODUCTS, SKIP_BELOW
from tq_onnx.verification.interfaces import refuse_stranger

REFERENCE: Final = "float"
KINDS: Final = (REFERENCE, "8")
SKIPPING: Final = "skip"
"""Products of the default that leave out values, as kernels do unless they are told otherwise."""
RELATIVE, ABSOLUTE = 0.01, 0.0002
"""The divergence may rise by so much of itself, and by so much besides."""
PIECE: Final = 128
"""Tokens of a call of the original."""


@dataclass(frozen=True)
class Row:
    """One kind of products on one converted model.

    Attributes:
        model: the file.
        products: the kind, as ``TQ_ONNX_PRODUCTS`` names it.
        predictions: single decode steps.
        kl: mean KL divergence from the original, in nats.
        kl_error: its standard error, taking the predictions for independent.
        rise: mean of the differences from ``kl`` with floating-point products.
        rise_error: its standard error.
        allowed: the rise that is allowed.
        passes: True if the rise is at most that.
        rise_first_half: the rise in the first half of the windows.
        rise_second_half: the rise in the second half.
        top1_agreement: part of the predictions whose likeliest token is the original's.
        kl_of_products: mean KL divergence from the same step with floating-point products.
    """

    model: str
    products: str
    predictions: int
    kl: float
    kl_error: float
    rise: float
    rise_error: float
    allowed: float
    passes: bool
    rise_first_half: float
    rise_second_half: float
    top1_agreement: float
    kl_of_products: float


@dataclass(frozen=True)
class Plan:
    """Where predictions are compared.

    Attributes:
        windows: ids ``[windows, context]``, each read with empty caches.
        positions: of the tokens that the steps feed, in each window.
    """

    windows: Ids
    positions: tuple[int, ...]

    @property
    def is_late(self) -> npt.NDArray[np.bool_]:
        """True for predictions in the second half of a window, in the order of the steps."""
        late = np.asarray(self.positions) >= self.windows.shape[1] // 2
        return np.repeat(late, len(self.windows))


def original_logits(original: OpenModel, plan: Plan) -> Floats:
    """Return the original's logits, float32 ``[positions, windows, vocabulary]``."""
    context = plan.windows.shape[1]
    logits_of_windows: list[Floats] = []
    for window in plan.windows:
        decoder = original.decoder()
        chosen: list[Floats] = []
        for start in range(0, context, PIECE):
            logits = decoder.prefill(window[None, start : start + PIECE])[0]
            chosen += [logits[at - start] for at in plan.positions if 0 <= at - start < PIECE]
        logits_of_windows.append(np.asarray(chosen, np.float32))
    return np.stack(logits_of_windows, axis=1)


def steps(decoders: Sequence[Decoder], plan: Plan) -> Iterator[list[Floats]]:
    """Take each step with every decoder from the same cache; the first writes all rows.

    Yields:
        For each position the logits ``[windows, vocabulary]`` of every decoder.
    """
    walker = decoders[0].copy()
    for at in plan.positions:
        walker.prefill(plan.windows[:, walker.length : at])
        held = walker.snapshot()
        logits = []
        for decoder in decoders:
            decoder.restore(held)
            logits.append(decoder.step(plan.windows[:, at]))
        yield logits


def free_steps(decoders: Sequence[Decoder], plan: Plan) -> Iterator[list[Floats]]:
    """Decode the windows token by token with every decoder, and yield as ``steps`` does."""
    for at in range(plan.positions[-1] + 1):
        logits = [decoder.step(plan.windows[:, at]) for decoder in decoders]
        if at in plan.positions:
            yield logits


def measure(
    path: Path,
    reference_logits: Floats,
    plan: Plan,
    *,
    kinds: Sequence[str] = KINDS,
    free: bool = False,
    threads: int | None = None,
) -> list[Row]:
    """Compare the kinds of products on one converted model.

    Args:
        path: the converted model.
        reference_logits: what ``original_logits`` returns.
        plan: where predictions are compared.
        kinds: of products, ``REFERENCE`` first.
        free: whether each kind has caches of its own.
        threads: threads within an operator.

    Raises:
        SystemExit: two kinds give the same logits.
    """
    count, context = plan.windows.shape
    decoders = []
    for kind in kinds:
        with _environment(kind):
            model = open_converted(path, threads=threads)
        decoders.append(model.decoder(batch=count, capacity=context))
    kl: list[list[npt.NDArray[np.float64]]] = [[] for _ in kinds]
    apart: list[list[npt.NDArray[np.float64]]] = [[] for _ in kinds]
    agreed = np.zeros(len(kinds))
    differing = dict.fromkeys(combinations(range(len(kinds)), 2), 0)
    for reference, logits in zip(
        reference_logits, (free_steps if free else steps)(decoders, plan), strict=True
    ):
        original = log_softmax(reference)
        scores = [log_softmax(output) for output in logits]
        for index, (kind_logits, score) in enumerate(zip(logits, scores, strict=True)):
            kl[index].append(divergence(original, score))
            apart[index].append(divergence(scores[0], score))
            agreed[index] += (kind_logits.argmax(-1) == reference.argmax(-1)).sum()
        for a, b in differing:
            differing[a, b] += int((logits[a] != logits[b]).any(-1).sum())
    for (a, b), steps_apart in differing.items():
        if not steps_apart:
            raise SystemExit(
                f"{path}: products of {kinds[a]} and of {kinds[b]} give the same logits, to the "
                "bit: its codecs or this instruction set take the same ones, see TQ_ONNX_ISA"
            )
    all_kl = [np.concatenate(parts) for parts in kl]
    own_divergence = [float(np.concatenate(parts).mean()) for parts in apart]
    late = plan.is_late
    allowed = RELATIVE * float(all_kl[0].mean()) + ABSOLUTE
    rows = []
    for kind, each, agreements, extra in zip(kinds, all_kl, agreed, own_divergence, strict=True):
        rise = each - all_kl[0]
        rows.append(
            Row(
                model=path.name,
                products=kind,
                predictions=len(each),
                kl=float(each.mean()),
                kl_error=standard_error(each),
                rise=float(rise.mean()),
                rise_error=standard_error(rise),
                allowed=allowed,
                passes=bool(rise.mean() <= allowed),
                rise_first_half=float(rise[~late].mean()),
                rise_second_half=float(rise[late].mean()),
                top1_agreement=float(agreements / len(each)),
                kl_of_products=extra,
            )
        )
    return rows


@contextmanager
def _environment(kind: str) -> Iterator[None]:
    products, below = (kind, "0") if kind != SKIPPING else ("", "")
    with setting(PRODUCTS, products), setting(SKIP_BELOW, below):
        yield


def divergence(p: npt.NDArray[np.float64], q: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the KL divergences ``[n]`` of log probabilities ``[n, vocabulary]``."""
    result: npt.NDArray[np.float64] = (np.exp(p) * (p - q)).sum(axis=-1)
    return result


def standard_error(values: npt.NDArray[np.float64]) -> float:
    """Return the standard error of a mean."""
    return float(values.std() / np.sqrt(len(values)))


def table(rows: Sequence[Row]) -> str:
    """Return rows as a table in Markdown."""
    lines = [
        "| model | products | KL | rise | allowed | | 2nd half | same top token | KL of products |",
        "| --- | --- | ---: | ---: | ---: | --- | ---: | ---: | ---: |",
    ]
    for row in rows:
        beginning = (
            f"| {Path(row.model).stem} | {row.products} | {row.kl:.3g} ± {row.kl_error:.1g} |"
        )
        right = f" {100 * row.top1_agreement:.2f} % |"
        if row.products == REFERENCE:
            lines.append(f"{beginning} | | | |{right} |")
            continue
        lines.append(
            f"{beginning} {row.rise:+.2g} ± {row.rise_error:.1g} | {row.allowed:.3g} | "
            f"{'within' if row.passes else '**ABOVE**'} | {row.rise_second_half:+.2g} |{right} "
            f"{row.kl_of_products:.2g} |"
        )
    return "\n".join(lines)


def _plan(options: argparse.Namespace, original: OpenModel) -> tuple[Plan, str]:
    tokens = options.windows * options.context
    text, source = model_tokens((options.original,), options.text, tokens, options.tokenizer)
    if isinstance(text, int):
        raise SystemExit(f"{options.original}: there is no tokenizer beside the model")
    count = len(text) // options.context
    if count < 1:
        raise SystemExit(f"{source}: {len(text)} tokens are no window of {options.context}")
    ids = np.asarray(text[: count * options.context], np.int64).reshape(count, options.context)
    original.refuse_tokens(ids)
    positions = tuple(range(options.skip, options.context, options.stride))
    middle = options.context // 2
    if not positions or positions[0] >= middle or positions[-1] < middle:
        raise SystemExit("no predictions are left in a half of the windows: --skip is too large")
    return Plan(ids, positions), source


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def _kinds(text: str) -> tuple[str, ...]:
    kinds = tuple(text.split(","))
    if kinds[0] != REFERENCE or len(kinds) < 2 or not set(kinds) <= {*KINDS, SKIPPING}:
        raise argparse.ArgumentTypeError(f"give {REFERENCE} first, and one or more of the others")
    return kinds


def main() -> None:
    """Prints a table, or one JSON document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("original", type=Path)
    parser.add_argument("converted", type=Path, nargs="+")
    parser.add_argument("--text", type=Path, help="default: that of the bundled model")
    parser.add_argument("--tokenizer", type=Path, help="its folder; default: beside the original")
    parser.add_argument("--windows", type=_positive, default=16)
    parser.add_argument("--context", type=_positive, default=1024, help="tokens of a window")
    parser.add_argument("--stride", type=_positive, default=7, help="tokens from step to step")
    parser.add_argument("--skip", type=_positive, default=64, help="first tokens without steps")
    parser.add_argument("--products", type=_kinds, default=KINDS, metavar="KIND,...")
    parser.add_argument("--free", action="store_true", help="caches of each kind's own")
    parser.add_argument("--threads", type=_positive)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows: list[Row] = []
    try:
        original = open_original(options.original, threads=options.threads)
        for path in options.converted:
            refuse_stranger(original, path, load_decoder(path))
        plan, source = _plan(options, original)
        reference_logits = original_logits(original, plan)
        del original  # its weights make room for those of three sessions
        for path in options.converted:
            measured = measure(
                path,
                reference_logits,
                plan,
                kinds=options.products,
                free=options.free,
                threads=options.threads,
            )
            if not options.json:
                print(table(measured) if not rows else table(measured).partition("---: |\n")[2])
                sys.stdout.flush()
            rows += measured
    except TqOnnxError as error:
        raise SystemExit(str(error)) from error
    if options.json:
        document: dict[str, Any] = {
            "machine": machine.describe({"onnxruntime": onnxruntime.__version__}),
            "source": source,
            "windows": len(plan.windows),
            "context": options.context,
            "stride": options.stride,
            "free": options.free,
            "rows": [asdict(row) for row in rows],
        }
        document["machine"].pop("pages")  # that is how attention.py gets its caches
        json.dump(document, sys.stdout, indent=2)
        print()


if __name__ == "__main__":
    main()
