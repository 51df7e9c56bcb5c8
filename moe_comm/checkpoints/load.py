"""Safetensors files into models: every rank reads what it needs, in parallel."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from moe_comm import _host
from moe_comm.arguments import check_bool
from moe_comm.checkpoints.checkpoint_ranks import CheckpointRanks
from moe_comm.checkpoints.file_plans import (
    FilePart,
    check_becomes,
    names_on_disk,
    plan_load,
    read_parts,
)
from moe_comm.checkpoints.rectangles import Rectangle, read_rectangle
from moe_comm.checkpoints.stored_checkpoint import (
    StoredCheckpoint,
    find_checkpoint,
    open_checkpoint,
    verify_parts,
    verify_small_files,
)
from moe_comm.checkpoints.versions import check_version_name, failed
from moe_comm.peers.bootstrap import Bootstrap
from moe_comm.resharding.describe.module_tensors import (
    RefitSide,
    get_refit_tensor_dict,
    local_tensor,
)
from moe_comm.resharding.hold.refit_models import Model, _harmonize_buffer_dtypes, unwrap_models
from moe_comm.resharding.move import stale
from moe_comm.resharding.move.execution import _refresh_module_caches
from moe_comm.resharding.move.sources import piece_of
from moe_comm.resharding.plan.planner import encoded_side
from moe_comm.resharding.plan.rank_metadata import RankMetadata, decode_rank_metadata
from moe_comm.resharding.plan.reshard_plan import ReshardPlan, TensorSpec

__all__ = ["load_checkpoint"]


def load_checkpoint(
    model: Model,
    folder: str | os.PathLike[str],
    version: str | None = None,
    *,
    group: dist.ProcessGroup | Bootstrap | None = None,
    strict: bool = True,
    checksums: bool = False,
) -> Path:
    """Fill what all ranks hold of a model from a folder of safetensors files. Collective, blocking.

    Takes what `save_checkpoint` wrote on any number of ranks, and what `save_pretrained` and others write.
    Every rank reads its own parts alone, straight into its tensors where these lie as in the file.

    Before a weight is written, files and names, their sizes and dtypes are checked.

    Args:
        model: What this rank holds: a module with `pg_collection` or DTensors, `CheckpointViews`, such as
            `transformers_views(model)`, or None. As the target of a `Refit`: tensors keep their dtypes,
            buffers take over those of the files.
        folder: Of versions, or of one checkpoint. The same files for every rank.
        version: Name; None for the latest, or for the folder itself where it has no versions.
        group: The ranks; None for the default group, or this rank alone where there is none.
        strict: A tensor of the checkpoint that no rank takes is an error. One that the checkpoint lacks is
            always one.
        checksums: Read the whole checkpoint first, each rank its share, and compare checksums, which
            `save_checkpoint` writes.

    Returns:
        The folder of the version.

    Raises:
        TypeError, ValueError, RuntimeError: An argument is wrong on some rank, a name is missing, a shape or
            dtype is another; names the tensor, on every rank.
        CheckpointError: Files are missing, cut short, changed or of two saves; names file and tensor, on
            every rank. Where reading itself fails, the model is marked stale.
        CommunicationError: A peer is gone.
    """
    ranks = CheckpointRanks("load", group)
    target: RefitSide | None = None
    checkpoint: StoredCheckpoint | None = None
    encoded, digest = b"", ""
    path = Path(folder)
    with ranks.problem:
        check_bool("strict", strict)
        check_bool("checksums", checksums)
        if version is not None:
            check_version_name(version)
        models = unwrap_models(None, model)
        target = models.target
        path = find_checkpoint(path, version)
        checkpoint = open_checkpoint(path)
        digest = checkpoint.digest()
        encoded = encoded_side(
            target,
            ranks.rank_idx,
            ranks.num_ranks,
            models.num_experts,
            0,
            ranks.group,
            "destination",
        )
    ranks.agree_alike(
        folder=str(path), strict=strict, checksums=checksums, **{"digest of the headers": digest}
    )
    gathered = ranks.agree(encoded)
    plan, parts = ReshardPlan([], []), list[FilePart]()
    assert checkpoint is not None
    with ranks.problem:
        plan, parts = _planned(checkpoint, gathered, ranks.rank_idx, strict=strict)
    ranks.agree()
    if checksums:
        with ranks.problem:
            for _ in verify_parts(checkpoint, ranks.rank_idx, ranks.num_ranks):
                pass
            if ranks.rank_idx == 0:
                verify_small_files(checkpoint)
        ranks.agree()
    with ranks.problem:
        if target is not None:
            _fill(target, checkpoint, plan, parts)
    try:
        ranks.agree()
    except Exception as error:
        # Where another rank failed, this one's part is of the checkpoint, the model is not.
        if target is not None:
            text = str(error).split("\n", 1)[0]
            stale.mark_stale(target, f"a load failed: {type(error).__name__}: {text}")
        raise
    if target is not None:
        stale.clear_stale(target)
        _refresh_module_caches(target)
    return path


def _planned(
    checkpoint: StoredCheckpoint, gathered: Sequence[bytes], rank_idx: int, *, strict: bool
) -> tuple[ReshardPlan, list[FilePart]]:
    """A rank's plan and what it reads by it."""
    tensors = {}
    for name in checkpoint.file_of:
        stored = checkpoint.stored(name)
        tensors[name] = TensorSpec(stored.shape, stored.dtype)
    sides: list[RankMetadata] = []
    for rank, data in enumerate(gathered):
        side = decode_rank_metadata(data)
        try:
            sides.append(names_on_disk(side, tensors))
        except ValueError as error:
            raise ValueError(f"{checkpoint.folder}: {error}, rank {rank} needs it") from None
    mine = sides[rank_idx]
    check_becomes(
        mine, {name: (spec, str(checkpoint.path_of(name))) for name, spec in tensors.items()}
    )
    plan = plan_load(sides, rank_idx, tensors, strict=strict)
    return plan, read_parts(plan, mine, tensors)


def _fill(
    target: RefitSide, checkpoint: StoredCheckpoint, plan: ReshardPlan, parts: Sequence[FilePart]
) -> None:
    """Read a rank's parts into its tensors, in the order in which they lie in the files."""
    _harmonize_buffer_dtypes(plan, None, target)
    tensors = get_refit_tensor_dict(target)
    ordered = sorted(
        parts,
        key=lambda part: (checkpoint.file_of[part.tensor], checkpoint.stored(part.tensor).start),
    )
    with torch.no_grad():
        for path, some in itertools.groupby(ordered, lambda part: checkpoint.path_of(part.tensor)):
            with failed(path, "cannot be read"):
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                for part in some:
                    stored = checkpoint.stored(part.tensor)
                    rectangle = Rectangle(stored.start, part.shape, part.box, part.dtype)
                    piece = piece_of(local_tensor(tensors[part.op.param_name]).detach(), part.op)
                    with failed(path, f"{part.tensor} cannot be read"):
                        read_rectangle(descriptor, rectangle, piece)
            finally:
                os.close(descriptor)
    # Of which torch has not seen all.
    _host.WrittenTensors(local_tensor(tensors[name]) for name in plan.destinations).count()
