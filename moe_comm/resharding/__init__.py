"""Resharding: the weights of a model from one parallel layout to another."""
