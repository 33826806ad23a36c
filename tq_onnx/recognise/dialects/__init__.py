"""The forms that exporters give to cached attention: one file each.

A module of this package that defines ``DIALECT`` (see ``site.Dialect``) is a dialect; it is found
by being here, so that adding one adds a file and a fixture and changes nothing else.
"""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module

from tq_onnx.recognise.site import Dialect


@cache
def dialects() -> tuple[Dialect, ...]:
    """Return all dialects, in the order of their module names."""
    modules = (
        import_module(f"{__name__}.{entry.name}")
        for entry in sorted(pkgutil.iter_modules(__path__), key=lambda entry: entry.name)
    )
    return tuple(module.DIALECT for module in modules if hasattr(module, "DIALECT"))
