"""Hold a language model in the form that programs use: text in, text out, caches that are kept.

``model`` has ``LanguageModel``, which ``tq_onnx.load`` returns; ``cache`` has ``Cache``, the tokens
that a model has read, and ``cachefile`` its file; ``chat`` has ``Chat``, turns that share a cache;
``text`` has pieces, completions and stop strings, and ``templates`` the chat templates.
"""
