"""The rest of a decoder in operators that CANNExecutionProvider runs one by one.

``decoder`` holds the passes, ``claims`` what the provider runs. Everything else here recognises and
replaces one part of a decoder.
"""
