"""Hold the public functions, ``tq_onnx.NAME``; the commands of the same names call them.

``converting`` has ``convert`` and ``inspect``; ``calibrating`` has ``calibrate``; ``measuring`` has
``verify``, ``report`` and ``bench``; ``running`` has ``load`` and the operator library.

Paths may be ``str`` or ``Path``. The path of a model may also be a folder of onnxruntime-genai or
Hugging Face: ``convert`` and ``inspect`` take all its decoders, the others the one decoder in it.
What a function does not use is not imported: a model is converted without onnxruntime.

Every function raises ``tq_onnx.errors.UsageError`` for arguments that do not fit together, and
``ModelFileError`` for files that cannot be read or written; ``Raises`` names what else there is.
"""
