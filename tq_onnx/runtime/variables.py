"""The environment variables that tq-onnx reads: declared here once, with their meaning.

The documentation renders its table from ``VARIABLES``. The C++ library spells the names that it
reads a second time; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PACKAGE: Final = "package"
OPERATORS: Final = "operator library"


@dataclass(frozen=True)
class Variable:
    """One environment variable."""

    name: str
    values: str  #: the values that it takes, as documentation shows them
    meaning: str  #: the effect, as a sentence in Markdown
    #: the programs that read it, ``PACKAGE`` or ``OPERATORS``
    readers: tuple[str, ...] = (PACKAGE,)


LIBRARY: Final = Variable(
    "TQ_ONNX_LIBRARY",
    "a file",
    "Load this operator library instead of the one in the package.",
)
ISA: Final = Variable(
    "TQ_ONNX_ISA",
    "a name that `tq-onnx info` lists, such as `avx2` or `scalar`",
    "Run the kernels of this instruction set. The default is the best set that the processor has.",
    (OPERATORS, PACKAGE),
)
PRODUCTS: Final = Variable(
    "TQ_ONNX_PRODUCTS",
    "`8`, `float`",
    "How codes of up to 5 bits are multiplied. `8`: as integers, with queries and attention "
    "weights of 8 bits in decode steps and, up to 4 bits, 16 bits in prompts. `float`: in floating "
    "point. The default is `float` for the instruction set `scalar`, else `8`.",
    (OPERATORS, PACKAGE),
)
SKIP_BELOW: Final = Variable(
    "TQ_ONNX_SKIP_BELOW",
    "a number from 0 to below 1",
    "In decode steps of more than 4,096 tokens, skip blocks of 128 values whose attention weights "
    "are all below this fraction of the largest. The default is `1e-4`; `0` skips none.",
    (OPERATORS,),
)
CANN_KERNELS: Final = Variable(
    "TQ_ONNX_CANN_KERNELS",
    "a file",
    "Load this library of Ascend kernels. The default is the one beside the operator library.",
    (OPERATORS, PACKAGE),
)
DEBUG: Final = Variable(
    "TQ_ONNX_DEBUG",
    "`1`",
    "Print the Python traceback of an error, too.",
)

API_KEY: Final = Variable(
    "TQ_ONNX_API_KEY",
    "a text",
    "The key that clients of `tq-onnx serve` have to send. On the command line, other users of the "
    "machine could read it.",
)
VARIABLES: Final = (
    LIBRARY,
    ISA,
    PRODUCTS,
    SKIP_BELOW,
    CANN_KERNELS,
    DEBUG,
    API_KEY,
)
"""All of them, in the order of the documentation."""
