"""What a cluster could do, on paper: byte formulas, a simulation of the exchange, published figures."""
