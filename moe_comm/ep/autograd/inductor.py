"""Program order under inductor.

torch 2.13 keeps ordered effects in the graph, but files the dependency between two effectful operators
under the name of a buffer where its scheduler looks for the name of an operation, so the scheduler may
swap them. The lowerings below file it under the right name. torch 2.15 does so itself, elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch


def keep_program_order(operators: Iterable[torch._ops.OpOverload]) -> None:
    """Give inductor, once it is loaded, lowerings that keep `operators` in program order.

    Called by the fakes, which run before a graph is lowered; importing the package must not import
    inductor.
    """
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    if lowering is None:
        return
    for operator in operators:
        if operator not in lowering.lowerings:
            lowering.lowerings[operator] = _ordered(
                lowering.fallback_handler(operator, add_to_fallback_set=False)
            )


def _ordered(lower: Callable[..., Any]) -> Callable[..., Any]:
    def lower_after_previous(*args: Any, **kwargs: Any) -> Any:
        from torch._higher_order_ops.effects import _EffectType
        from torch._inductor.virtualized import V

        graph = V.graph
        num_operations = len(graph.operations)
        output = lower(*args, **kwargs)
        previous = graph.effectful_ops.get(_EffectType.ORDERED)
        if previous is not None and hasattr(graph, "additional_star_deps"):
            for operation in graph.operations[num_operations:]:
                name = operation.get_operation_name()
                graph.additional_star_deps[name].add(previous.get_name())
        return output

    return lower_after_previous
