"""Convert for Ascend NPUs, and verify on one: two targets and a command.

- ``targets``: the rows of the targets ``cann`` and ``cann-graph``.
- ``features``: what the kernels can do; the refusals, a C++ header and a table come from it.
- ``lowering``: a decoder in operators that CANNExecutionProvider runs one by one.
- ``graph_mode``: a decoder as one graph of standard operators and fixed sizes.
- ``verification``, ``command``: ``tq-onnx verify-on-npu``.
"""
