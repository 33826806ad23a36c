"""Running models: sessions, caches, decoding. The only room that imports onnxruntime."""
