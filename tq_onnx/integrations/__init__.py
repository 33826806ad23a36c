"""Connect tq-onnx with the files of other tools: model folders, tokenizers, weights."""
