"""A plan is run: sources are read, a copy service moves pieces, destinations are written.

`execution` does so, `sources` makes tensors ready to be sent, `stale` marks a model that was left neither
old nor new, and `weak_cache` has what runs again while the models that it is for live. Bytes travel by
the services of `copy_services`.

Knows: copy_services, formats, plan, describe.
"""
