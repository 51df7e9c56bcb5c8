"""Models and engines as the command line names them, and what each rank of them would hold: nothing is loaded."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from moe_comm.resharding.describe.checkpoint_views import CheckpointViews
from moe_comm.resharding.describe.loader_views import TensorSpec, loader_views
from moe_comm.resharding.describe.metadata_extraction import (
    extract_module_metadata,
    resolved_ties,
)
from moe_comm.resharding.describe.module_tensors import local_tensor
from moe_comm.resharding.describe.transformers_views import empty_model, transformers_views
from moe_comm.resharding.hold.refit_models import unwrap_models
from moe_comm.resharding.plan.rank_metadata import (
    RankMetadata,
    decode_rank_metadata,
    encode_rank_metadata,
)
from moe_comm.tensors.memory import storage_id

_LAYOUT = re.compile(r"(tp|fsdp|ep)([1-9][0-9]*)")


class RankPart(NamedTuple):
    """Part of a side that one rank holds.

    Args:
        metadata: Metadata as ranks tell each other.
        own_names: Name that the rank's own model has for the place of a tensor, by name in the
            whole model.
    """

    metadata: RankMetadata
    own_names: dict[str, str]


class _NeedsCheckpointError(ValueError):
    """A loader is the map of a side, and nobody has said what it would load."""


@dataclasses.dataclass(frozen=True)
class ModelSide:
    """One side of a refit by the words of the command line.

    Args:
        text: A folder with a configuration of transformers, its owner/name on the hub, or a class
            of transformers; or `module:name`, of what makes a rank's part, called with the rank, their
            number, and `layout` where that is given.
        layout: Name of the layout, such as "tp2.ep4"; for transformers what is left over is FSDP.
        num_ranks: Ranks of this side.
        dtype: Type of a model of transformers; None for that of its configuration.

    Raises:
        ValueError: The layout is none, or does not divide the ranks.
    """

    text: str
    layout: str | None
    num_ranks: int
    dtype: torch.dtype | None = None

    @property
    def is_factory(self) -> bool:
        """Return whether a function or class of the caller's makes a rank's part."""
        return ":" in self.text and not os.path.isdir(self.text)

    def parts(
        self, rank_offset: int, checkpoint: Mapping[str, TensorSpec] | None, *, is_written: bool
    ) -> list[RankPart]:
        """Return the part of every rank.

        Args:
            rank_offset: The first rank of this side among all.
            checkpoint: Tensors that a loader would get; None if they are not known.
            is_written: Whether it is the destination.

        Raises:
            _NeedsCheckpointError: The side is a loader, and `checkpoint` is None.
            ValueError: There is no such model, or what is made is no side of a refit.
        """
        make = self._factory() if self.is_factory else self._transformers_maker()
        found = []
        for rank in range(self.num_ranks):
            with _pretended_group(rank, self.num_ranks):
                with torch.device("meta"):
                    made = make(rank)
                side = self._side_of(made, checkpoint)
                found.append(_part_of(side, rank, rank_offset, is_written=is_written))
        return found

    def _side_of(
        self, made: Any, checkpoint: Mapping[str, TensorSpec] | None
    ) -> CheckpointViews | torch.nn.Module:
        if isinstance(made, CheckpointViews):
            return made
        if callable(getattr(made, "load_weights", None)):
            if checkpoint is None:
                raise _NeedsCheckpointError(self.text)
            buffers = getattr(made, "named_buffers", None)
            found = loader_views(
                made.load_weights,
                checkpoint,
                made.named_parameters(),
                optional=() if buffers is None else buffers(),
                other_ranks=self.num_ranks > 1,
            )
            return CheckpointViews(found.views, made)
        if isinstance(made, torch.nn.Module):
            return made
        raise ValueError(
            f"{self.text} must make CheckpointViews, a module, or an engine with load_weights and "
            f"named_parameters, it made a {type(made).__name__}"
        )

    def _factory(self) -> Callable[[int], Any]:
        module_name, _, name = self.text.partition(":")
        if "" not in sys.path:
            # A script has its own folder there, and the caller's module lies in that of the caller.
            sys.path.insert(0, "")
        try:
            factory = importlib.import_module(module_name)
        except (ImportError, SyntaxError) as error:
            raise ValueError(f"{self.text}: {error}") from error
        for each in name.split("."):
            if not hasattr(factory, each):
                raise ValueError(f"{self.text}: {module_name} has no {name}")
            factory = getattr(factory, each)
        is_maker = callable(factory)
        if not is_maker:
            raise ValueError(
                f"{self.text} must be a function or class, it is a {type(factory).__name__}"
            )
        layout = () if self.layout is None else (self.layout,)
        make: Any = factory
        try:
            inspect.signature(make).bind(0, self.num_ranks, *layout)
        except TypeError as error:
            asked = ", ".join(("rank", "number of ranks", *layout))
            raise ValueError(f"{self.text} is called with ({asked}): {error}") from error
        except ValueError:
            pass  # It is of C++ and does not say what it takes.
        return lambda rank: make(rank, self.num_ranks, *layout)

    def _transformers_maker(self) -> Callable[[int], Any]:
        sizes = self._sizes()
        try:
            transformers: Any = importlib.import_module("transformers")
        except ImportError as error:
            raise ValueError(
                f"{self.text}: a model by its configuration needs transformers ({error}); a function or "
                "class of yours that makes a rank's part is written module:name"
            ) from error
        if not hasattr(transformers, "DistributedConfig"):
            raise ValueError(
                f"{self.text}: transformers {transformers.__version__} has no DistributedConfig, by which "
                "ranks are given their parts: it needs 5.23 or later"
            )
        transformers.logging.set_verbosity_error()
        kind, config = _kind_and_config(transformers, self.text)
        dtype = self.dtype or getattr(config, "dtype", None) or torch.bfloat16

        def make(_: int) -> CheckpointViews:
            plan = transformers.DistributedConfig(ep_implementation="all_to_all", **sizes)
            return transformers_views(empty_model(kind, config, dtype, plan, "meta"))

        return make

    def _sizes(self) -> dict[str, int]:
        """Sizes of the parallel plan of a model of transformers."""
        sizes: dict[str, int] = {}
        for part in (self.layout or "single").split("."):
            found = _LAYOUT.fullmatch(part)
            if found is None and part != "single":
                raise ValueError(
                    f"a layout of transformers is tpN, fsdpN and epN joined by dots, or single; got "
                    f"{self.layout!r}"
                )
            if found is not None:
                sizes[f"{found[1]}_size"] = int(found[2])
        tp, ep = sizes.setdefault("tp_size", 1), sizes.get("ep_size", 1)
        if self.num_ranks % tp or self.num_ranks % ep:
            raise ValueError(f"{self.layout} does not divide {self.num_ranks} ranks of {self.text}")
        fsdp = sizes.setdefault("fsdp_size", self.num_ranks // tp)
        if tp * fsdp != self.num_ranks:
            raise ValueError(
                f"{self.layout} is for {tp * fsdp} ranks, {self.text} has {self.num_ranks}"
            )
        return sizes


def _kind_and_config(transformers: Any, text: str) -> tuple[Any, Any]:
    """Return the class of a model and its configuration, by the words of the command line.

    Args:
        transformers: The module.
        text: A class of a model; or a configuration's class or what `AutoConfig` takes, which say the model's
            class by their `architectures`, without these the causal language model of the configuration.

    Raises:
        ValueError: Nothing says of which class the model is.
    """
    named = getattr(transformers, text, None) if text.isidentifier() else None
    if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
        made: Any = named
        return made, made.config_class()
    if isinstance(named, type) and issubclass(named, transformers.PretrainedConfig):
        config = named()
    else:
        config = _config_at(transformers, text)
    for name in getattr(config, "architectures", None) or ():
        if hasattr(transformers, name):
            return getattr(transformers, name), config
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"{text}: transformers has no causal language model of {type(config).__name__}; name the class of "
            "the model, such as Qwen3VLMoeForConditionalGeneration"
        )
    return transformers.AutoModelForCausalLM, config


def _config_at(transformers: Any, text: str) -> Any:
    """Return the configuration in a folder, of this machine's copy of the hub or, by a name with an owner, of the hub.

    Raises:
        ValueError: It is none of these; a word without an owner is taken for a class that is misspelt.
        OSError: The hub has no such name, or does not answer.
    """
    read = transformers.AutoConfig.from_pretrained
    if os.path.isdir(text):
        return read(text)
    try:
        return read(text, local_files_only=True)
    except OSError:
        if "/" in text:
            return read(text)
    classes = [
        name for name in dir(transformers) if name.endswith(("Config", "Model")) or "For" in name
    ]
    near = ", ".join(difflib.get_close_matches(text, classes))
    raise ValueError(
        f"{text}: no folder here, and no class of a model or configuration in transformers "
        f"{transformers.__version__}{f' (near it: {near})' if near else ''}; a name on the hub is owner/name"
    )


@contextlib.contextmanager
def _pretended_group(rank: int, num_ranks: int) -> Iterator[None]:
    """Be a rank of a default group of which there is no other: meshes and placements can be made."""
    # It registers the backend.
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    store: Any = torch._C._distributed_c10d.HashStore()
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=store)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _part_of(
    side: CheckpointViews | torch.nn.Module, rank: int, rank_offset: int, *, is_written: bool
) -> RankPart:
    if isinstance(side, CheckpointViews):
        metas = side.metadata(rank + rank_offset, is_written=is_written)
        names = _names_by_storage(side.owner)
        own = {
            view.name: names[storage]
            for view in side.views
            if (storage := storage_id(view.tensor)) in names
        }
        return RankPart(decode_rank_metadata(encode_rank_metadata(metas, side.ties())), own)
    models = unwrap_models(side, None)
    module = models.source
    assert isinstance(module, torch.nn.Module)
    metas = extract_module_metadata(
        module, rank + rank_offset, num_experts=models.num_experts, rank_offset=rank_offset
    )
    own = {meta.resolved_name or meta.name: meta.name for meta in metas}
    encoded = encode_rank_metadata(metas, resolved_ties(module, metas))
    return RankPart(decode_rank_metadata(encoded), own)


def _names_by_storage(owner: object) -> dict[int, str]:
    """Names of an owner's tensors, by the storage in which they lie."""
    names: dict[int, str] = {}
    for listing in ("named_parameters", "named_buffers"):
        for name, tensor in getattr(owner, listing, tuple)():
            names.setdefault(storage_id(local_tensor(tensor)), name)
    return names


