"""The benchmark of weights that move between two layouts."""
