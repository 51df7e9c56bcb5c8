"""Every option of a call on two ranks that say different things, as its description promises."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_comm import Communicator, EpBuffer, EpConfig
from moe_comm.ep.options import DispatchOptions, describe_options
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.option_values import VALUES

CONFIG = EpConfig(num_experts=4, num_topk=2, hidden=128, num_max_tokens_per_rank=4)


def say_different_things(context: RankContext, backend: str) -> dict[str, str | None]:
    """Error of a dispatch on this rank where the ranks give the values of an option, by its name."""
    x, topk_idx = torch.ones(4, 128, dtype=torch.bfloat16), torch.tensor([[0, 3]] * 4)
    said: dict[str, str | None] = {}
    with (
        Communicator(context.group, backend=backend) as communicator,
        EpBuffer(communicator, CONFIG) as buffer,
    ):
        for name, values in VALUES.items():
            options: dict[str, Any] = {name: values.good[context.rank_idx]}
            if name == "masked_ranks":
                buffer.mask_ranks(options.pop(name))
            try:
                result = buffer.dispatch(x, topk_idx, **options)
                result.event.wait()
                # Equal values: seen at a glance, where there is one.
                buffer.combine(result.x, result.handle)
                said[name] = None
            except ValueError as error:
                said[name] = str(error)
    return said


@pytest.mark.parametrize("backend", ["host", "simt", "collective", "reference"])
def test_ranks_agree_on_an_option_as_described(backend: str) -> None:
    of_ranks = run_ranks(say_different_things, 2, backend, timeout_s=120.0)
    assert of_ranks[0] == of_ranks[1]
    for name, option in describe_options(DispatchOptions).items():
        said = of_ranks[0][name]
        if option.ranks != "equal":
            assert said is None, name
            continue
        first, second = VALUES[name].words[:2]
        assert f"{first}" in said.split(" on rank 0 ")[0], said
        assert f"{second}" in said.split(" on rank 0 ")[1], said
