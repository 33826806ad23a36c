"""Open a model, and give onnxruntime the operator library."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tq_onnx.api.arguments import AnyPath, at_least, path_of, provider_of
from tq_onnx.plan import CPU
from tq_onnx.runtime import arguments

if TYPE_CHECKING:
    from tq_onnx.language.model import LanguageModel
    from tq_onnx.language.promptstore import PromptStore


def load(
    path: AnyPath,
    *,
    context: int | None = None,
    tokenizer: AnyPath | None = None,
    library: bool = True,
    threads: int | None = None,
    ep: str = CPU,
    prompt_store: PromptStore | None = None,
) -> LanguageModel:
    """Open an original or a converted model, ready to run.

    Args:
        path: the model, or a folder with one decoder.
        context: tokens that each cache holds, updated in place; None for caches that grow, or for
            the room that the graph gives them.
        tokenizer: the folder of the tokenizer; None for the model's own.
        library: whether a converted model runs on the kernels of the operator library; if not, on
            its function bodies.
        threads: threads within an operator; by default onnxruntime's choice.
        ep: execution provider that must run all of it, a name in ``tq_onnx.runtime.providers``.
        prompt_store: where texts and conversations find what was read of a prompt before, and keep
            it; None for nowhere.

    Returns:
        The model: ``generate``, ``stream`` and ``chat`` give texts, ``new_cache`` a cache to keep,
        ``decoder`` logits, ``session`` the onnxruntime session and ``plan`` the conversion.

    Raises:
        UnsupportedModelError: it is no decoder that tq-onnx can run, or not all on the provider, or
            a context was asked of a model whose caches can only grow, or a ``prompt_store`` is
            given and the model does not read prompts call by call.
        LibraryError: the operator library is missing or does not fit.
    """
    at_least(1, context=context)
    threads = arguments.thread_count(threads)
    from tq_onnx.integrations.folder import find_model
    from tq_onnx.language.model import LanguageModel
    from tq_onnx.runtime.opening import open_model

    folder: Path | None = None if tokenizer is None else path_of(tokenizer)
    opened = open_model(
        find_model(path_of(path)), library=library, threads=threads, ep=provider_of(ep)
    )
    opened.refuse_encoder()
    return LanguageModel(opened, context=context, tokenizer=folder, prompt_store=prompt_store)


def session_options() -> Any:
    """Return session options with the operator library registered.

    Returns:
        An ``onnxruntime.SessionOptions``, with which ``onnxruntime.InferenceSession`` runs a
        converted model on the kernels.

    Raises:
        LibraryError: the library is missing, does not fit, or onnxruntime does not accept it.
    """
    from tq_onnx.runtime.session import registered_options

    return registered_options()


def register(session_options: Any) -> None:
    """Register the operator library, so that onnxruntime runs converted models on its kernels.

    Args:
        session_options: an ``onnxruntime.SessionOptions``.

    Raises:
        LibraryError: the library is missing, does not fit, or onnxruntime does not accept it.
    """
    from tq_onnx.runtime.session import register_library

    register_library(session_options)


def library_path() -> str:
    """Return the path of the operator library.

    Returns:
        The path, as ``SessionOptions.register_custom_ops_library`` takes it; from the environment
        variable ``TQ_ONNX_LIBRARY`` if it is set. ``register`` also checks that the library fits.

    Raises:
        LibraryError: there is no such file.
    """
    from tq_onnx.runtime import library

    return str(library.get_library_path())


def get_library_path() -> str:
    """Return the path of the operator library; the same name as in onnxruntime-extensions.

    Returns:
        The same as ``library_path``.

    Raises:
        LibraryError: there is no such file.
    """
    return library_path()
