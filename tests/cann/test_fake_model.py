"""The bundled Qwen3 as it was exported, not converted, in the real wheel on the fake runtime.

Not what a converted model does: its nodes scatter over both providers. It shows that the operators
of the fake runtime, in hundreds of nodes between as many copies, agree with the CPU provider's.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import pytest

from tests.cann.fake_acl import FakeAcl
from tests.cann.session import CANN, CPU, Array, CannSession, on_cpu
from tq_onnx.integrations.bundled import build_bundled

pytestmark = pytest.mark.cann

TOKENS, PAST = 5, 4


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> onnx.ModelProto:
    return onnx.load(build_bundled("dynamo", tmp_path_factory.mktemp("exported")))


@pytest.fixture(scope="module")
def feeds(exported: onnx.ModelProto) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    given: dict[str, Array] = {
        "input_ids": rng.integers(0, 100, (1, TOKENS)),
        "attention_mask": np.ones((1, TOKENS + PAST), np.int64),
        "position_ids": np.arange(PAST, PAST + TOKENS)[None],
    }
    for value in exported.graph.input:
        if value.name not in given:
            _, heads, _, size = (dim.dim_value for dim in value.type.tensor_type.shape.dim)
            given[value.name] = rng.standard_normal((1, heads, PAST, size)).astype(np.float32)
    return given


def with_rope_as_a_product_of_matrices(exported: onnx.ModelProto) -> bytes:
    """Positions times frequencies broadcasts both operands, which the provider computes wrongly.

    [1,T,1] times [D/2] is [1,T,1] @ [1,D/2].
    """
    model = onnx.ModelProto()
    model.CopyFrom(exported)
    (frequencies,) = (w for w in model.graph.initializer if w.name.endswith("inv_freq"))
    row = onnx.numpy_helper.to_array(frequencies).reshape(1, -1)
    (user,) = (node for node in model.graph.node if frequencies.name in node.input)
    assert user.op_type == "Mul"
    assert user.input[1] == frequencies.name
    user.op_type = "MatMul"
    frequencies.CopyFrom(onnx.numpy_helper.from_array(row, frequencies.name))
    del model.graph.value_info[:]
    return model.SerializeToString()


@pytest.mark.parametrize("delay", [0, 300])
def test_all_outputs_agree(
    fake: FakeAcl,
    exported: onnx.ModelProto,
    feeds: dict[str, Array],
    tmp_path: Path,
    delay: int,
) -> None:
    model = with_rope_as_a_product_of_matrices(exported)
    session = CannSession(model, tmp_path)
    fake.set_delay(delay)
    for ours, theirs in zip(session.run(feeds), on_cpu(model, feeds), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    assert {node.provider for node in session.end()} == {CANN, CPU}


def test_as_exported_it_is_wrong(
    fake: FakeAcl, exported: onnx.ModelProto, feeds: dict[str, Array], tmp_path: Path
) -> None:
    """Silently: no error, no violation. This is what ``--target cann`` must take care of."""
    model = exported.SerializeToString()
    logits = CannSession(model, tmp_path).run(feeds)[0]
    assert np.abs(logits - on_cpu(model, feeds)[0]).max() > 1
