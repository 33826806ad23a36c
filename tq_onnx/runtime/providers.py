"""Execution providers: what ONNX Runtime must be told to run a model on one of them.

ONNX Runtime gives a session of the CPU, with no more than a warning, where it cannot load the
provider that was asked for, and runs single nodes on the CPU that a provider does not claim.
``make_session`` refuses the first; ``tq_onnx.runtime.placement`` finds the second. Whatever is
particular to a provider is in its row here, what it says when it fails among it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from tq_onnx import plan
from tq_onnx.runtime.variables import CANN_KERNELS


@dataclass(frozen=True)
class ExecutionProvider:
    """A place where sessions run."""

    name: str  #: as users name it
    provider: str  #: as ONNX Runtime names it
    package: str  #: of an ONNX Runtime that has it
    export: str  #: what to do about a graph that it does not run
    options: Mapping[str, str] = field(default_factory=dict)  #: what it is created with
    #: rewrites of ONNX Runtime that make nodes which it does not run
    disabled_optimizers: tuple[str, ...] = ()
    device: str = "cpu"  #: of the ``OrtValue`` that its nodes read and write
    #: the oldest ONNX Runtime that records which nodes it runs; empty where that does not matter
    oldest: str = ""
    #: part of ONNX Runtime's message where the provider cannot be created; empty for none, as in
    #: the next two
    not_created: str = ""
    failed: str = ""  #: part of the message where the device or its libraries fail
    advised: str = ""  #: part of a message that itself says what to do

    @property
    def has_own_memory(self) -> bool:
        """True if what its nodes read has to be copied to a device."""
        return self.device != "cpu"


CPU: Final = ExecutionProvider(
    name=plan.CPU,
    provider="CPUExecutionProvider",
    package="onnxruntime",
    export="if it was exported for a GPU, export it for the CPU",
)
CANN: Final = ExecutionProvider(
    name="cann",
    provider="CANNExecutionProvider",
    package="onnxruntime-cann",
    export='convert the original with `target="cann"`',
    # One operator at a time, because a compiled graph takes no custom operator; and no copies of
    # graphs in the working directory, where it leaves them by default.
    options=MappingProxyType({"enable_cann_graph": "0", "dump_om_model": "0"}),
    # It makes Gemm of MatMul and Add, and the provider has none.
    disabled_optimizers=("MatMulAddFusion",),
    device="cann",
    oldest="1.24",
    not_created="create CANN ExecutionProvider",
    failed="CANN failure",
    advised=CANN_KERNELS.name,
)

PROVIDERS: Final[Mapping[str, ExecutionProvider]] = MappingProxyType(
    {provider.name: provider for provider in (CPU, CANN)}
)


def provider_of(session: Any) -> ExecutionProvider:
    """Return the provider that a session of ``make_session`` was opened for."""
    first = session.get_providers()[0]
    return next((each for each in PROVIDERS.values() if each.provider == first), CPU)
