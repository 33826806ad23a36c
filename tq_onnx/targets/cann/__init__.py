"""The rest of a decoder in operators that CANNExecutionProvider runs one by one.

``lower`` is the way in; it takes a model that ``ConvertPass`` has converted. Everything else here
recognises and replaces one part of a decoder.
"""
