"""Checkpoints into other files and formats of numbers, a few rows at a time."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch

from moe_comm.arguments import as_int, shown
from moe_comm.checkpoints.block_files import blocks_name
from moe_comm.checkpoints.chains import is_delta, open_checkpoint, take_over_sums
from moe_comm.checkpoints.packed_files import packed_files
from moe_comm.checkpoints.save import (
    DEFAULT_FILE_BYTES,
    FileWriter,
    file_metadata,
    finish_version,
)
from moe_comm.checkpoints.scaled_weights import (
    SCALE_SUFFIX,
    BlockScales,
    block_of,
    lacks_scales,
    scale_names,
)
from moe_comm.checkpoints.stored_checkpoint import (
    CheckedPart,
    Reader,
    StoredCheckpoint,
    find_checkpoint,
    is_tensor_file,
)
from moe_comm.checkpoints.versions import (
    MANIFEST,
    NewVersion,
    check_version_name,
    failed,
    read_json,
)
from moe_comm.resharding.describe.conversions import NUMBERS
from moe_comm.resharding.describe.intervals import Box, Piece, cut_piece, num_elements
from moe_comm.resharding.formats.number_formats import (
    MXFP8_BLOCK,
    quantize_fp8_block,
    quantize_mxfp8,
    scale_shape,
)
from moe_comm.resharding.plan.reshard_plan import TensorSpec

ConversionTarget = Literal["same", "bf16", "fp16", "fp32", "fp8_block128", "mxfp8"]

DEFAULT_QUANTIZED = r"((?<!\.weights)_proj|\.experts\.\d+\.w[123])\.weight$"
"""Names of the weights that are quantized: of transformers, linear layers but for heads, routers and indexers' weights."""

_ROUTER_BIAS = re.compile(r"(e_score_correction|expert|router)_bias$")

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_BLOCK = 128
_CHUNK_ELEMENTS = 4 << 20
_CONFIG = "config.json"
_METHOD = "fp8"


@dataclasses.dataclass(frozen=True)
class NewFormat:
    """Numbers that tensors become.

    Args:
        target: "same" keeps everything. "bf16", "fp16", "fp32": floats of other dtypes, and FP8 weights with
            scale factors, become these. "fp8_block128" (float32 factors of 128 x 128) and "mxfp8" (E8M0
            factors of 1 x 32): weights are quantized, from bfloat16.
        quantized: Regular expression of the names of weights that are quantized.

    Raises:
        ValueError: It is no regular expression.
    """

    target: ConversionTarget
    quantized: str = DEFAULT_QUANTIZED

    def __post_init__(self) -> None:
        try:
            re.compile(self.quantized)
        except re.error as error:
            raise ValueError(
                f"quantized must be a regular expression, got {self.quantized!r}: {error}"
            ) from None

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of floats; None where they keep theirs."""
        return _DTYPES.get(self.target)

    @property
    def is_quantizing(self) -> bool:
        """True where some weights are to become FP8 with scale factors."""
        return self.target in ("fp8_block128", "mxfp8")

    def quantizes(self, name: str, spec: TensorSpec) -> bool:
        """Return whether a tensor becomes FP8 with scale factors.

        Raises:
            ValueError: It is to, and its sizes are none of the format; names it.
        """
        if not self.is_quantizing or not re.search(self.quantized, name):
            return False
        if spec.dtype not in NUMBERS:
            return False
        columns = spec.shape[-1] if len(spec.shape) >= 2 else 0
        if not columns or (self.target == "mxfp8" and columns % MXFP8_BLOCK[1]):
            raise ValueError(
                f"{name}: {self.target} needs a matrix"
                f"{' of a multiple of 32 columns' if self.target == 'mxfp8' else ''}, got {spec.shape}"
            )
        return True

    def quantize(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Data and scale factors of whole rows of blocks."""
        if self.target == "mxfp8":
            return quantize_mxfp8(values)
        return quantize_fp8_block(values, (_BLOCK, _BLOCK))

    @property
    def scale(self) -> tuple[tuple[int, int], torch.dtype]:
        """Blocks of the scale factors, and their dtype."""
        if self.target == "mxfp8":
            return MXFP8_BLOCK, torch.float8_e8m0fnu
        return (_BLOCK, _BLOCK), torch.float32


