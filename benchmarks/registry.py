"""Which contenders there are, by the names that tables and ``--peers`` use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

OURS = "tq-onnx"
YARDSTICK = "ort gqa float32"
GQA = "ort gqa"
MATMUL = "ort matmul"
TURNING = " turning"
"""Behind the name of a contender that is compared with the one before."""


@dataclass(frozen=True)
class Named:
    """How a contender is made.

    Attributes:
        name: in tables.
        module: of the class.
        kind: the class.
        arguments: of its constructor.
        environment: what its process gets besides our own.
        prefill: whether it takes part in prefill.
        decode: whether it takes part in decode.
    """

    name: str
    module: str
    kind: str
    arguments: dict[str, object] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    prefill: bool = False
    decode: bool = True

    @property
    def family(self) -> str:
        """The first word of the name: what ``--peer-python`` calls it."""
        return self.name.split()[0]


def _gqa(cache: str, *, per_channel: bool = False, prefill: bool = False) -> Named:
    name = f"{GQA} {cache}{' per channel' if per_channel else ''}"
    arguments: dict[str, object] = {"cache": cache, "per_channel": per_channel}
    return Named(name, "peers_ort", "GroupQueryAttention", arguments, prefill=prefill)


PEERS: tuple[Named, ...] = (
    _gqa("float32", prefill=True),
    _gqa("float16", prefill=True),
    _gqa("int8", prefill=True),
    Named(
        f"{GQA} int8 vnni",
        "peers_ort",
        "GroupQueryAttention",
        {"cache": "int8"},
        # Quantises the query, too; read when the process starts.
        {"ORT_MLAS_QKGEMM_S8_APPROX_VNNI": "1"},
    ),
    _gqa("int8", per_channel=True),
    _gqa("int4"),
    _gqa("int4", per_channel=True),
    Named("ort attention", "peers_ort", "Attention"),
    Named(MATMUL, "peers_ort", "MatMul", prefill=True, decode=False),
    *(
        Named(f"torch sdpa {dtype}", "peers_torch", "Sdpa", {"dtype": dtype})
        for dtype in ("float32", "bfloat16")
    ),
    *(
        Named(f"openvino {cache}", "peers_openvino", "OpenVino", {"cache": cache})
        for cache in ("f16", "u8", "u4", "tbq4", "tbq3")
    ),
    *(
        Named(f"llama.cpp {cache}", "peers_llama", "FlashAttention", {"cache": cache})
        for cache in ("f16", "q8_0", "q4_0")
    ),
)


def ours(
    presets: Sequence[str],
    products: Sequence[str] = (),
    windows: Sequence[tuple[int, int]] = (),
    libraries: Mapping[str, str] = MappingProxyType({}),
    pages: Sequence[int] = (),
    *,
    turning: bool = False,
) -> list[Named]:
    """Our contenders.

    Args:
        presets: their names.
        products: each preset with each of these; those of the level without any.
        windows: each with each of these, newest and first tokens that are exact; none without any.
        libraries: each with each of these operator libraries, paths by their labels; that of the
            package without any.
        pages: each preset again with caches in pages of so many tokens.
        turning: each again with offsets, those of keys turning; not those with pages.
    """
    kinds: list[tuple[str, dict[str, str]]] = [("", {})]
    if products:
        kinds = [(f" products {kind}", {"TQ_ONNX_PRODUCTS": kind}) for kind in products]
    if libraries:
        kinds = [
            (f"{label} {library}", {**environment, "TQ_ONNX_LIBRARY": path})
            for label, environment in kinds
            for library, path in libraries.items()
        ]
    paged = [
        Named(
            f"{OURS} {preset} pages of {slots}{label}",
            "peers_turboquant",
            "PagedTurboQuant",
            {"preset": preset, "slots": slots},
            environment,
            prefill=True,
        )
        for preset in presets
        for slots in pages
        for label, environment in kinds
    ]
    return paged + [
        Named(
            f"{OURS} {preset}{f' window {recent}+{sinks}' if recent or sinks else ''}{label}"
            f"{suffix}",
            "peers_turboquant",
            "TurboQuant",
            {"preset": preset, "recent": recent, "sinks": sinks, "turning": bool(suffix)},
            environment,
            prefill=True,
        )
        for preset in presets
        for recent, sinks in windows or [(0, 0)]
        for label, environment in kinds
        for suffix in (("", TURNING) if turning else ("",))
    ]
