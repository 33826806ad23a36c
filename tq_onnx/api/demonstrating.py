"""The demo: the bundled trained model before and after its conversion, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tq_onnx.progress import OnProgress, Progress, silent

if TYPE_CHECKING:
    from tq_onnx.integrations.huggingface import Tokenizer
    from tq_onnx.measure.divergence import QualityFigures
    from tq_onnx.measure.greedy import GreedyFigures
    from tq_onnx.runtime.generate import Generation
    from tq_onnx.runtime.model import OpenModel
    from tq_onnx.speed.timing import SpeedFigures

PRESET: Final = "int4"
TEXT_TOKENS: Final = 8192
CONTEXT: Final = 1024
PROMPT_TOKENS: Final = 512
NEW_TOKENS: Final = 192
TIMED_STEPS: Final = 64


@dataclass(frozen=True)
class Side:
    """One model in the demo.

    Attributes:
        model: its file.
        cache_bytes_per_token: from the types of its caches.
        cache_bytes: of its buffers at the end of the generation.
        perplexity: on the held-out text, per token (a token is a byte).
        tokens_per_second: in decode behind the prompt, from the median step.
        text: its continuation.
    """

    model: Path
    cache_bytes_per_token: int
    cache_bytes: int
    perplexity: float
    tokens_per_second: float
    text: str


@dataclass(frozen=True)
class DemoReport:
    """The report of the demo.

    Attributes:
        preset: of the conversion.
        route: exporter of the model.
        model: what the model is.
        original: before.
        converted: after.
        cache_ratio: how many times smaller the caches are.
        text_tokens: tokens of the perplexity.
        context: tokens in the caches at the end of the generation.
        kl_mean: mean KL divergence on the text, in nats.
        top1_agreement: part of the positions with the same most likely token.
        greedy: where the continuations part, and whether that is a near-tie.
        prompt: the text that was continued.
    """

    preset: str
    route: str
    model: str
    original: Side
    converted: Side
    cache_ratio: float
    text_tokens: int
    context: int
    kl_mean: float
    top1_agreement: float
    greedy: GreedyFigures
    prompt: str


def demonstrate(
    folder: Path,
    *,
    route: str = "genai",
    threads: int | None = None,
    on_progress: OnProgress | None = None,
) -> DemoReport:
    """Convert the bundled model and run it before and after.

    Args:
        folder: where both models are written.
        route: exporter whose form of the model is used, ``genai`` or ``dynamo``.
        threads: threads within an operator; by default onnxruntime's choice.
        on_progress: called as each step begins and goes on.

    Raises:
        OutputExistsError: the folder holds a model already.
        LibraryError: the operator library is missing or does not fit.
    """
    from tq_onnx.conversion.pipeline import convert
    from tq_onnx.integrations.bundled import build_bundled, heldout_text
    from tq_onnx.integrations.huggingface import load_tokenizer
    from tq_onnx.measure import divergence
    from tq_onnx.runtime.opening import open_converted, open_original
    from tq_onnx.speed import timing

    tell = on_progress or silent
    tell(Progress("Building the bundled model", 0, 6))
    original = build_bundled(route, folder)
    converted = folder / f"model.{PRESET}.onnx"
    tell(Progress("Converting it", 1, 6))
    convert(original, converted, preset=PRESET)
    tell(Progress("Opening both models", 2, 6))
    words = load_tokenizer(folder)
    before = open_original(original, threads=threads)
    after = open_converted(converted, threads=threads)
    text = heldout_text()
    prompt = words.encode(_excerpt(text))
    tokens = words.encode(text)
    # It is made of more than one document: its beginning and its end are of different ones.
    tokens = tokens[: TEXT_TOKENS // 2] + tokens[-TEXT_TOKENS // 2 :]
    tell(Progress("Generating with both models", 3, 6))
    runs = [_generate(model, prompt, words) for model in (before, after)]
    speeds = timing.measure(
        (before, after),
        len(prompt),
        tokens=TIMED_STEPS,
        prompt=False,
        on_progress=on_progress,
    )
    figures = divergence.compare(
        before.decoder(),
        after.decoder(),
        tokens,
        vocabulary=before.vocabulary,
        context=CONTEXT,
        stride=CONTEXT // 2,
        on_progress=on_progress,
    )
    return _report(
        route=route,
        models=(before, after),
        runs=runs,
        speeds=speeds,
        figures=figures,
        words=words,
        prompt=prompt,
        text_tokens=len(tokens),
    )


def _excerpt(text: str) -> str:
    """Return whole words from the first paragraph in the second half of a text."""
    start = text.find("\n", len(text) * 3 // 5) + 1
    return text[start : start + PROMPT_TOKENS].rsplit(" ", 1)[0]


def _generate(model: OpenModel, prompt: list[int], words: Tokenizer) -> Generation:
    from tq_onnx.runtime.generate import generate

    fixed = len(prompt) + NEW_TOKENS if model.signature.fixed_capacity else None
    return generate(
        model.decoder(capacity=fixed), prompt, max_new_tokens=NEW_TOKENS, stop_ids=words.eos_ids
    )


def _report(
    *,
    route: str,
    models: tuple[OpenModel, OpenModel],
    runs: list[Generation],
    speeds: list[SpeedFigures],
    figures: QualityFigures,
    words: Tokenizer,
    prompt: list[int],
    text_tokens: int,
) -> DemoReport:
    from tq_onnx.measure.greedy import compare_greedy

    before, after = (
        Side(
            model=model.path,
            cache_bytes_per_token=model.signature.bytes_per_token,
            cache_bytes=run.cache_bytes,
            perplexity=perplexity,
            tokens_per_second=timing.tokens_per_second,
            text=words.decode(run.tokens),
        )
        for model, run, timing, perplexity in zip(
            models,
            runs,
            speeds,
            (figures.original_perplexity, figures.converted_perplexity),
            strict=True,
        )
    )
    original_tokens, converted_tokens = (run.tokens for run in runs)
    noise = figures.logit_rms_difference
    return DemoReport(
        preset=PRESET,
        route=route,
        model=_describe(models[1]),
        original=before,
        converted=after,
        cache_ratio=before.cache_bytes_per_token / after.cache_bytes_per_token,
        text_tokens=text_tokens,
        context=len(prompt) + NEW_TOKENS,
        kl_mean=figures.kl_mean,
        top1_agreement=figures.top1_agreement,
        greedy=compare_greedy(
            models[0].decoder(), prompt, original_tokens, converted_tokens, noise
        ),
        prompt=words.decode(prompt),
    )


def _describe(model: OpenModel) -> str:
    layers = model.plan.layers if model.plan else ()
    first = layers[0]
    return (
        f"Qwen3: {len(layers)} layers, {first.num_heads} heads, {first.kv_num_heads} KV heads of "
        f"size {first.head_size}, vocabulary of {model.vocabulary}"
    )
