"""Inference engines as targets of a refit: where an engine takes weights, and how a whole version reaches it.

Knows: move, describe.
"""
