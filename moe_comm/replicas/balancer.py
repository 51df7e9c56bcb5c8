"""ExpertBalancer: collects loads, plans, moves weights and switches placements, layer by layer."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import operator
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from moe_comm.arguments import as_int, check_bool, check_kind, shown
from moe_comm.ep.buffer import EpBuffer
from moe_comm.ep.placement import Placement
from moe_comm.ep.planner import MOST_SCATTER, at_least_zero
from moe_comm.peers.communicator import Communicator, check_communicator, gathers
from moe_comm.peers.destroyable import Destroyable
from moe_comm.replicas.balance_plan import LayerMove, PlacedLayer, plan_moves
from moe_comm.replicas.copies import ReplicaCopies, Weights
from moe_comm.replicas.plan import plan_replicas
from moe_comm.replicas.prefetch import Prefetch
from moe_comm.replicas.slots import SlotTensors, addresses_of

_LOGGER = logging.getLogger("moe_comm")
_DIFFERENT_STEPS = "ranks are in different steps"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BalanceReport:
    """Report of a step of an `ExpertBalancer`.

    Args:
        step: Number of the step, from 1.
        is_planned: Whether it planned.
        moves: Layers whose placement it switched.
        num_waiting: Layers that later steps will switch.
        seconds: Duration of the step on this rank.
    """

    step: int
    is_planned: bool
    moves: tuple[LayerMove, ...]
    num_waiting: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class _Refresh:
    """Copies that bring the weights of a layer's kept slots to their replicas, any number of times.

    Args:
        placement: Placement that the copies are for.
        addresses: Addresses of the weights when they were prepared.
        copies: The copies; None without replicas.
    """

    placement: Placement
    addresses: list[int]
    copies: Prefetch | None


@dataclasses.dataclass
class _Layer:
    """State of one layer of the balancer."""

    buffer: EpBuffer
    weights: Weights
    bytes_per_expert: int
    num_kept_slots: int
    gradients: Callable[[], Weights] | None
    refresh: _Refresh | None = None

    @property
    def placement(self) -> Placement:
        placement = self.buffer.config.placement
        assert placement is not None  # add_layer checks it, and nothing takes it away
        return placement

    def is_refresh_late(self) -> bool:
        """Return whether slots of replicas or addresses of weights changed since the last refresh."""
        known = self.refresh
        return self.num_kept_slots > 0 and (
            known is None
            or known.placement is not self.placement
            or known.addresses != addresses_of(self.weights)
        )

    def find_gradients(self) -> Weights:
        """Return the gradients of weights that require one; zeros where `grad` is None."""
        if self.gradients is not None:
            return self.gradients()
        found = map(_gradient_of, self.weights)
        return [each for each in found if each is not None]


class ExpertBalancer(Destroyable):
    """Rearranges the experts of layers between steps, from the loads that their buffers count.

    Every `num_steps` calls of `step` all layers are planned at once, from the loads of the last
    `num_window_steps` calls. This call and later ones move the weights of a few layers each, beginning with
    the layer whose fullest rank loses most rows, and switch a layer's placement once every rank has its weights.

    Collective: every rank makes it, adds the same layers in the same order and calls `step` equally often.
    What ranks do follows from loads that all of them have; they compare it in every step.

    Args:
        communicator: Communicator of the buffers of all layers; its backend must be "host".
        num_steps: Steps between two plans, >= 1. A plan waits until the layers of the last one have moved.
        num_window_steps: Number of last steps whose loads to plan from, in [1, num_steps]; None for all since
            the last plan.
        layers_per_step: Most layers that a step moves, >= 1.
        step_bytes: Most bytes of weights that a rank receives in a step, and most that it sends, >= 1: then a
            step moves one layer or part of one. None for whole layers.
        price_per_byte: Rows, over `num_window_steps`, that each moved byte must take off the fullest rank,
            >= 0; see `plan_placement`.
        scatter: See `plan_placement`.

    Raises:
        ValueError: An argument breaks a rule, or ranks give different ones; on every rank.
        TypeError: An argument has another type, on every rank.
    """

    @gathers
    def __init__(
        self,
        communicator: Communicator,
        *,
        num_steps: int = 100,
        num_window_steps: int | None = None,
        layers_per_step: int = 4,
        step_bytes: int | None = None,
        price_per_byte: float = 0.0,
        scatter: float = 0.3,
    ) -> None:
        check_communicator(communicator)

        def check() -> str:
            self._num_steps = as_int("num_steps", num_steps, 1)
            window = num_steps if num_window_steps is None else num_window_steps
            self._num_window_steps = as_int("num_window_steps", window, 1, self._num_steps)
            self._layers_per_step = as_int("layers_per_step", layers_per_step, 1)
            self._step_bytes = None if step_bytes is None else as_int("step_bytes", step_bytes, 1)
            self._price = at_least_zero("price_per_byte", price_per_byte)
            self._scatter = at_least_zero("scatter", scatter, MOST_SCATTER)
            return (
                f"num_steps={self._num_steps}, num_window_steps={self._num_window_steps}, "
                f"layers_per_step={self._layers_per_step}, step_bytes={self._step_bytes}, "
                f"price_per_byte={self._price}, scatter={self._scatter}"
            )

        communicator.check_together(
            check, "ExpertBalancer", "ranks make different balancers of experts"
        )
        self.communicator = communicator
        self._copies = ReplicaCopies(communicator)
        self._layers: list[_Layer] = []
        self._waiting: list[LayerMove] = []
        self._moving: Prefetch | None = None
        """Prefetch of the first layer in `_waiting`; of the layer before, if it is committed."""
        self._moving_from: Placement | None = None
        self._has_stale_replicas = False
        self._are_owners_ahead = False
        """Whether an optimizer may have stepped owners since their replicas got their weights."""
        self._digested: list[Placement] = []
        self._known_digest = _digest_of([])
        self._step = 0
        self._due_step = self._num_steps
        self._is_destroyed = False
        self._report: BalanceReport | None = None
        communicator.adopt(self)

    @property
    def num_layers(self) -> int:
        """Layers that were added."""
        return len(self._layers)

    @property
    def last_report(self) -> BalanceReport | None:
        """Report of the latest step that planned or moved; None before."""
        return self._report

    @gathers
    def add_layer(
        self,
        buffer: EpBuffer,
        weights: Weights,
        *,
        num_kept_slots: int = 0,
        gradients: Callable[[], Weights] | None = None,
    ) -> int:
        """Balance the layer of a buffer, too. Collective.

        Args:
            buffer: Buffer of this communicator, with a placement that gives every rank equally many slots. It
                counts loads from now on.
            weights: Weights of the experts in this rank's slots, as `ReplicaCopies.prefetch` takes them:
                moves write them in place. What else belongs to an expert, such as an optimizer's state, moves
                where it is among them.
            num_kept_slots: The first slots of every rank, whose experts stay: together they hold every expert
                once, now and later, and an optimizer steps them alone. The others are for replicas, which have
                no state of their own. 0: any expert may move to any slot.
            gradients: Callable that returns the gradients of these weights, in the same form, for
                `reduce_gradients`. None: what is `grad` of those that require one.

        Returns:
            Its number, counted from 0.

        Raises:
            ValueError: A rule above is broken on some rank, or ranks add different layers; on every rank.
            TypeError: An argument has another type, on every rank.
        """
        bytes_per_expert = 0

        def check() -> str:
            nonlocal bytes_per_expert
            self._check_alive()
            check_kind("buffer", buffer, EpBuffer)
            placement = buffer.config.placement
            if buffer.communicator is not self.communicator:
                raise ValueError("buffer must be one of the balancer's communicator")
            if any(layer.buffer is buffer for layer in self._layers):
                raise ValueError("buffer is that of another layer already")
            if placement is None:
                raise ValueError("buffer has no placement: give it EpConfig(placement=...)")
            sizes = [*map(len, placement.slots)]
            if len({*sizes}) > 1:
                raise ValueError(f"every rank must have the same number of slots, got {sizes}")
            if as_int("num_kept_slots", num_kept_slots, 0, sizes[0]):
                placement.first_slots(num_kept_slots)
            if gradients is not None and not callable(gradients):
                raise TypeError(f"gradients must be callable, got {shown(gradients)}")
            slots = SlotTensors(weights, sizes[0], "weights")
            bytes_per_expert = sum(views[0].nbytes for views in slots.views)
            return (
                f"layer {len(self._layers)}, {slots.stated('weights')}, buffer of {placement.slots}, "
                f"num_kept_slots={num_kept_slots}"
            )

        self.communicator.check_together(
            check, "ExpertBalancer.add_layer", "ranks add different layers"
        )
        buffer.count_loads()
        self._layers.append(_Layer(buffer, weights, bytes_per_expert, num_kept_slots, gradients))
        return len(self._layers) - 1

    @gathers
    def step(self, *, rebalance: bool = False) -> None:
        """Plan where that is due, and move a few layers. Collective, once in each step of the caller.

        Call it between two steps of training: while no operation of a layer is in flight, and no forward
        waits for its backward. Ranks compare what they are about to do in one exchange.

        An error names the layer and what was going on. That layer has its old weights and placement; those
        that were switched before have their new ones, the others go on to wait. After a ValueError or
        TypeError, which every rank raises, the next call goes on. After a `PeerFailedError` or
        `PeerTimeoutError` the living call `recover`.

        Args:
            rebalance: Whether to plan now, from the loads since the last plan, and drop the moves that still
                wait.

        Raises:
            ValueError: Ranks are in different steps, ask for different things or cannot move a layer.
            TypeError: `rebalance` is not a bool.
            PeerFailedError: A rank died or left.
            PeerTimeoutError: A rank did not come.
        """
        begin = time.monotonic()
        step = self._step + 1
        planned: list[LayerMove] | None = None

        def check() -> str:
            nonlocal planned
            self._check_alive()
            check_bool("rebalance", rebalance)
            self._check_layers()
            loads: list[int] = []
            if rebalance or (step >= self._due_step and not self._waiting):
                planned, loads = self._plan()
            stated = (
                f"step {step} of {len(self._layers)} layers, rebalance={rebalance}, "
                f"placements {self._digest()}, {len(self._waiting)} to move, "
                f"gradients reduced={self._has_stale_replicas}"
            )
            if planned is not None:
                planned_digest = _digest_of([move.placement for move in planned])
                stated += f", plan of {len(planned)} moves {planned_digest} from loads of {loads} in layers"
            return stated

        with _in_phase("agreement"):
            self.communicator.check_together(check, "ExpertBalancer.step", _DIFFERENT_STEPS)
        self._step = step
        if planned is not None:
            self._abandon()
            self._waiting = planned
            self._due_step = step + self._num_steps
        if planned is not None or step == self._due_step - self._num_window_steps:
            for layer in self._layers:
                layer.buffer.count_loads()
        if self._has_stale_replicas:
            self._refresh(range(len(self._layers)))
            self._has_stale_replicas = self._are_owners_ahead = False
        if planned is None and not self._waiting:
            return
        try:
            moved = self._move_layers()
        except (ValueError, TypeError):
            self._abandon()  # on every rank: what was prepared may never fit again
            raise
        self._report = BalanceReport(
            step=step,
            is_planned=planned is not None,
            moves=tuple(moved),
            num_waiting=len(self._waiting),
            seconds=time.monotonic() - begin,
        )

    def _check_layers(self) -> None:
        """Raise ValueError if a buffer was destroyed, or the placement of a moving layer was replaced."""
        for layer_idx, layer in enumerate(self._layers):
            if layer.buffer.is_destroyed:
                raise ValueError(f"the buffer of layer {layer_idx} has been destroyed")
        moving = self._moving
        if moving is not None and not moving.is_committed:
            layer_idx = self._waiting[0].layer_idx
            found = self._layers[layer_idx].placement
            if found != self._moving_from:
                assert self._moving_from is not None
                raise ValueError(
                    f"the placement of layer {layer_idx}, which is being moved, was "
                    f"{self._moving_from.slots} and is {found.slots}"
                )

    def _plan(self) -> tuple[list[LayerMove], list[int]]:
        """Return the moves that the loads ask for, and the rows that each layer has had."""
        layers = []
        for layer_idx, layer in enumerate(self._layers):
            with _in_phase(f"layer {layer_idx}, loads"):
                loads = layer.buffer.expert_loads()
            layers.append(
                PlacedLayer(
                    placement=layer.placement,
                    bytes_per_expert=layer.bytes_per_expert,
                    loads=loads,
                    num_kept_slots=layer.num_kept_slots,
                )
            )
        moves = plan_moves(
            layers,
            ranks_per_node=self.communicator.num_local_ranks,
            price_per_byte=self._price,
            scatter=self._scatter,
        )
        return moves, [int(layer.loads.sum()) for layer in layers]

    def _move_layers(self) -> list[LayerMove]:
        """Move as many layers as a step may, and return those that have been switched."""
        moved: list[LayerMove] = []
        while self._waiting and len(moved) < self._layers_per_step:
            move = self._waiting[0]
            layer = self._layers[move.layer_idx]
            with _in_phase(move.phase("prefetch")):
                if self._moving is None or self._moving.is_committed:
                    plan = plan_replicas(
                        layer.placement, move.placement, self.communicator.num_local_ranks
                    )
                    self._moving = self._copies.prefetch(
                        plan, layer.weights, step_bytes=self._step_bytes
                    )
                    self._moving_from = layer.placement
                is_complete = self._moving.step()
            if is_complete:
                with _in_phase(move.phase("commit")):
                    self._moving.commit()
                self._switch(move)
                moved.append(move)
                if self._step_bytes is not None:  # weights may have changed on the way
                    self._refresh([move.layer_idx])
            if self._step_bytes is not None:
                break
        return moved

    def _switch(self, move: LayerMove) -> None:
        """Switch the placement of a layer whose weights every rank has. Local."""
        self._layers[move.layer_idx].buffer.switch_placement(move.placement)
        self._waiting.remove(move)
        _LOGGER.info(
            "step %d: layer %d: %d experts (%d bytes) moved, fullest rank %d -> %d rows (mean %.0f)",
            *(self._step, move.layer_idx, move.num_moves, move.moved_bytes),
            *(move.rows_before, move.rows_after, move.mean_rows),
        )

    def _refresh(self, layer_idxs: Sequence[int]) -> None:
        """Bring the weights of kept slots to their replicas. Collective.

        If the placement or the weights of a layer moved on any rank, its copies are prepared again.
        """
        if not any(self._layers[layer_idx].num_kept_slots for layer_idx in layer_idxs):
            return
        own = bytes(self._layers[layer_idx].is_refresh_late() for layer_idx in layer_idxs)
        with _in_phase("weights of replicas"):
            said = self.communicator.exchange("ExpertBalancer.step", own)
        for place, layer_idx in enumerate(layer_idxs):
            layer = self._layers[layer_idx]
            with _in_phase(f"layer {layer_idx}, weights of replicas"):
                if any(each[place] for each in said if each):
                    layer.refresh = self._prepare_refresh(layer)
                copies = None if layer.refresh is None else layer.refresh.copies
                if copies is not None:
                    copies.rewind()
                    copies.step()

    def _prepare_refresh(self, layer: _Layer) -> _Refresh:
        placement, copies = layer.placement, None
        layer.refresh = None
        addresses = addresses_of(layer.weights)
        if placement.has_replicas:
            kept = placement.first_slots(layer.num_kept_slots)
            plan = plan_replicas(kept, placement, self.communicator.num_local_ranks)
            copies = self._copies.prefetch(plan, layer.weights)
        return _Refresh(placement, addresses, copies)

    @gathers
    def reduce_gradients(self) -> None:
        """Add up the gradients of every expert's replicas, which all get the sum. Collective.

        Before the optimizer's step, which then does the same to every replica. Of the weights of all
        layers those that require a gradient take part; one that has none counts as zeros.

        In a layer with kept slots the sum goes to them, and gradients of the others become zeros: it may be
        called after each backward whose gradients are accumulated. The next `step` brings the weights of
        kept slots, which the optimizer has changed by then, to their replicas.

        Raises:
            ValueError: As `ReplicaCopies.reduce_gradients`, with the layer; or the balancer has `step_bytes`
                and a layer without kept slots, whose weights would change while they move.
            TypeError, PeerFailedError, PeerTimeoutError: As `ReplicaCopies.reduce_gradients`, with the layer.
        """
        gradients: list[Weights] = []

        def check() -> str:
            self._check_alive()
            for layer_idx, layer in enumerate(self._layers):
                if self._step_bytes is not None and not layer.num_kept_slots:
                    raise ValueError(
                        f"step_bytes = {self._step_bytes} moves a layer in several steps, between which "
                        f"training would change its weights: layer {layer_idx} has no kept slots"
                    )
                gradients.append(layer.find_gradients() if layer.placement.has_replicas else [])
            return f"layers with {[*map(len, gradients)]} tensors of gradients"

        self.communicator.check_together(check, "ExpertBalancer.reduce_gradients")
        self._has_stale_replicas = True
        for layer_idx, layer in enumerate(self._layers):
            if not gradients[layer_idx]:
                continue
            with _in_phase(f"layer {layer_idx}, gradients"):
                self._copies.reduce_gradients(layer.placement, gradients[layer_idx])
            if layer.num_kept_slots:
                num_slots = layer.placement.num_slots // layer.placement.num_ranks
                for views in SlotTensors(gradients[layer_idx], num_slots, "gradients").views:
                    for view in views[layer.num_kept_slots :]:
                        view.zero_()
        self._are_owners_ahead = True

    @gathers
    def recover(self) -> None:
        """Settle what a failed step left, and balance no more. Collective over the living.

        After `Communicator.recover`. A peer that dies while ranks agree to switch a layer may leave it
        switched on some of the living alone: then the others switch it, too. Otherwise every rank keeps
        the old placement. Where an optimizer may have stepped the experts in kept slots, replicas of the living
        get their weights now, and those of dead owners, which are behind, leave the placement.
        Experts that a dead rank alone held are lost; make buffers and a balancer of the ranks that are left.

        Raises:
            PeerFailedError: Another peer died.
            PeerTimeoutError: A living peer did not come.
        """
        self._check_alive()
        failed_ranks = self._copies.communicator.recover().failed_ranks
        state = f"{self._digest()} {self._are_owners_ahead}"
        said = self.communicator.exchange("ExpertBalancer.recover", state.encode())
        states = [each.decode().split() for each in said if each]
        if (
            len({digest for digest, _ in states}) > 1
        ):  # some have switched a layer, so all have its bytes
            assert self._moving is not None
            is_late = not self._moving.is_committed
            self._moving.commit()
            if is_late:
                self._switch(self._waiting[0])
        if any(is_ahead == str(True) for _, is_ahead in states):
            for layer in self._layers:
                layer.refresh = None  # its copies are for the dead, too
                if layer.num_kept_slots:
                    living = layer.placement.without_replicas(layer.num_kept_slots, failed_ranks)
                    layer.buffer.switch_placement(living)
            self._refresh(range(len(self._layers)))
        self.destroy()

    def _digest(self) -> str:
        """Return a short digest of all placements; worked out anew where a placement is another object."""
        placements = [layer.placement for layer in self._layers]
        known = self._digested
        if len(known) != len(placements) or any(map(operator.is_not, known, placements)):
            self._digested, self._known_digest = placements, _digest_of(placements)
        return self._known_digest

    def _abandon(self) -> None:
        moving, self._moving = self._moving, None
        if moving is not None and not moving.is_committed:
            moving.abandon()

    def _check_alive(self) -> None:
        if self._is_destroyed:
            raise ValueError("the balancer has been destroyed")

    def destroy(self) -> None:
        """Balance no more: layers stay as they are, and their loads are not counted. Local, idempotent."""
        if not self._is_destroyed:
            self._is_destroyed = True
            self._abandon()
            for layer in self._layers:
                if not layer.buffer.is_destroyed:
                    layer.buffer.count_loads(False)
            self._layers, self._waiting = [], []
            self._copies.destroy()


def _gradient_of(
    weight: torch.Tensor | Sequence[torch.Tensor],
) -> torch.Tensor | list[torch.Tensor] | None:
    """Return the gradient of a weight, or those of its parts; None if it requires none."""
    if not isinstance(weight, torch.Tensor):
        parts = [_gradient_of(part) for part in weight]
        return [part for part in parts if isinstance(part, torch.Tensor)] or None
    if weight.requires_grad and weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


def _digest_of(placements: Sequence[Placement]) -> str:
    text = ";".join(str(placement.slots) for placement in placements)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextlib.contextmanager
def _in_phase(phase: str) -> Iterator[None]:
    """Prefix the errors of a block with `phase`."""
    try:
        yield
    except Exception as error:
        error.args = (f"{phase}: {error}", *error.args[1:])
        raise
