"""`deep_ep.buffers`: where DeepEP's main branch has its classes."""
