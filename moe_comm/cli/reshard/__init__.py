"""Computations and output of `moe-comm reshard`."""
