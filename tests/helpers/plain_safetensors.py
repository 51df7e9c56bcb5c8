"""Safetensors files read by the letter of the format, with nothing of the package."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    """The header and the bytes behind it."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    assert length % 8 == 0, f"{path}: the data begin at {8 + length}, which no multiple of 8 is"
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def plain_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder, by its index."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found: dict[str, torch.Tensor] = {}
    total = 0
    for name in sorted(set(index["weight_map"].values())):
        header, data = header_of(folder / name)
        assert header.pop("__metadata__")["format"] == "pt"
        end = 0
        for tensor, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            assert index["weight_map"][tensor] == name
            start, stop = entry["data_offsets"]
            dtype = DTYPES[entry["dtype"]]
            assert start == end, f"{tensor} begins at {start}, behind {end}"
            assert start % dtype.itemsize == 0
            raw = torch.frombuffer(bytearray(data[start:stop]) or bytearray(8), dtype=torch.uint8)
            found[tensor] = raw[: stop - start].view(dtype).reshape(entry["shape"])
            end = stop
        assert end == len(data)
        total += end
    assert total == index["metadata"]["total_size"]
    assert found.keys() == index["weight_map"].keys()
    return found


def write_plain(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write a file as other tools do, whose headers need not be padded."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    names = {dtype: name for name, dtype in DTYPES.items()}
    parts, offset = [], 0
    for name, tensor in tensors.items():
        data = tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        entries[name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(data)],
        }
        parts.append(data)
        offset += len(data)
    text = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))
