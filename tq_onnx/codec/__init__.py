"""The codec: row layouts, codebooks, rotations and the numpy oracle; knows nothing of ONNX."""
