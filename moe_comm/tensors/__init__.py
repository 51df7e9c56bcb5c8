"""Work of one rank on tensors by itself: formats of numbers, their arithmetic, and overlaps of memory.

`quantization` says which formats there are and `quantized` makes them in plain torch; `arithmetic` rounds
and sums as kernels do; `memory_overlap` says whether tensors share memory. Knows torch alone: exchanges,
resharding and Triton's kernels stand on it.
"""
