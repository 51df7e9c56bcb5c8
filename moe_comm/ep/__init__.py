"""Dispatch and combine: what users ask for, what is right, and who carries it out.

`config` and `buffer` are what users hold, `spec` says row by row what is right, `backends` move the
rows, `autograd` makes operations of them that have gradients, and `budget` says what they take.

Knows `moe_comm.peers`, and nothing of frameworks: dispatchers and compatible interfaces stand on it.
"""
