"""Checkpoints: models to and from disk, by what every rank holds of each whole tensor.

- `save`, `load`: safetensors files by the names on disk, in versions that are whole or not there, laid out by
  `packed_files`; `deltas` of what changed in `blocks`, `chains` of these opened as one, `convert` to whole ones and other numbers.
- `dcp`: what `torch.distributed.checkpoint` saves and loads, over `held_tensors`, `entries` and `chunked_tensor`;
  `load_planner` and `mapped_reader` go with it.
"""

from moe_comm.checkpoints.chunked_tensor import ChunkedTensor
from moe_comm.checkpoints.convert import compact_checkpoint
from moe_comm.checkpoints.dcp import CheckpointState
from moe_comm.checkpoints.load import load_checkpoint
from moe_comm.checkpoints.load_planner import CheckingLoadPlanner
from moe_comm.checkpoints.mapped_reader import MappedFileReader
from moe_comm.checkpoints.placed_experts import placed_views
from moe_comm.checkpoints.pretrained import load_pretrained
from moe_comm.checkpoints.save import save_checkpoint

__all__ = [
    "CheckingLoadPlanner",
    "CheckpointState",
    "ChunkedTensor",
    "MappedFileReader",
    "compact_checkpoint",
    "load_checkpoint",
    "load_pretrained",
    "placed_views",
    "save_checkpoint",
]
