"""Checksums of what transforms wrote: the target's storage, in its own layout, against its sources."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_comm.resharding import (
    CheckpointView,
    CheckpointViews,
    ReshardTransform,
    SymmetricCopyService,
    is_stale,
    place_in_heap,
    refit,
)
from moe_comm.resharding.describe.intervals import whole
from moe_comm.resharding.describe.parallelism import Parallelism
from moe_comm.resharding.formats import scaled_buffers, transforms
from moe_comm.resharding.formats.number_formats import (
    FP8BlockTensor,
    MXFP8Tensor,
)
from moe_comm.resharding.formats.transforms import FP8BlockReshardTransform, MXFP8ReshardTransform
from moe_comm.resharding.hold import refit_pass
from moe_comm.resharding.hold.deltas import Deltas
from moe_comm.resharding.hold.verification import RefitProof, verify_refit
from moe_comm.resharding.plan.transfer_op import TransferOp
from moe_comm.tensors.quantization import ScaleFormat
from moe_comm.testing import RankContext
from tests.helpers.sharded_nets import ShardedNet
from tests.helpers.threaded_refits import error_of, swap, threads

# Halves and quarters end within blocks, and so do the tensors.
SHAPES = {"up": ((320, 192), 0), "down": ((96, 320), 1), "norm": ((8,), None)}
QUANTIZED = {"up", "down"}


pytestmark = pytest.mark.usefixtures("no_refit_caches")


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> list[RefitProof]:
    """Proofs of every rank from here on."""
    made: list[RefitProof] = []
    verify = refit_pass.prove_refit

    def kept(*args: Any, **options: Any) -> RefitProof:
        made.append(verify(*args, **options))
        return made[-1]

    monkeypatch.setattr(refit_pass, "prove_refit", kept)
    return made


class Format:
    """A format of targets: what holds them, and the transforms of both ends."""

    has_sender = True

    def hold(self, shape: tuple[int, ...]) -> Any:
        raise NotImplementedError

    def transform(self, buffers: dict[str, Any]) -> Any:
        raise NotImplementedError


class Fp8(Format):
    def __init__(
        self, block: tuple[int, int], scale_format: ScaleFormat, quantize_on_send: bool
    ) -> None:
        self.options: Any = {
            "block": block,
            "scale_format": scale_format,
            "quantize_on_send": quantize_on_send,
        }

    def hold(self, shape: tuple[int, ...]) -> FP8BlockTensor:
        return FP8BlockTensor.empty(shape, self.options["block"])

    def transform(self, buffers: dict[str, Any]) -> FP8BlockReshardTransform:
        return FP8BlockReshardTransform(QUANTIZED, buffers, **self.options)


class Mxfp8(Format):
    def __init__(self, is_swizzled: bool, convert_on_send: bool, has_sender: bool = True) -> None:
        self.is_swizzled = is_swizzled
        self.convert_on_send = convert_on_send
        self.has_sender = has_sender

    def hold(self, shape: tuple[int, ...]) -> MXFP8Tensor:
        return MXFP8Tensor.from_bf16(
            torch.zeros(shape).bfloat16(), backend="triton", is_swizzled=self.is_swizzled
        )

    def transform(self, buffers: dict[str, Any]) -> MXFP8ReshardTransform:
        return MXFP8ReshardTransform(
            QUANTIZED, buffers, convert_on_send=self.convert_on_send, backend="triton"
        )


FORMATS: dict[str, Format] = {
    "blocks": Fp8((128, 128), ScaleFormat.FLOAT32, True),
    "blocks-late": Fp8((128, 128), ScaleFormat.FLOAT32_POWER_OF_2, False),
    "rows": Fp8((1, 128), ScaleFormat.FLOAT32, True),
    "mxfp8": Mxfp8(False, True),
    "mxfp8-late": Mxfp8(False, False),
    "mxfp8-swizzled": Mxfp8(True, False),
    "mxfp8-alone": Mxfp8(True, False, has_sender=False),
}


class Engine:
    """Sources on all ranks and quantized targets on all ranks."""

    def __init__(
        self, context: RankContext, src: str, dst: str, held: Format, dtype: torch.dtype
    ) -> None:
        self.context = context
        num_ranks, rank = context.num_ranks, context.rank_idx
        self.source = ShardedNet(Parallelism.parse(src, num_ranks), rank, SHAPES, dtype=dtype)
        self.target = ShardedNet(Parallelism.parse(dst, num_ranks), rank, SHAPES)
        refit.prepare_swap_model_weights(self.source, self.target, group=context.group)
        self.buffers = {
            name: held.hold(tuple(self.target.get_parameter(name).shape)) for name in QUANTIZED
        }
        for name in QUANTIZED:
            delattr(self.target, name)
        self.transform = held.transform(self.buffers)

    def run(self, seed: int, **options: Any) -> None:
        swap(
            self.context,
            self.source.fill(seed),
            self.target,
            transform=self.transform,
            verify="checksum",
            **options,
        )

    def num_bytes(self) -> int:
        tensors = [self.target.norm]
        tensors += [t for held in self.buffers.values() for t in (held.data, held.scale)]
        return sum(tensor.nbytes for tensor in tensors)


WAYS = [("tp2", "single", 2), ("single", "tp2", 2), ("tp2", "tp2", 2), ("tp4", "tp2", 4)]


@pytest.mark.parametrize(("src", "dst", "num_ranks"), WAYS)
@pytest.mark.parametrize("name", FORMATS)
def test_quantized_targets_are_proven(
    name: str, src: str, dst: str, num_ranks: int, proofs: list[RefitProof]
) -> None:
    dtype = torch.float32 if name == "blocks" else torch.bfloat16

    def rank(context: RankContext) -> int:
        engine = Engine(context, src, dst, FORMATS[name], dtype)
        engine.run(0)
        engine.run(1)
        return engine.num_bytes()

    sizes = threads(rank, num_ranks)
    assert [proof.unproven for proof in proofs] == [()] * 2 * num_ranks
    if "swizzled" not in name and "alone" not in name:  # of which rows and columns are padded
        # Scale factors of blocks that several pieces share are compared with each of these.
        assert all(proof.num_bytes >= min(sizes) for proof in proofs)


def test_senders_without_the_transform_prove_what_receivers_quantize() -> None:
    """Sources and targets on different ranks, of which those of sources know no format."""

    def rank(context: RankContext) -> str:
        held = FORMATS["mxfp8-alone"]
        if context.rank_idx < 2:
            source = ShardedNet(Parallelism(2, tp=2), context.rank_idx, SHAPES)
            refit.prepare_swap_model_weights(source, None, group=context.group)
            source.fill(0)
            swap(context, source, None, verify="checksum")
            source.fill(1)
            return error_of(lambda: swap(context, source, None, verify="checksum"))
        target = ShardedNet(Parallelism(1), 0, SHAPES, rank_offset=2)
        refit.prepare_swap_model_weights(None, target, group=context.group)
        buffers = {name: held.hold(tuple(target.get_parameter(name).shape)) for name in QUANTIZED}
        for name in QUANTIZED:
            delattr(target, name)
        transform = held.transform(buffers)
        swap(context, None, target, transform=transform, verify="checksum")
        finish = transform.finish

        def spoil() -> None:
            finish()
            buffers["down"].scale.view(torch.uint8)[5] ^= 1

        transform.finish = spoil
        return error_of(lambda: swap(context, None, target, transform=transform, verify="checksum"))

    texts = threads(rank, 3)
    assert len(set(texts)) == 1
    assert texts[0].startswith("RefitError: rank 2: down, piece ")
    assert "scale factors: the source has checksum" in texts[0]


# ---------------------------------------------------------------------------------------------
# Writes that go wrong: each is a change of the product.


def lose_scales_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole blocks and assembled ones: data is written, scale factors stay what they were."""
    for name in ("_store", "_finalize"):
        real = getattr(FP8BlockReshardTransform, name)

        def data_alone(self: Any, *args: Any, real: Any = real) -> None:
            kept = {key: held.scale.clone() for key, held in self.persistent_buffers.items()}
            real(self, *args)
            for key, scale in kept.items():
                self.persistent_buffers[key].scale.copy_(scale)

        monkeypatch.setattr(FP8BlockReshardTransform, name, data_alone)


