"""Model of a cluster on paper: byte formulas, a simulation of the exchange, published figures."""
