#!/usr/bin/env bash
# torch.distributed.checkpoint writes and reads half a tensor, and other numbers, without a word. Linux, Python
# 3.11, one process.
#
#   torch 2.13.0, one process:
#       save of a tensor of 4 elements whose chunks are elements 0 and 1 returns. On two ranks the same is a
#       ValueError ("invalid fill"): the check of the plan looks at the volume only where there are several plans.
#       load of it into 4 elements of -1 returns and gives [0, 1, -1, -1].
#       load of float32 [1.75, 300, -2.5] into an int8 tensor returns, and gives 1 and -2 for the first and the last.
#       Only names and the shapes of whole tensors are compared.
#
# So whoever wants to know whether a checkpoint was loaded whole compares chunks and dtypes in a planner. Ends
# with 1 where that has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}

"$python" -m pip install --quiet --disable-pip-version-check --target "$folder" torch==2.13.0 numpy==2.4.6
cat >"$folder/checkpoint_holes.py" <<'PYTHON'
import sys
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

warnings.simplefilter("ignore")


class FirstHalf(torch.Tensor):
    """Two of four elements, by the protocol that DTensor has as well."""

    def __create_write_items__(self, fqn, _):
        values = TensorProperties.create_from_tensor(torch.empty(2))
        data = TensorWriteData(ChunkStorageMetadata(torch.Size([0]), torch.Size([2])), values, self.size())
        return [WriteItem(MetadataIndex(fqn, [0]), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self):
        return [ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))]

    def __get_tensor_shard__(self, _):
        return torch.arange(2.0)


assert torch.__version__.split("+")[0] == "2.13.0", torch.__version__
half = torch.empty(4).as_subclass(FirstHalf)
numbers = torch.tensor([1.75, 300, -2.5])
dcp.save({"half": half, "numbers": numbers}, checkpoint_id=sys.argv[1], no_dist=True)
into = {"half": torch.full((4,), -1.0), "numbers": torch.zeros(3, dtype=torch.int8)}
dcp.load(into, checkpoint_id=sys.argv[1], no_dist=True)
print(into)
assert into["half"].tolist() == [0, 1, -1, -1], into
assert into["numbers"][::2].tolist() == [1, -2], into
PYTHON
PYTHONPATH="$folder" "$python" "$folder/checkpoint_holes.py" "$folder/checkpoint"
echo "as described"