def lose_data_of_assembled_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transforms, "write_chosen", lambda *_: None)


def write_scales_of_the_first_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole blocks write their scale factors where those of the first ones are."""
    real = scaled_buffers.scale_bounds

    def first(bounds: Any, block: Any) -> Any:
        return tuple((0, stop - start) for start, stop in real(bounds, block))

    monkeypatch.setattr(transforms, "scale_bounds", first)


def quantize_one_row_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver's own quantization is wrong."""
    real = transforms.quantize_fp8_block

    def short(values: torch.Tensor, *args: Any) -> Any:
        values = values.clone()
        values[-1] = 0
        return real(values, *args)

    monkeypatch.setattr(transforms, "quantize_fp8_block", short)


def write_one_block_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block of rows takes the place of the second, with its scale factors: a legal weight."""
    real = FP8BlockReshardTransform._store

    def twice(self: Any, key: str, values: torch.Tensor, chosen: torch.Tensor) -> None:
        values = values.clone()
        if key == "up":
            values[128:256] = values[:128]
        real(self, key, values, chosen)

    monkeypatch.setattr(FP8BlockReshardTransform, "_store", twice)


FAULTS: dict[Callable[[pytest.MonkeyPatch], None], tuple[str, str]] = {
    lose_scales_of_blocks: ("blocks", "scale factors: the source has"),
    lose_data_of_assembled_blocks: ("blocks", "data: the source has"),
    write_scales_of_the_first_block: ("mxfp8", "scale factors: the source has"),
    quantize_one_row_less: ("blocks-late", "data: the source has"),
    write_one_block_twice: ("blocks-late", "data: the source has"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_write_is_told_on_every_rank(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, expected = FAULTS[fault]

    def rank(context: RankContext) -> str:
        engine = Engine(context, "tp2", "single", FORMATS[name], torch.bfloat16)
        engine.run(0)
        context.group.all_gather(None)
        if context.rank_idx == 0:
            fault(monkeypatch)
        context.group.all_gather(None)
        text = error_of(lambda: engine.run(1))
        context.group.all_gather(None)
        assert is_stale(engine.target)
        if context.rank_idx == 0:
            monkeypatch.undo()
        context.group.all_gather(None)
        engine.run(2)
        assert not is_stale(engine.target)
        return text

    texts = threads(rank, 2)
    assert len(set(texts)) == 1
    assert texts[0].startswith("RefitError: rank 0: "), texts[0]
    assert expected in texts[0], texts[0]
    assert any(f": {param}, piece " in texts[0] for param in QUANTIZED)


def test_a_parameter_that_did_not_come_whole_is_told_on_every_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rank(context: RankContext) -> str:
        engine = Engine(context, "tp2", "single", FORMATS["blocks"], torch.bfloat16)
        engine.run(0)
        if context.rank_idx == 1:
            arrived = engine.transform._arrived
            dropped: list[str] = []

            def drop_one(param_name: str, *args: Any) -> None:
                if param_name == "down" and not dropped:
                    dropped.append(param_name)
                else:
                    arrived(param_name, *args)

            monkeypatch.setattr(engine.transform, "_arrived", drop_one)
        return error_of(lambda: engine.run(1))

    texts = threads(rank, 2)
    assert all("'down (" in text for text in texts), texts
    assert all("rank 1" in text for text in texts if not text.startswith("RuntimeError: elements"))


# ---------------------------------------------------------------------------------------------
# A transform of one's own.


class Halved(ReshardTransform):
    """Keeps half of every value; says what it must hold if it `tells`."""

    def __init__(self, held: torch.Tensor, *, tells: bool) -> None:
        self.held = held
        self.tells = tells
        self.loses = False
        self.fails = False

    def should_transform(self, param_name: str) -> bool:
        return param_name == "up"

    def prepare_send(self, param_name: str, src_slice: Any, src_param: torch.Tensor) -> Any:
        return [src_param[src_slice].contiguous()]

    def prepare_recv(self, param_name: str, dst_slice: Any) -> Any:
        return [torch.empty_like(self.held[dst_slice])]

    def finalize_recv(self, param_name: str, dst_slice: Any, recv_buffers: Any) -> None:
        if self.fails:
            raise ValueError("no memory for halves")
        if not self.loses:
            self.held[dst_slice] = recv_buffers[0] / 2

    def expected_of(self, op: TransferOp, src_param: torch.Tensor) -> list[torch.Tensor] | None:
        return [src_param[op.my_slice] / 2] if self.tells else super().expected_of(op, src_param)

    def written_of(self, op: TransferOp) -> list[torch.Tensor] | None:
        return [self.held[op.my_slice]] if self.tells else super().written_of(op)


@pytest.mark.parametrize("tells", [False, True])
def test_a_transform_of_ones_own_says_what_it_wrote(tells: bool, proofs: list[RefitProof]) -> None:
    def rank(context: RankContext) -> str:
        source = ShardedNet(Parallelism(2, tp=2), context.rank_idx, SHAPES)
        target = ShardedNet(Parallelism(2), context.rank_idx, SHAPES)
        transform = Halved(torch.zeros_like(target.up), tells=tells)
        options: Any = {"transform": transform, "verify": "checksum"}
        swap(context, source.fill(0), target, **options)
        assert torch.equal(transform.held, target.expected("up", 0).bfloat16() / 2)
        transform.loses = context.rank_idx == 1
        return error_of(lambda: swap(context, source.fill(1), target, **options))

    texts = threads(rank, 2)
    assert [proof.unproven for proof in proofs[:2]] == [() if tells else ("up",)] * 2
    if not tells:
        assert texts == ["", ""]
        return
    assert texts[0] == texts[1]
    assert texts[0].startswith("RefitError: rank 1: up, piece 0")
    assert "tensor 0: the source has checksum" in texts[0]


def test_a_transform_that_fails_is_told_with_the_parameter_on_every_rank() -> None:
    def rank(context: RankContext) -> str:
        source = ShardedNet(Parallelism(2, tp=2), context.rank_idx, SHAPES)
        target = ShardedNet(Parallelism(2), context.rank_idx, SHAPES)
        transform = Halved(torch.zeros_like(target.up), tells=True)
        transform.fails = context.rank_idx == 1
        options: Any = {"transform": transform, "verify": "checksum"}
        text = error_of(lambda: swap(context, source.fill(0), target, **options))
        assert is_stale(target) == transform.fails
        return text

    for text in threads(rank, 2):
        assert "up: no memory for halves" in text


# ---------------------------------------------------------------------------------------------
# Sources are hashed while they are copied, targets read once more: what copies do wrong is found.

PAIR: Any = {"left": ((32, 24), 0), "right": ((32, 24), 0), "norm": ((8,), None)}


class Unfaithful(SymmetricCopyService):
    """Moves something else than it is given, of parameters that the test names."""

    fault = ""
    victims: tuple[torch.Tensor, ...] = ()

    def submit_send(self, src_tensor: torch.Tensor, *args: Any, **options: Any) -> None:
        if self.fault == "stale" and self._of(src_tensor) == 0:
            src_tensor = src_tensor.clone()  # what it holds now, in each later run
        super().submit_send(src_tensor, *args, **options)

    def submit_recv(self, dest_tensor: torch.Tensor, *args: Any, **options: Any) -> None:
        number = self._of(dest_tensor)
        if self.fault == "lost" and number == 0:
            dest_tensor = dest_tensor.clone()
        if self.fault == "swapped" and number is not None:
            victim, other = self.victims[number], self.victims[1 - number]
            offset = dest_tensor.storage_offset() - victim.storage_offset()
            dest_tensor = other.as_strided(
                dest_tensor.shape, dest_tensor.stride(), other.storage_offset() + offset
            )
        super().submit_recv(dest_tensor, *args, **options)

    def _of(self, tensor: torch.Tensor) -> int | None:
        """Victim that it is a part of."""
        for number, victim in enumerate(self.victims):
            if 0 <= tensor.data_ptr() - victim.data_ptr() < victim.nbytes:
                return number
        return None


def test_what_was_hashed_as_it_was_copied_is_not_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unless a caller asks later: then a source that has changed since is told."""
    prove = refit_pass.prove_refit

    def changed(plan: Any, source: Any, *args: Any, **options: Any) -> Any:
        with torch.no_grad():
            source.left += 1
        proof = prove(plan, source, *args, **options)
        plans[plan.rank] = plan
        return proof

    plans: dict[int, Any] = {}
    monkeypatch.setattr(refit_pass, "prove_refit", changed)

    def rank(context: RankContext) -> str:
        source = ShardedNet(Parallelism(2, tp=2), context.rank_idx, PAIR)
        target = ShardedNet(Parallelism(2), context.rank_idx, PAIR)
        for seed in range(2):
            swap(context, source.fill(seed), target, verify="checksum")
            assert target.wrong(seed) == []
        plan = plans[context.rank_idx]
        return error_of(lambda: verify_refit(plan, source, target, context.group))

    texts = threads(rank, 2)
    assert texts[0] == texts[1]
    assert texts[0].startswith("RefitError: rank 0: left, piece 0")


