"""Convert for Ascend NPUs, and verify on one: a target and a command.

- ``targets``: the row of the target ``cann``.
- ``features``: what the kernels can do; the refusals, a C++ header and a table come from it.
- ``lowering``: a decoder in operators that CANNExecutionProvider runs one by one.
- ``verification``, ``command``: ``tq-onnx verify-on-npu``.
"""
