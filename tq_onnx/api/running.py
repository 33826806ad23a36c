"""Open a model, and give onnxruntime the operator library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tq_onnx.api.arguments import AnyPath, at_least, path_of, provider_of
from tq_onnx.plan import CPU

if TYPE_CHECKING:
    from tq_onnx.runtime.model import OpenModel


def load(
    path: AnyPath, *, library: bool = True, threads: int | None = None, ep: str = CPU
) -> OpenModel:
    """Open an original or a converted model, ready to run.

    Args:
        path: the model, or a folder with one decoder.
        library: whether a converted model runs on the kernels of the operator library; if not, on
            its function bodies.
        threads: threads within an operator; by default onnxruntime's choice.
        ep: execution provider that must run all of it, a name in ``tq_onnx.runtime.providers``.

    Returns:
        The model; ``decoder()`` gives a decoder with empty caches, ``session`` the onnxruntime
        session and ``plan`` the conversion.

    Raises:
        UnsupportedModelError: it is no decoder that tq-onnx can run, or not all on the provider.
        LibraryError: the operator library is missing or does not fit.
    """
    at_least(1, threads=threads)
    from tq_onnx.integrations.folder import find_model
    from tq_onnx.runtime.model import open_model

    return open_model(
        find_model(path_of(path)), library=library, threads=threads, ep=provider_of(ep)
    )


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
    """Return the path of the operator library, by the name that onnxruntime-extensions has for it.

    Returns:
        The same as ``library_path``.

    Raises:
        LibraryError: there is no such file.
    """
    return library_path()
