"""Damages to converted models, each of which ``verify`` and ``report`` must find.

A damage changes a model. It raises ``NothingToDamageError`` where the model has no such part. Each
module has those of one part of a model, and adds them to a list of ``editing``.
"""
