"""Copy models in memory."""

from __future__ import annotations

import onnx_ir as ir


def copy_graph(model: ir.Model) -> ir.Model:
    """Return a model with a graph of its own; function bodies and tensors are shared with this one.

    Function bodies have more nodes than a small decoder; ``Model.clone`` copies them, too.

    Args:
        model: the model; it is not changed by changes of the copy's graph and metadata, nor by
            functions that the copy gains, loses or replaces.
    """
    return ir.Model(
        model.graph.clone(),
        ir_version=model.ir_version,
        producer_name=model.producer_name,
        producer_version=model.producer_version,
        domain=model.domain,
        model_version=model.model_version,
        doc_string=model.doc_string,
        functions=tuple(model.functions.values()),
        metadata_props=dict(model.metadata_props),
        device_configurations=model.device_configurations,
    )
