"""Routing maps and dense probabilities, for dispatchers of your own; see `moe_comm.ep.routing_map`."""

from moe_comm.ep.routing_map import dense_of_topk, routing_map_of_topk, topk_of_routing_map

__all__ = ["dense_of_topk", "routing_map_of_topk", "topk_of_routing_map"]
