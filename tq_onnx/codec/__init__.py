"""Define the codec: row layouts, codebooks, rotations, the numpy reference. No ONNX."""
