"""A model of transformers out of safetensors files: made without values, and filled with what each rank holds."""

from __future__ import annotations

import copy
import importlib
import os
from pathlib import Path
from typing import Any

import torch

from moe_comm.checkpoints.chains import open_checkpoint
from moe_comm.checkpoints.checkpoint_ranks import CheckpointRanks
from moe_comm.checkpoints.load import load_checkpoint
from moe_comm.checkpoints.stored_checkpoint import find_checkpoint, has_all_tensors
from moe_comm.resharding.describe.module_tensors import named_refit_tensors
from moe_comm.resharding.describe.transformers_views import empty_model, transformers_views


def load_pretrained(
    auto_class: Any,
    folder: str | os.PathLike[str],
    version: str | None = None,
    *,
    config: Any = None,
    distributed_config: Any = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    strict: bool = True,
    checksums: bool = False,
    **options: Any,
) -> Any:
    """Return what `auto_class.from_pretrained` returns, read by `load_checkpoint`. Collective, blocking.

    The model is made on "meta", cut by its parallel plan, given memory and filled: each rank reads its own parts
    alone, and no tensor is put together beside the model. Buffers that no checkpoint has are computed, as
    transformers does. Deltas are read too, and FP8 weights with their scale factors into float ones.

    Args:
        auto_class: `AutoModelForCausalLM` or another class that has `from_config`, or a `PreTrainedModel`.
        folder: See `load_checkpoint`.
        version: See `load_checkpoint`.
        config: Configuration of the model, copied; None for the `config.json` of the version, or of the
            newest below a delta.
        distributed_config: `DistributedConfig` of transformers; its sizes are those of the default process
            group. None for the whole model on every rank.
        dtype: Dtype of the weights, except those that the model keeps in float32; None for the
            configuration's.
        device: Device of the weights; None for that of the parallel plan, or "cpu" without one.
        strict: See `load_checkpoint`.
        checksums: See `load_checkpoint`.
        options: Options of the class, such as `attn_implementation`.

    Returns:
        The model, in evaluation mode.

    Raises:
        ImportError: There is no transformers, or one older than 5.23.
        OSError, ValueError: There is no configuration, or the plan fits neither model nor ranks; as transformers
            raises them. What any rank says of the files is raised on all.
        Exception: See `load_checkpoint` and `transformers_views`.
    """
    ranks = CheckpointRanks("load", None)
    transformers: Any = None
    path = Path(folder)
    chain: tuple[Path, ...] = ()
    with ranks.problem:
        transformers = importlib.import_module("transformers")
        path = find_checkpoint(path, version)
        chain = (path,) if has_all_tensors(path) else open_checkpoint(path).chain
        if config is None:
            config = transformers.AutoConfig.from_pretrained(_newest(chain, "config.json"))
    # Before transformers makes groups, in which ranks would wait for one that has failed.
    ranks.agree()
    config = copy.deepcopy(config)
    config.name_or_path = str(path)
    model = empty_model(auto_class, config, dtype, distributed_config, device, **options)
    for _, tensor in named_refit_tensors(model):
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    model.initialize_weights()  # buffers that are not saved alone
    # The version whose configuration this is, also where a newer one has come meanwhile.
    version = None if path == Path(folder) else path.name
    load_checkpoint(transformers_views(model), folder, version, strict=strict, checksums=checksums)
    generation = _newest(chain, "generation_config.json")
    if model.can_generate() and (generation / "generation_config.json").exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(generation)
    return model.eval()


def _newest(chain: tuple[Path, ...], name: str) -> Path:
    """Return the newest version of a chain that has a file; the newest of all where none has."""
    return next((each for each in reversed(chain) if (each / name).exists()), chain[-1])
