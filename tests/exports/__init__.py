"""The slow lane: the trained model by every exporter, each in its pinned environment.

Only ``pytest -m exports`` runs it. The environments are 1 GB each. They are made in the folder that
``TQ_EXPORTS_ENVIRONMENTS`` names, or else in pytest's cache, where the next run finds them.
"""
