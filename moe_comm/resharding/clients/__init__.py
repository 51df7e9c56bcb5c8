"""Weights for those who take full tensors by name, in another process than the trainer's.

`full_tensors` puts them together from what the ranks of a refit hold, some at a time; `tensor_stream` brings them
from one process to others; `trl` and `verl` are what these frameworks call.

Knows: hold, describe.
"""
