"""A rank of SGLang on CPUs, as far as weights go: its model, its loader and its `WeightUpdater`, in a process.

`SglangServer` starts one process a rank; each answers lines of JSON on its standard input. Nothing
generates: SGLang's wheel has no kernels for CPUs. What it imports and this does not use is stood in
for: torchvision, and `vllm._custom_ops.rotary_embedding`.
"""

from __future__ import annotations

import base64
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import subprocess
import sys
import types
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import torch

from moe_comm.resharding.clients.sglang import LOADER

_ABSENT = ("torchvision", "vllm")


class SglangServer:
    """Ranks, as many as `tp_size`, once all have the model.

    Args:
        model: A folder that has the configuration of a model.
        tp_size: Ranks of tensor parallelism, without expert parallelism.
    """

    def __init__(self, model: Path, tp_size: int) -> None:
        meeting = f"file://{model}/meeting_{uuid.uuid4().hex}"
        self.ranks = [
            subprocess.Popen(
                [sys.executable, "-P", __file__, str(model), str(tp_size), str(rank), meeting],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(tp_size)
        ]
        self.call("ready")

    def call(self, what: str, **said: Any) -> list[Any]:
        """Every rank's answer.

        Raises:
            ChildProcessError: A rank has ended.
        """

        def one(rank: subprocess.Popen[str]) -> Any:
            assert rank.stdin is not None
            assert rank.stdout is not None
            try:
                print(json.dumps({"call": what, **said}), file=rank.stdin, flush=True)
                return json.loads(rank.stdout.readline())
            except (BrokenPipeError, json.JSONDecodeError) as error:
                raise ChildProcessError(f"a rank of SGLang has ended: {rank.wait()}") from error

        with ThreadPoolExecutor(len(self.ranks)) as pool:
            return list(pool.map(one, self.ranks))

    def post(self, body: dict[str, Any]) -> dict[str, Any]:
        """Do as `POST /update_weights_from_tensor`."""
        told = self.call("update", body=body)
        return {"success": all(each[0] for each in told), "message": str(told)}

    def close(self) -> None:
        """End the processes."""
        for rank in self.ranks:
            rank.kill()
            rank.wait()


class _Absent(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules that are imported and not used, where they are not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] not in _ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing."""


def _make(model: str, tp_size: int, rank: int, meeting: str) -> tuple[Any, Any]:
    """The model of a rank, and its updater."""
    utils = importlib.import_module("transformers.utils")
    importlib.import_module("transformers.image_utils")
    assert not utils.is_torchvision_available()
    sys.meta_path.append(_StandIns())
    arguments = importlib.import_module("sglang.srt.server_args").ServerArgs(
        model_path=model,
        device="cpu",
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        tp_size=tp_size,
        attention_backend="torch_native",
        sampling_backend="pytorch",
        custom_weight_loader=[LOADER],
    )
    context = importlib.import_module("sglang.srt.runtime_context")
    ranks = context.SpawnRanks(world_rank=rank, gpu_id=rank)
    context.publish(arguments, role="scheduler", ranks=ranks)
    state = importlib.import_module("sglang.srt.distributed.parallel_state")
    state.init_distributed_environment(
        world_size=tp_size,
        rank=rank,
        local_rank=rank,
        distributed_init_method=meeting,
        backend="gloo",
    )
    state.initialize_model_parallel()
    config = importlib.import_module("sglang.srt.configs.model_config").ModelConfig
    model_config = config.from_server_args(arguments)
    wanted = model_config.hf_config
    module = importlib.import_module(f"sglang.srt.models.{wanted.model_type}")
    made = getattr(module, wanted.architectures[0])(wanted)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.zero_()
    updater = importlib.import_module(
        "sglang.srt.model_executor.model_runner_components.weight_updater"
    ).WeightUpdater(
        tp_rank=rank,
        device="cpu",
        gpu_id=rank,
        model_config=model_config,
        custom_weight_loaders=context.get_model().custom_weight_loader,
        get_model=lambda: made,
        update_model_fields=None,
        recapture_cuda_graph=None,
        get_model_runner=None,
    )
    return made, updater


def _difference(model: Any, path: str) -> str:
    """The first parameter that is not what SGLang's own loading of a file makes of it."""
    held = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model.load_weights(torch.load(path, weights_only=True).items())
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(held[name])
    return next((name for name in held if not torch.equal(held[name], expected[name])), "")


def main() -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    model_path, tp_size, rank, meeting = sys.argv[1:]
    model, updater = _make(model_path, int(tp_size), int(rank), meeting)
    deserialize = importlib.import_module("sglang.srt.utils").MultiprocessingSerializer.deserialize
    for line in sys.stdin:
        said = json.loads(line)
        answer: Any = None
        if said["call"] == "difference":
            answer = _difference(model, said["path"])
        elif said["call"] == "update":
            body = said["body"]
            named = deserialize(base64.b64decode(body["serialized_named_tensors"][int(rank)]))
            updater.begin_weight_update()
            answer = updater.update_weights_from_tensor(named, body["load_format"])
            updater.end_weight_update(run_post_load=False)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
