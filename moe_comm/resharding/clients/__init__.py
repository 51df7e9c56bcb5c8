"""Weights by the official seams of frameworks, in another process than the trainer's.

`full_tensors` puts them together from what the ranks of a refit hold, some at a time; `tensor_stream` brings them
from one process to others; `trl`, `verl`, `sglang` and `miles` are what these frameworks call. `vllm` is what vLLM calls at both ends of a
refit, and `weight_sources` what its trainers have.

Knows: hold, engines, describe.
"""
