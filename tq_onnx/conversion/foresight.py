"""What equalisation will find in a model that is not converted yet.

Norms are found in converted models (``tq_onnx.conversion.headnorms``), so a copy is converted, in
memory and without reading a weight. For ``inspect``, and for plans that must say beforehand which
layers get scales; scales depend on weights alone, so those that the model itself gets later are the
same.
"""

from __future__ import annotations

import onnx_ir as ir

from tq_onnx.conversion.headnorms import LayerNorms, NoNorms, find_norms
from tq_onnx.conversion.rewrite import ConvertPass
from tq_onnx.plan import Plan
from tq_onnx.recognise.match import recognise


def foresee(model: ir.Model, plan: Plan) -> tuple[LayerNorms | NoNorms, ...]:
    """The norms of all layers of an original, in the order of the plan.

    Args:
        model: the original; it is not changed.
        plan: a plan for it, of any preset; one of ``raw`` makes no rotations.

    Returns:
        norms whose nodes belong to the copy: good for ``predict`` and ``layer_scales``.
    """
    copy = model.clone()
    ConvertPass(plan, recognise(copy))(copy)
    return find_norms(copy, plan)
