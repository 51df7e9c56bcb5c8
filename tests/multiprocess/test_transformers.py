"""Models of transformers with the experts exchanged by this package.

`make test-transformers` installs transformers and runs this. The oracles are its own implementation of
expert parallelism over Gloo, `"all_to_all"`, and the same model in one process.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers.distributed.expert_parallel", reason="there is no transformers")

from transformers import AutoModelForCausalLM

from moe_comm.dispatcher import transformers as dispatcher
from moe_comm.testing import RankContext, run_ranks
from tests.helpers import transformers_models as models
from tests.helpers.transformers_models import Layout

LAYOUTS = {
    2: [Layout(2), Layout(2, 2)],
    # One of the middle two has FSDP over efsdp, and both have EP groups with several TP groups.
    4: [Layout(4), Layout(2), Layout(2, 2), Layout(4, 2), Layout(4, 4)],
}
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The folder of every model; made when asked for."""
    made: dict[str, str] = {}

    class Folders(dict[str, str]):
        def __missing__(self, name: str) -> str:
            self[name] = models.save_model(name, Path(tmp_path_factory.mktemp(name)))
            return self[name]

    return Folders(made)


def train_and_generate(context: RankContext, checkpoint: str, layouts: list[Layout]) -> list[str]:
    """What differs from the other implementation and from one process; batches differ in length."""
    dispatcher.register()
    alone = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    faults = []
    for layout in layouts:
        num_batches = context.num_ranks // layout.tp_size
        batch_idx = context.rank_idx // layout.tp_size
        batches = [models.batch(idx, 7 + 2 * idx) for idx in range(num_batches)]
        alone.zero_grad()
        alone.train()
        losses = [alone(input_ids=ids, labels=ids).loss for ids in batches]
        (sum(losses) / num_batches).backward()
        alone.eval()
        tokens = batches[batch_idx]
        expected = {
            "loss": losses[batch_idx].detach(),
            "generated": alone.generate(tokens, max_new_tokens=6, do_sample=False),
            **models.gradients(alone),
        }
        found = {}
        for implementation in ("all_to_all", "moe_comm"):
            model = models.load(checkpoint, implementation, context, layout)
            model.train()
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            grads = models.gradients(model)
            model.eval()
            generated = model.generate(tokens, max_new_tokens=6, do_sample=False)
            found[implementation] = {"loss": loss.detach(), "generated": generated, **grads}
        for oracle, values in (("all_to_all", found["all_to_all"]), ("one process", expected)):
            if values.keys() != found["moe_comm"].keys():
                faults.append(f"{layout}: {oracle} has other gradients")
            for name in values.keys() & found["moe_comm"].keys():
                ours = found["moe_comm"][name]
                error = (
                    models.relative_error(ours, values[name])
                    if ours.shape == values[name].shape
                    else float("inf")
                )
                if not error <= (0 if name == "generated" else TOLERANCE):
                    faults.append(f"{layout}: {name} is off {oracle} by {error:.2g}")
    return faults


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", models.CONFIGS)
def test_losses_gradients_and_text_are_those_of_all_to_all_and_of_one_process(
    checkpoints: dict[str, str], name: str, num_ranks: int
) -> None:
    faults = run_ranks(train_and_generate, num_ranks, checkpoints[name], LAYOUTS[num_ranks])
    assert [text for rank in faults for text in rank] == []