def convert_checkpoint(
    source: StoredCheckpoint,
    folder: Path,
    version: str,
    new_format: NewFormat,
    max_file_bytes: int = DEFAULT_FILE_BYTES,
    *,
    after: str | None = None,
) -> Iterator[int]:
    """Write a checkpoint anew, as a whole version of a folder; yield the bytes of every chunk that was read.

    A chunk has at most 4 Mi elements, or 128 rows of a weight that is quantized; no tensor is held whole.
    Other files are taken over; a `config.json` says the new dtype and format as transformers does.

    Args:
        source: Checkpoint that is read.
        folder: Folder of the versions.
        version: Name of the new one.
        new_format: Dtype and format that tensors get.
        max_file_bytes: Most bytes of tensors in a file.
        after: Version of the folder behind which it is entered; None for the latest.

    Raises:
        ValueError: A tensor cannot become this; names it. Or no tensor is quantized, and some are to be; or
            `config.json` tells of quantized weights in another way than as FP8.
        CheckpointError: As of `save_checkpoint`; then the version is not there.
    """
    check_version_name(version)
    specs = {
        name: TensorSpec(source.stored(name).shape, source.stored(name).dtype)
        for name in source.file_of
    }
    scales = {} if new_format.target == "same" else scale_names(specs)
    for name, scale in scales.items():
        block_of(name, specs[name].shape, specs[scale].shape, specs[scale].dtype)
        specs[name] = TensorSpec(specs[name].shape, torch.float32)
        del specs[scale]
    wholes: dict[str, TensorSpec] = {}
    for name, spec in specs.items():
        if new_format.target != "same" and (reason := lacks_scales(name, spec.dtype)):
            raise ValueError(f"{source.path_of(name)}: {name} is {spec.dtype}: {reason}")
        if new_format.quantizes(name, spec):
            block, dtype = new_format.scale
            wholes[name] = TensorSpec(spec.shape, torch.float8_e4m3fn)
            wholes[name + SCALE_SUFFIX] = TensorSpec(scale_shape(spec.shape, block), dtype)
        elif new_format.dtype is not None and spec.dtype in NUMBERS:
            is_rounded = new_format.dtype.itemsize < spec.dtype.itemsize
            is_kept = is_rounded and _ROUTER_BIAS.search(name)  # it would choose other experts
            wholes[name] = spec if is_kept else TensorSpec(spec.shape, new_format.dtype)
        else:
            # Values that were FP8 fit into bfloat16 whole.
            wholes[name] = TensorSpec(spec.shape, torch.bfloat16 if name in scales else spec.dtype)
    if new_format.is_quantizing and not any(name + SCALE_SUFFIX in wholes for name in specs):
        raise ValueError(
            f"{source.folder}: expected tensors of floats to quantize to {new_format.target}, whose names have "
            f"{new_format.quantized!r} in them, but of {len(specs)} names, such as {min(specs, default='')!r}, none has"
        )
    new = NewVersion(folder, version, after)
    try:
        save = secrets.token_hex(8)
        files = packed_files(wholes, dict.fromkeys(wholes, 0), max_file_bytes, file_metadata(save))
        kept = _kept_modules(specs, wholes)
        for each in source.chain:
            _take_over_files(each, new.path, new_format, kept)
        writer = FileWriter(new.path, files, 0)
        try:
            writer.make_files()
            checked: list[CheckedPart] = []
            with Reader(source) as reader:
                for name in sorted(specs, key=reader.place_of):
                    factors = reader.scales(name, scales[name]) if name in scales else None
                    is_quantized = new_format.quantizes(name, specs[name])
                    for box in _boxes(specs[name].shape, is_whole_rows=is_quantized):
                        checked += _convert_box(
                            reader,
                            writer,
                            name,
                            box,
                            factors,
                            wholes,
                            new_format if is_quantized else None,
                        )
                        sizes = (stop - start for start, stop in box)
                        yield num_elements(sizes) * source.stored(name).dtype.itemsize
            writer.sync()
        finally:
            writer.close()
        blocks = {}
        if new_format.target == "same":
            blocks[blocks_name(0, 1)] = take_over_sums(source, new.path / blocks_name(0, 1), save)
        finish_version(new, files, save, 1, checked, blocks)
    finally:
        new.close()


def compact_checkpoint(
    folder: str | os.PathLike[str],
    version: str | None = None,
    name: str | None = None,
    *,
    max_file_bytes: int = DEFAULT_FILE_BYTES,
) -> Path:
    """Write what a delta and those below it have as a whole version beside them. In one process, blocking.

    The new version takes the place behind the delta: it is the latest where the delta was. Nothing is removed.

    Args:
        folder: Folder of the versions.
        version: Name of the delta; None for the latest version.
        name: Name of the new version; None for that of the delta with "-whole".
        max_file_bytes: Most bytes of tensors in a file.

    Returns:
        The folder of the new version, which `from_pretrained` reads.

    Raises:
        ValueError: The version is whole already, or a name cannot be one.
        CheckpointError: As of `load_checkpoint` and `save_checkpoint`; then the new version is not there.
    """
    as_int("max_file_bytes", max_file_bytes, 1)
    compaction = Compaction(Path(folder), version, name)
    for _ in compaction.chunks(max_file_bytes):
        pass
    return compaction.path


class Compaction:
    """A delta that is to become a whole version, see `compact_checkpoint`."""

    def __init__(self, folder: Path, version: str | None, name: str | None) -> None:
        self._folder = folder
        self.source = open_checkpoint(find_checkpoint(folder, version))
        if not is_delta(self.source):
            raise ValueError(f"{self.source.folder} is a whole version, and no delta")
        self._old = self.source.folder.name
        self._new = check_version_name(f"{self._old}-whole" if name is None else name, "name")

    @property
    def path(self) -> Path:
        """Folder of the new version."""
        return self._folder / self._new

    def chunks(self, max_file_bytes: int) -> Iterator[int]:
        """Write it; yield the bytes of every chunk that was read."""
        return convert_checkpoint(
            self.source,
            self._folder,
            self._new,
            NewFormat("same"),
            max_file_bytes,
            after=self._old,
        )