@pytest.mark.parametrize("is_in_heap", [False, True], ids=["slots", "heap"])
@pytest.mark.parametrize("fault", ["stale", "lost", "swapped", "spoiled"])
def test_copies_that_are_unfaithful_are_told_on_every_rank(
    fault: str, is_in_heap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prove = refit_pass.prove_refit
    spoils: list[int] = []

    def spoiled(plan: Any, source: Any, target: Any, *args: Any, **options: Any) -> Any:
        if plan.rank in spoils:
            target.left.data.view(torch.uint8)[31, 7] ^= 64
        return prove(plan, source, target, *args, **options)

    monkeypatch.setattr(refit_pass, "prove_refit", spoiled)

    def rank(context: RankContext) -> list[str]:
        source = ShardedNet(Parallelism(2, tp=2), context.rank_idx, PAIR)
        target = ShardedNet(Parallelism(2), context.rank_idx, PAIR)
        service = Unfaithful(context.group)
        if is_in_heap:
            place_in_heap(target, service.communicator)
        if fault == "stale" and context.rank_idx == 0:
            service.victims = (source.left.data,)
        elif fault != "stale" and context.rank_idx == 1:
            service.victims = target.left.data, target.right.data
        service.fault = fault
        options: Any = {"group": context.group, "verify": "checksum"}
        run = functools.partial(refit.swap_model_weights, source, target, service, **options)
        texts = []
        for seed in range(2):
            source.fill(seed)
            if fault == "spoiled" and seed == 1 and context.rank_idx == 1:
                spoils.append(1)
            context.group.all_gather(None)
            texts.append(error_of(run))
        service.close()
        return texts

    first, other = threads(rank, 2)
    assert first == other
    assert (first[0] == "") == (fault in ("stale", "spoiled"))
    who = "rank 0: left, piece 0" if fault == "stale" else "rank 1: left, piece"
    assert first[1].startswith(f"RefitError: {who}")
    assert "the source has checksum" in first[1]
    assert ("right" in first[1]) == (fault == "swapped")


# ---------------------------------------------------------------------------------------------
# A trainer that steps while its weights are read: no version is whole then.


@pytest.mark.parametrize("deltas", [None, "blocks"])
@pytest.mark.parametrize("views", [False, True], ids=["module", "views"])
def test_a_source_that_is_written_while_it_is_read_is_told_on_every_rank(
    deltas: Any, views: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[torch.nn.Parameter] = []

    def stepping(place: Any, name: str, rank_of: Callable[..., int]) -> None:
        run = getattr(place, name)

        def run_and_step(*args: Any, **options: Any) -> Any:
            done = run(*args, **options)
            with torch.no_grad():
                while rank_of(*args) == 0 and steps:
                    steps.pop().add_(1)
            return done

        monkeypatch.setattr(place, name, run_and_step)

    stepping(refit_pass, "execute", lambda plan, *_: plan.rank)
    stepping(Deltas, "run", lambda _, delta: delta.plan.rank)

    def rank(context: RankContext) -> list[str]:
        source = target = None
        if context.rank_idx == 0:
            source = ShardedNet(Parallelism(1), 0, PAIR | {"head": ((4,), None)})
        else:
            target = ShardedNet(Parallelism(1), 0, PAIR, rank_offset=context.rank_idx)
        sides: list[Any] = [source, target]
        if views and source is not None:
            sides[0] = CheckpointViews(
                [
                    CheckpointView(
                        name, tuple(part.shape), tuple(map(whole, part.shape)), part.data
                    )
                    for name, part in source.named_parameters()
                ],
                source,
            )
        held = refit.Refit(*sides, "symmetric", context.group, verify="checksum", deltas=deltas)
        texts = []
        for seed, name in enumerate(("", "right", "head", "norm", "")):
            if source is not None:
                source.fill(seed)
                steps.extend([source.get_parameter(name)] if name else [])
            texts.append(error_of(held.run))
            if target is not None:
                assert is_stale(target) == bool(texts[-1])
                assert is_stale(target) or target.wrong(seed) == []
        return texts

    texts = threads(rank, 3)
    assert texts[1:] == texts[:-1]
    assert [bool(text) for text in texts[0]] == [False, True, False, True, False]
    told = "of the source was written while the refit read it (torch had counted "
    whose = " (of the owner) " if views else " "
    assert texts[0][1].startswith(f"RefitError: rank 0: right{whose}{told}")
    assert texts[0][3].startswith(f"RefitError: rank 0: norm{whose}{told}")
