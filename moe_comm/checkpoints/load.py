"""Safetensors files into models: every rank reads what it needs, in parallel."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from moe_comm.arguments import check_bool
from moe_comm.checkpoints.chains import open_checkpoint, verify_checkpoint
from moe_comm.checkpoints.checkpoint_ranks import CheckpointRanks
from moe_comm.checkpoints.file_plans import (
    FilePart,
    check_becomes,
    names_on_disk,
    plan_load,
    read_parts,
)
from moe_comm.checkpoints.scaled_weights import BlockScales, block_of, scale_names
from moe_comm.checkpoints.stored_checkpoint import (
    Reader,
    StoredCheckpoint,
    find_checkpoint,
)
from moe_comm.checkpoints.versions import check_version_name
from moe_comm.peers.bootstrap import Bootstrap
from moe_comm.resharding.describe.disagreement import PlanError
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
from moe_comm.resharding.plan.rank_metadata import decode_rank_metadata
from moe_comm.resharding.plan.reshard_plan import ReshardPlan, TensorSpec


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

    An FP8 weight `NAME` with its scale factors `NAME_scale_inv` (float32 of blocks of 128 x 128 or 1 x 128, or
    MXFP8's bytes) fills both where a rank has both, and else a float tensor with the products, in float32
    and then rounded.

    Args:
        model: Part of the model that this rank holds: a module with `pg_collection` or DTensors,
            `CheckpointViews`, such as `transformers_views(model)`, or None. As the target of a `Refit`:
            tensors keep their dtypes, buffers take over those of the files.
        folder: Folder of versions, or of one checkpoint. The same files for every rank.
        version: Name; None for the latest, or for the folder itself where it has no versions.
        group: The ranks; None for the default group, or this rank alone where there is none.
        strict: A tensor of the checkpoint that no rank takes is an error. One that the checkpoint lacks is
            always one.
        checksums: Whether to read the whole checkpoint first, each rank its share, and compare checksums,
            which `save_checkpoint` writes.

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
        encoded = encoded_side(target, models.num_experts, ranks.group, "destination")
    gathered = ranks.agree_alike(
        encoded,
        folder=str(path),
        strict=strict,
        checksums=checksums,
        **{"digest of the headers": digest},
    )
    planned = _Planned(ReshardPlan([], []), [], {})
    assert checkpoint is not None
    with ranks.problem:
        planned = _plan(checkpoint, gathered, ranks.rank_idx, strict=strict)
    ranks.agree()
    if checksums:
        with ranks.problem:
            for _ in verify_checkpoint(checkpoint, ranks.rank_idx, ranks.num_ranks):
                pass
        ranks.agree()
    with ranks.problem:
        if target is not None:
            stale.count_write(target)
            _fill(target, checkpoint, planned)
    try:
        ranks.agree()
    except Exception as error:
        # This rank's part is of the checkpoint; the model is not, where another rank failed.
        stale.mark_torn(target, "a load", error)
        raise
    if target is not None:
        stale.clear_stale(target)
        _refresh_module_caches(target)
    return path


class _Planned(NamedTuple):
    """Reads of one rank.

    Args:
        plan: Plan of its receives.
        parts: Places of these in the files.
        scales: Names of scale factors, by those of the weights whose values are worked out.
    """

    plan: ReshardPlan
    parts: list[FilePart]
    scales: dict[str, str]


def _plan(
    checkpoint: StoredCheckpoint, gathered: Sequence[bytes], rank_idx: int, *, strict: bool
) -> _Planned:
    tensors = {}
    for name in checkpoint.file_of:
        stored = checkpoint.stored(name)
        tensors[name] = TensorSpec(stored.shape, stored.dtype)
    sides = list(map(decode_rank_metadata, gathered))
    # FP8 weights are read as the values they stand for where no rank has scale factors.
    held = {name for side in sides for name in side.resolved_names}
    scales = {name: scale for name, scale in scale_names(tensors).items() if scale not in held}
    for name, scale in scales.items():
        block_of(name, tensors[name].shape, tensors[scale].shape, tensors[scale].dtype)
        tensors[name] = TensorSpec(tensors[name].shape, torch.float32)
        del tensors[scale]
    try:
        sides = names_on_disk(sides, tensors)
    except PlanError as error:
        raise PlanError(f"{checkpoint.folder}: {error}") from None
    mine = sides[rank_idx]
    places = {name: str(checkpoint.path_of(name)) for name in tensors}
    for name, scale in scales.items():
        places[name] += f", times {scale}, which no rank holds"
    check_becomes(mine, {name: (spec, places[name]) for name, spec in tensors.items()})
    plan = plan_load(sides, rank_idx, tensors, strict=strict)
    return _Planned(plan, read_parts(plan, mine, tensors), scales)


def _fill(target: RefitSide, checkpoint: StoredCheckpoint, planned: _Planned) -> None:
    """Read a rank's parts into its tensors, in the order in which they lie in the files."""
    _harmonize_buffer_dtypes(planned.plan, None, target)
    tensors = get_refit_tensor_dict(target)
    with torch.no_grad(), Reader(checkpoint) as reader:
        known: tuple[str, BlockScales | None] = "", None
        for part in sorted(planned.parts, key=lambda part: reader.place_of(part.tensor)):
            if known[0] != part.tensor:
                scale = planned.scales.get(part.tensor)
                known = part.tensor, None if scale is None else reader.scales(part.tensor, scale)
            piece = piece_of(local_tensor(tensors[part.op.param_name]).detach(), part.op)
            reader.read(part.tensor, part.shape, part.box, piece, known[1])
    # Torch has not seen all of these writes.
    from moe_comm import _host

    _host.WrittenTensors(local_tensor(tensors[name]) for name in planned.plan.destinations).count()
