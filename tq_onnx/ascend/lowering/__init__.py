"""The rest of a decoder in operators that CANNExecutionProvider runs one by one.

``target`` holds the row of the registry, ``lower`` the passes. Everything else here recognises and
replaces one part of a decoder.
"""
