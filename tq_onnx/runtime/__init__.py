"""Run models: sessions, caches, decoding. Only this room imports onnxruntime."""
