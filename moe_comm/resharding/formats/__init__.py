"""Formats of numbers that weights have at one end of a refit, and transforms from one to another.

`number_formats` has the quantized tensors, `scaled_buffers` cuts and assembles tensors with scale
factors, `transforms` are the hooks that a plan carries, and `mxfp8_weights` converts a model whose config
asks for it. Changes tensors of this rank and hears of no other.

Knows: plan, describe.
"""
