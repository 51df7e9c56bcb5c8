"""Copies of experts' weights, and sums of their gradients, over the heap of a communicator."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch

from moe_comm.arguments import check_kind, shown
from moe_comm.ep.placement import Placement
from moe_comm.peers.agree import FirstError, raise_different, raise_together
from moe_comm.peers.communicator import Communicator, check_communicator, gathers
from moe_comm.peers.destroyable import Destroyable
from moe_comm.peers.gather_objects import gather_objects
from moe_comm.peers.missed_calls import tells_peers
from moe_comm.replicas.gradients import GradientReduction
from moe_comm.replicas.plan import ReplicaPlan, replicated
from moe_comm.replicas.prefetch import Prefetch
from moe_comm.replicas.slots import SlotTensors, check_step_bytes, placement_stated
from moe_comm.resharding.copy_services.batched_copy import BatchedCopy

SumTo = Literal["all", "owner"]
Weights = Sequence[torch.Tensor | Sequence[torch.Tensor]]
_ADDED_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _reject(error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell peers, who are in an exchange of the child communicator."""
    args[0].communicator.reject(error)


_tells = tells_peers(_reject)


class ReplicaCopies(Destroyable):
    """Copies weights of experts between the slots of ranks, and adds up the gradients of replicas.

    Has a child communicator of its own: its calls and those of buffers may come in any order between each
    other, and from another thread. Its own calls come in one order on all ranks, from one thread at a time.

    Collective. `destroy()` is local; the communicator's does it, too.

    Args:
        communicator: The ranks; its backend must be "host".

    Attributes:
        communicator: The child. After a failure `communicator.recover()` makes the living usable again.

    Raises:
        ValueError: The backend has no heap; on every rank.
        PeerFailedError: A peer died or left.
        PeerTimeoutError: A peer did not arrive.

    Example:
        copies = ReplicaCopies(communicator)
        plan = plan_replicas(present, wanted)
        prefetch = copies.prefetch(plan, [w13, w2], step_bytes=64 << 20)
        while not prefetch.step():
            ...  # a training step
        prefetch.commit()
        buffer.replace_placement(wanted)
    """

    @gathers
    def __init__(self, communicator: Communicator) -> None:
        check_communicator(communicator)
        if communicator.native is None and not communicator.is_destroyed:
            name = communicator.backend
            raise ValueError(
                f"backend must be 'host' to move experts: the {name} backend has no heap"
            )
        communicator.require_native()
        self.communicator = Communicator(
            communicator.bootstrap,
            parent=communicator,
            backend=communicator.backend,
            stall_timeout_s=communicator.stall_timeout_s,
            arrival_timeout_s=communicator.arrival_timeout_s,
        )
        self.engine = BatchedCopy(self.communicator)
        communicator.adopt(self)

    @_tells
    def prefetch(
        self, plan: ReplicaPlan, weights: Weights, *, step_bytes: int | None = None
    ) -> Prefetch:
        """Begin to copy what a layer needs for another placement. Collective; nothing moves yet.

        Args:
            plan: Plan, equal on every rank.
            weights: Tensors `[num_local_slots, ...]` on the CPU of any dtype and strides, in ordinary memory
                or in the heap; slots are written in place. Lists are equally long on all ranks, with the same dtypes and
                trailing shapes; a rank without slots gives tensors of 0 slots. A list of tensors in place of
                one follows each other by slots.
            step_bytes: Most bytes that a rank receives in a step, and most that it sends, as long as one row of a slot's
                first dimension has no more; None for all in one step. Equal on every rank.

        Raises:
            ValueError: Plans or weights do not fit together or differ between ranks; on every rank.
            CapacityError: A heap has no room; likewise.
            TypeError: Something has another type; likewise.
            PeerFailedError: A peer died, left or gave up.
            PeerTimeoutError: A peer did not come.
        """
        stated: dict[str, str] = {}
        found: Prefetch | None = None
        with FirstError() as first:
            check_kind("plan", plan, ReplicaPlan)
            slots = SlotTensors(weights, self._num_slots(plan.wanted), "weights")
            stated = {
                "step_bytes": str(check_step_bytes(step_bytes)),
                **placement_stated("present", plan.present),
                **placement_stated("wanted", plan.wanted),
                **slots.stated("weights"),
            }
            found = Prefetch(self, plan.moves, slots, step_bytes)
        self.agree("prefetch", first, stated)
        assert found is not None
        return found

    @_tells
    def prepare_reduction(
        self,
        placement: Placement,
        gradients: Weights,
        *,
        to: SumTo = "all",
        step_bytes: int | None = 64 << 20,
    ) -> GradientReduction:
        """Work out once how gradients of replicas are added. Collective; see `reduce_gradients`."""
        stated: dict[str, str] = {}
        found: GradientReduction | None = None
        with FirstError() as first:
            check_kind("placement", placement, Placement)
            if to not in get_args(SumTo):
                raise ValueError(f"to must be one of {get_args(SumTo)}, got {shown(to)}")
            slots = SlotTensors(gradients, self._num_slots(placement), "gradients")
            for tensor_idx, (dtype, _) in enumerate(slots.shapes):
                if dtype not in _ADDED_DTYPES:
                    raise TypeError(
                        f"gradients[{tensor_idx}] must be one of {_ADDED_DTYPES}, got {dtype}"
                    )
            stated = {
                "step_bytes": str(check_step_bytes(step_bytes)),
                "to": to,
                **placement_stated("placement's", placement),
                **slots.stated("gradients"),
            }
            found = GradientReduction(
                self, replicated(placement), slots, to_all=to == "all", step_bytes=step_bytes
            )
        self.agree("reduce_gradients", first, stated)
        assert found is not None
        return found

    @_tells
    def reduce_gradients(
        self,
        placement: Placement,
        gradients: Weights,
        *,
        to: SumTo = "all",
        step_bytes: int | None = 64 << 20,
    ) -> None:
        """Add the gradients of every expert's replicas to its owner's, in place. Collective.

        The owner is the expert's lowest slot. Replicas are added to it in the order of their slots, in
        float32 where the dtype is narrower and rounded once: the same bits from run to run.

        Args:
            placement: Placement of the slots, equal on every rank.
            gradients: Tensors `[num_local_slots, ...]`, as `prefetch` takes weights; float64, float32,
                bfloat16 or float16.
            to: Receivers of the sum: "all" slots of an expert, for an optimizer that steps every slot and so
                keeps replicas equal; or the "owner" alone, for one that steps owners. Then gradients of
                replicas are as they were, and `plan_replicas(owners_of(placement), placement)` copies the new
                weights.
            step_bytes: Most bytes of gradients that a rank receives at once, in heap memory that goes back
                afterwards, unless one row of a slot has more; None for no bound. Equal on every rank.

        Raises:
            ValueError: Placements or gradients do not fit together or differ between ranks; on every
                rank, before anything is written.
            CapacityError: A heap has no room; likewise.
            TypeError: Something has another type; likewise.
            PeerFailedError: A peer died, left or gave up. Gradients are undefined.
            PeerTimeoutError: A peer did not come, or stopped; likewise.
        """
        self.prepare_reduction(placement, gradients, to=to, step_bytes=step_bytes).run()

    def _num_slots(self, placement: Placement) -> int:
        """Slots of this rank."""
        if placement.num_ranks != self.communicator.num_ranks:
            raise ValueError(
                f"placement must have slots of {self.communicator.num_ranks} ranks, got "
                f"{placement.num_ranks}"
            )
        return len(placement.slots[self.communicator.rank_idx])

    def agree(self, call: str, first: FirstError, stated: dict[str, str]) -> None:
        """Raise on every rank what is wrong on any, or stated differently. Collective.

        Args:
            call: Name of the call that ranks are in.
            first: First error on this rank, if any.
            stated: Values that must be equal on all ranks, by name.
        """
        own = first.take()
        try:
            exchange = functools.partial(self.communicator.exchange, call)
            said = gather_objects(exchange, (own, None if own is not None else stated))
            raise_together([None if each is None else each[0] for each in said], own)
            raise_different(
                f"ranks differ in {call}", [None if each is None else each[1] for each in said]
            )
        finally:
            del own

    def destroy(self) -> None:
        """Give the memory back. Local, idempotent."""
        self.communicator.destroy()
