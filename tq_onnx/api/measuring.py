"""Compare a model with its conversion: checks, quality, speed."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING

from tq_onnx.api.arguments import AnyPath, at_least, path_of, provider_of
from tq_onnx.codec.presets import DEFAULT_PRESET
from tq_onnx.errors import UsageError
from tq_onnx.plan import CPU
from tq_onnx.runtime import arguments

if TYPE_CHECKING:
    from tq_onnx.progress import OnProgress
    from tq_onnx.quality.figures import ComparisonReport
    from tq_onnx.speed.bench import SpeedReport
    from tq_onnx.verification.findings import VerifyReport


def verify(
    original: AnyPath,
    converted: AnyPath,
    *,
    text: AnyPath | None = None,
    tokens: int | Sequence[int] = 2048,
    tokenizer: AnyPath | None = None,
    new_tokens: int = 32,
    context: int = 512,
    library: bool = True,
    threads: int | None = None,
    ep: str = CPU,
    quick: bool = False,
    on_progress: OnProgress | None = None,
) -> VerifyReport:
    """Compare a converted model with its original.

    Args:
        original: the original model.
        converted: its conversion.
        text: UTF-8 text to read; by default the held-out text of the bundled model, or
            pseudo-random ids where the model has no tokenizer.
        tokens: how many tokens of the text to compare, or their ids, with no text.
        tokenizer: folder with ``tokenizer.json``; by default the tokenizer of a model.
        new_tokens: greedy tokens to generate with each model.
        context: tokens per window of the perplexity.
        library: whether to check the kernels of the operator library too; if not, only the
            function bodies run.
        threads: threads within an operator; by default onnxruntime's choice.
        ep: execution provider that must run all of the converted model, a name in
            ``tq_onnx.runtime.providers``.
        quick: whether what takes long is left out: seconds in place of minutes. ``left_out`` of the
            report says what that is.
        on_progress: called as each step begins and goes on.

    Returns:
        All checks and measurements; ``holds`` is the verdict.

    Raises:
        VerificationError: the converted model was not made from this original.
        UnsupportedModelError: a model cannot be run or compared.
        LibraryError: the operator library is missing or does not fit.
    """
    at_least(1, new_tokens=new_tokens, context=context, tokens=_count(tokens))
    threads = arguments.thread_count(threads)
    from tq_onnx.integrations.folder import find_model
    from tq_onnx.integrations.tokens import model_tokens
    from tq_onnx.verification import verify as room

    models = find_model(path_of(original)), find_model(path_of(converted))
    ids, source = model_tokens(models, path_of(text), tokens, path_of(tokenizer))
    return room.verify(
        *models,
        ids,
        source=source,
        new_tokens=new_tokens,
        context=context,
        library=library,
        threads=threads,
        ep=provider_of(ep),
        quick=quick,
        is_named=text is not None or _count(tokens) is None,
        on_progress=on_progress,
    )


def report(
    original: AnyPath,
    converted: AnyPath | Sequence[AnyPath],
    *,
    text: AnyPath | None = None,
    tokens: int | Sequence[int] = 6144,
    context: int = 1024,
    stride: int | None = None,
    tokenizer: AnyPath | None = None,
    threads: int | None = None,
    library: bool = True,
    picture: AnyPath | None = None,
    on_progress: OnProgress | None = None,
) -> ComparisonReport:
    """Measure how much quality conversions of a model lose.

    Args:
        original: the original model.
        converted: a conversion of it, or several.
        text: UTF-8 text to read; by default as for ``verify``.
        tokens: how many tokens of the text to read, or their ids, with no text.
        context: tokens per window; each begins with empty caches.
        stride: tokens by which windows advance; by default they do not overlap, and every
            prediction inside them counts.
        tokenizer: folder with ``tokenizer.json``; by default the tokenizer of a model.
        threads: threads within an operator; by default onnxruntime's choice.
        library: whether the kernels of the operator library run; if not, the function bodies.
        picture: a .png or .svg file to draw; needs matplotlib.
        on_progress: called as each step begins and goes on.

    Returns:
        Perplexity, KL divergence, agreement and cache bytes of each model, and the errors of its
        layers.

    Raises:
        VerificationError: a converted model was not made from this original.
        UnsupportedModelError: a model cannot be run.
        LibraryError: the operator library is missing or does not fit.
    """
    at_least(1, stride=stride, context=context, tokens=_count(tokens))
    threads = arguments.thread_count(threads)
    from tq_onnx.integrations.folder import find_model
    from tq_onnx.integrations.tokens import model_tokens
    from tq_onnx.quality.picture import check_picture, draw_quality
    from tq_onnx.quality.report import report as run

    drawn = path_of(picture)
    if drawn is not None:
        check_picture(drawn)
    paths = [converted] if isinstance(converted, str | PathLike) else converted
    if not paths:
        raise UsageError("there is no converted model to compare", fix="give one or more")
    before, *after = (find_model(path_of(path)) for path in (original, *paths))
    ids, source = model_tokens((before, *after), path_of(text), tokens, path_of(tokenizer))
    comparison = run(
        before,
        after,
        ids,
        source=source,
        context=context,
        stride=stride,
        library=library,
        threads=threads,
        on_progress=on_progress,
    )
    if drawn is not None:
        draw_quality(comparison, drawn)
    return comparison


def bench(
    original: AnyPath,
    converted: AnyPath | None = None,
    *,
    contexts: Sequence[int] | None = None,
    tokens: int = 32,
    prompt_limit: int = 4096,
    preset: str | None = None,
    threads: int | None = None,
    library: bool = True,
    picture: AnyPath | None = None,
    on_progress: OnProgress | None = None,
) -> SpeedReport:
    """Measure how fast a model is before and after its conversion.

    Args:
        original: the original model.
        converted: its conversion; by default it is converted in memory.
        contexts: tokens in the caches when decode begins; by default 1024, 4096 and 16384, as
            far as the model and the memory allow.
        tokens: decode steps to time, for each model and context.
        prompt_limit: the longest context in tokens that is read as a prompt, which gives the time
            to the first token; longer ones are filled with copies of the rows of a short prompt.
        preset: of the conversion in memory.
        threads: threads within an operator; by default onnxruntime's choice.
        library: whether the kernels of the operator library run; if not, the function bodies.
        picture: a .png or .svg file to draw; needs matplotlib.
        on_progress: called as each step begins and goes on.

    Returns:
        Tokens per second, seconds to the first token, cache bytes and floors at each context.

    Raises:
        VerificationError: the converted model was not made from this original.
        UnsupportedModelError: a model cannot be run, or cannot decode.
        LibraryError: the operator library is missing or does not fit.
    """
    at_least(1, tokens=tokens)
    at_least(0, prompt_limit=prompt_limit)
    threads = arguments.thread_count(threads)
    at_least(1, **{f"contexts[{index}]": size for index, size in enumerate(contexts or ())})
    if converted is not None and preset is not None:
        raise UsageError(
            "`preset` says how to convert, and a converted model was given",
            fix="leave one of them out",
        )
    from tq_onnx.integrations.folder import find_model
    from tq_onnx.quality.picture import check_picture, draw_speed
    from tq_onnx.speed.bench import bench as run

    drawn = path_of(picture)
    if drawn is not None:
        check_picture(drawn)
    speeds = run(
        find_model(path_of(original)),
        None if converted is None else find_model(path_of(converted)),
        preset=preset or DEFAULT_PRESET,
        contexts=contexts,
        tokens=tokens,
        prompt_limit=prompt_limit,
        library=library,
        threads=threads,
        on_progress=on_progress,
    )
    if drawn is not None:
        draw_speed(speeds, drawn)
    return speeds


def _count(tokens: int | Sequence[int]) -> int | None:
    """Return a number of tokens; None for their ids."""
    return None if hasattr(tokens, "__len__") else tokens