def _boxes(shape: tuple[int, ...], *, is_whole_rows: bool) -> Iterator[Box]:
    """Parts of a tensor, in order; whole rows of blocks of each matrix where these are asked for."""
    whole: Box = tuple((0, size) for size in shape)
    if not is_whole_rows:
        for piece in cut_piece(Piece(whole, whole), _CHUNK_ELEMENTS):
            if num_elements(stop - start for start, stop in piece.dst_box):
                yield piece.dst_box
        return
    rows, columns = shape[-2:]
    step = max(1, _CHUNK_ELEMENTS // columns // _BLOCK) * _BLOCK
    for lead in torch.cartesian_prod(torch.arange(1), *map(torch.arange, shape[:-2])).view(
        -1, len(shape) - 1
    ):
        indices = [int(index) for index in lead[1:]]
        for start in range(0, rows, step):
            yield (
                *((index, index + 1) for index in indices),
                (start, min(rows, start + step)),
                (0, columns),
            )


def _convert_box(
    reader: Reader,
    writer: FileWriter,
    name: str,
    box: Box,
    factors: BlockScales | None,
    wholes: dict[str, TensorSpec],
    quantizing: NewFormat | None,
) -> list[CheckedPart]:
    """Read a box and write what it becomes."""
    spec = wholes[name]
    sizes = [stop - start for start, stop in box]
    values = torch.empty(
        sizes, dtype=spec.dtype if quantizing is None else torch.bfloat16, device="cpu"
    )
    reader.read(name, spec.shape, box, values, factors)
    if quantizing is None:
        return [writer.write(name, spec.shape, box, values)]
    data, scale = quantizing.quantize(values)
    rows = quantizing.scale[0][0]
    scale_name = name + SCALE_SUFFIX
    first = box[-2][0] // rows
    scale_box = (*box[:-2], (first, first + scale.shape[-2]), (0, scale.shape[-1]))
    return [
        writer.write(name, spec.shape, box, data),
        writer.write(scale_name, wholes[scale_name].shape, scale_box, scale),
    ]


def _kept_modules(specs: dict[str, TensorSpec], wholes: dict[str, TensorSpec]) -> list[str]:
    """Modules below which no weight is quantized, but some could be. transformers does not know them otherwise."""
    quantized = {name for name in specs if name + SCALE_SUFFIX in wholes}
    modules = {"lm_head"}  # also where it is tied, and not in the files
    for name, spec in specs.items():
        if len(spec.shape) >= 2 and spec.dtype in NUMBERS:
            module = re.sub(r"(\.experts)\.\d+\..*|\.[^.]*$", r"\1", name)
            # Of experts that are stacked, files and transformers have other names for the last module.
            modules |= {module, module.rpartition(".")[0]} if len(spec.shape) > 2 else {module}
    return sorted(
        modules - {name[: dot.start()] for name in quantized for dot in re.finditer(r"\.", name)}
    )


def _take_over_files(source: Path, target: Path, new_format: NewFormat, kept: list[str]) -> None:
    # Folders in it are of the checkpoint where a save has put them there.
    is_ours = (source / MANIFEST).exists()
    for path in sorted(source.rglob("*") if is_ours else source.iterdir()):
        name = path.relative_to(source)
        is_listed = len(name.parts) == 1 and is_tensor_file(path.name)
        if not path.is_file() or name.parts[0].startswith(".") or is_listed:
            continue
        with failed(path, "cannot be copied"):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            if str(name) == _CONFIG and new_format.target != "same":
                (target / name).write_text(_config(path, new_format, kept))
            else:
                shutil.copyfile(path, target / name)


def _config(path: Path, new_format: NewFormat, kept: list[str]) -> str:
    """Return a configuration of transformers that tells of the new numbers."""
    config = read_json(path)
    old_format = config.pop("quantization_config", None)
    method = old_format.get("quant_method") if isinstance(old_format, dict) else old_format
    if method not in (None, _METHOD):
        raise ValueError(
            f"{path}: expected no quantization_config or one with quant_method {_METHOD!r}, whose weights can "
            f"become {new_format.target}, got {shown(method)}"
        )
    if new_format.dtype is not None:
        old = "torch_dtype" if "torch_dtype" in config else "dtype"
        config[old] = str(new_format.dtype).removeprefix("torch.")
    if new_format.is_quantizing:
        block, dtype = new_format.scale
        config["quantization_config"] = {
            "quant_method": _METHOD,
            "activation_scheme": "dynamic",
            "weight_block_size": list(block),
            "modules_to_not_convert": kept,
            # transformers 5.24 (FineGrainedFP8Config) reads MXFP8 under these words.
            **({} if dtype == torch.float32 else {"scale_fmt": "ue8m0"}),
        }
    return json.dumps(config, indent=2)
