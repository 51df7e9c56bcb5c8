"""Ranks that know one another: how they meet, what they share, how they leave and come back.

`Communicator` is what users hold. Below it lie the process group or threads that ranks come from, the
rendezvous through which they meet, the layout of nodes, the choice of a backend and of a GPU, and who
survives when a rank is lost.

Knows nothing of tokens and experts: `moe_comm.ep` and `moe_comm.resharding` stand on it.
"""
