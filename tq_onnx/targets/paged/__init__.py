"""The target ``paged``: caches in pages, and the tokens of many requests in one call.

``target.py`` is its record; ``lower.py`` is where the rewriting begins.
"""
