"""Every operator on an Ascend NPU against the CPU operators of the same library.

    python custom_ops/cann/testing/check_operators.py

For the owner of a card, in a checkout and in the environment of docs/ascend.md. The bench does
these comparisons on its simulated device. Prints a line for each check, and exits with 1 if one
fails; a 310P refuses rows of less than 32 bytes by name.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(1, str(Path(__file__).resolve().parents[3]))

from simulated_kernels import CODECS, SIGNED4
from tests.cann.decoder_models import SHAPES, feeds_of, model_of_operator
from tests.cann.decoding import IN_PLANES, Decoding, assert_agree
from tests.cann.operators import Sizes, decoder_attention
from tests.cann.session import CANN, CannSession, on_cpu
from tq_onnx.codec.spec import Codec
from tq_onnx.runtime.library import get_library_path

TOKENS = (9, 1, 600, 1)
"""Of the calls: a prompt, a step, and behind 512 tokens keys in parts."""


def expect_on_device(session: CannSession) -> None:
    """Refuse a session that ran a node on the CPU."""
    providers = {node.provider for node in session.end()}
    assert providers == {CANN}, f"nodes ran on {', '.join(sorted(providers))}"


def decode(folder: Path, dtype: str, head_size: int, codec: Codec, planes: bool) -> None:
    """Encode and attend over growing caches."""
    sizes = Sizes(head_size, codec=codec, planes=planes)
    model = decoder_attention(dtype, head_size, codec=codec, **(IN_PLANES if planes else {}))
    decoding, past = Decoding(model, sizes, sum(TOKENS), folder), 0
    for tokens in TOKENS:
        decoding.step(sizes.vectors(tokens, dtype, past), np.array([past]))
        past += tokens
    expect_on_device(decoding.cann)


def compute(folder: Path, dtype: str, op: str, shape: tuple[int, ...]) -> None:
    """Run one of the decoder's own operators."""
    model, feeds = model_of_operator(op, dtype), feeds_of(op, dtype, shape)
    session = CannSession(model, folder, library=get_library_path())
    (ours,) = session.run(feeds)
    (theirs,) = on_cpu(model, feeds, get_library_path())
    assert_agree(ours, theirs)
    expect_on_device(session)


def checks() -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Yield the name of each check, and what raises if it does not hold."""
    for dtype in ("float32", "float16"):
        for head_size in (64, 128):
            for codec, planes in (*((codec, False) for codec in CODECS), (SIGNED4, True)):
                name = f"encode and attention: {codec}{' in planes' if planes else ''}, {head_size}"
                yield (
                    f"{name}, {dtype}",
                    partial(decode, dtype=dtype, head_size=head_size, codec=codec, planes=planes),
                )
        for op, shape in SHAPES:
            yield f"{op}: {shape}, {dtype}", partial(compute, dtype=dtype, op=op, shape=shape)


def main() -> int:
    """Run all checks, whatever becomes of the first."""
    os.environ["TQ_ONNX_PRODUCTS"] = "float"  # those with integers differ from the device's
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, check in checks():
            try:
                check(Path(folder))
            except Exception as error:
                failed += 1
                print(f"no  {name}: {' '.join(str(error).split())[:300]}", flush=True)
            else:
                print(f"yes {name}", flush=True)
    print(f"{failed} checks do not hold" if failed else "all checks hold")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
