"""Convert for Ascend NPUs: a target.

- ``targets``: the row of the target ``cann``.
- ``features``: what the kernels can do; the refusals, a C++ header and a table come from it.
- ``lowering``: a decoder in operators that CANNExecutionProvider runs one by one.
"""