def _checkpoint_of(text: str, parts: Sequence[RankPart]) -> dict[str, TensorSpec]:
    """Whole tensors of a side, by their names on disk, in the order in which ranks name them.

    Raises:
        ValueError: The side does not say what it holds in the words of a checkpoint.
    """
    specs: dict[str, TensorSpec] = {}
    for metadata, _ in parts:
        for name, kind in metadata.named_kinds():
            if kind.view is None:
                raise ValueError(
                    f"{text}: {name} says nothing of its name and shape in a checkpoint, which the "
                    "loader of the other side would get: give CheckpointViews"
                )
            specs.setdefault(name, TensorSpec(kind.view.whole_shape, kind.dtype))
    return specs


def describe_both(
    source: ModelSide, destination: ModelSide, destination_offset: int
) -> tuple[list[RankPart], list[RankPart]]:
    """Return the parts of both sides' ranks. A side that is a loader gets what the other one has.

    Args:
        source: The one side.
        destination: The other.
        destination_offset: The first rank of the destination.

    Raises:
        ValueError: Both are loaders, or one cannot be described.
    """
    try:
        sources = source.parts(0, None, is_written=False)
    except _NeedsCheckpointError:
        try:
            destinations = destination.parts(destination_offset, None, is_written=True)
        except _NeedsCheckpointError as error:
            raise ValueError(
                f"{source.text} and {destination.text} are both described by a loader, and nobody says "
                "what is in the checkpoint: one side must be a model of transformers or CheckpointViews"
            ) from error
        checkpoint = _checkpoint_of(destination.text, destinations)
        return source.parts(0, checkpoint, is_written=False), destinations
    try:
        return sources, destination.parts(destination_offset, None, is_written=True)
    except _NeedsCheckpointError:
        checkpoint = _checkpoint_of(source.text, sources)
    return sources, destination.parts(destination_offset, checkpoint, is_written=True)


def rosters_of(
    sources: Sequence[RankPart], destinations: Sequence[RankPart], destination_offset: int
) -> list[tuple[RankMetadata, RankMetadata]]:
    """`(source, destination)` of every rank of both sides."""
    nothing = decode_rank_metadata(encode_rank_metadata([]))
    num_ranks = max(len(sources), destination_offset + len(destinations))

    def at(parts: Sequence[RankPart], number: int) -> RankMetadata:
        return parts[number].metadata if 0 <= number < len(parts) else nothing

    return [
        (at(sources, rank), at(destinations, rank - destination_offset))
        for rank in range(num_ranks)
    ]
