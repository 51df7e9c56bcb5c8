"""vLLM on CPUs with expert parallelism by this package: its API server, and the manager in its groups.

`make test-vllm` installs vLLM and runs this. The oracle is the same server on one rank.
"""

from __future__ import annotations

import dataclasses
import os
import urllib.error
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("vllm", minversion="0.32")

from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.utils import StatelessProcessGroup

from benchmarks import clients, vllm_experts
from moe_comm import ExpertTables, Placement, plan_placement
from moe_comm.dispatcher.vllm_manager import VllmAll2AllManager
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.vllm_servers import VOCABULARY, save_model, serving

ASKED = {"MOE_COMM_VLLM": "1"}
TWO_RANKS = ("--data-parallel-size", "2", "--enable-expert-parallel")
NUM_TOKENS = 24
# Eight, of different lengths, for two ranks that take turns.
PROMPTS = [[(7 * idx + 3 * pos) % VOCABULARY for pos in range(2 + 3 * idx)] for idx in range(8)]

# vLLM loads it in every process: rank 1 ends before it sends its tokens to experts, once there is a
# file.
DEADLY_PLUGIN = """
import os, signal
from pathlib import Path

def register():
    from moe_comm.dispatcher.vllm import VllmPrepareAndFinalize
    prepare = VllmPrepareAndFinalize.prepare_async
    def prepare_or_die(self, *args, **kwargs):
        if self.buffer.communicator.rank_idx == 1 and Path(os.environ["DIES_WHEN"]).exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return prepare(self, *args, **kwargs)
    VllmPrepareAndFinalize.prepare_async = prepare_or_die
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokens_of_one_rank(
    checkpoint: str, tmp_path_factory: pytest.TempPathFactory
) -> list[list[int]]:
    """Tokens of a server whose environment asks for nothing."""
    log = tmp_path_factory.mktemp("one") / "log"
    with serving(checkpoint, log, "--enforce-eager", environment={}) as server:
        tokens = server.generate(PROMPTS, NUM_TOKENS)
    assert [len(answer) for answer in tokens] == [NUM_TOKENS] * len(PROMPTS)
    # Answers that say nothing of the prompt would prove nothing.
    assert len({tuple(answer) for answer in tokens}) == len(PROMPTS)
    return tokens


def test_no_balancer_moves_experts_on_cpus() -> None:
    """Its router would leave ids logical there: a release that balances must map them first."""
    asked = {"enable_expert_parallel": True, "data_parallel_size": 2}
    ParallelConfig(**asked)
    with pytest.raises(ValueError, match="load balancing is only supported on"):
        ParallelConfig(**asked, enable_eplb=True)


@pytest.fixture
def deadly(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """The file that rank 1 dies of, and the environment in which it does."""
    (tmp_path / "deadly.py").write_text(DEADLY_PLUGIN)
    metadata = tmp_path / "deadly-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: deadly\nVersion: 1\n")
    entry = "[vllm.general_plugins]\ndeadly = deadly:register\n"
    (metadata / "entry_points.txt").write_text(entry)
    when = tmp_path / "now"
    return when, {"PYTHONPATH": str(tmp_path), "DIES_WHEN": str(when)}


@pytest.mark.client(
    "vLLM",
    way="`ExpertTables`",
    ran="tables of its default policy, and placements as its maps",
)
def test_tables_of_the_policy_and_back() -> None:
    from vllm.distributed.eplb.eplb_state import compute_logical_maps
    from vllm.distributed.eplb.policy.default import DefaultEplbPolicy

    draw = torch.Generator().manual_seed(5)
    loads = torch.rand(4, 16, generator=draw) ** 3 * 100
    physical = DefaultEplbPolicy.rebalance_experts(loads, 24, 1, 1, 4)
    tables = ExpertTables(physical, *compute_logical_maps(physical, 16))
    placements = tables.placements(4)
    for placement, of_layer in zip(placements, physical, strict=True):
        assert placement == Placement.of_table(of_layer, 4, 16)
    planned = plan_placement(loads, 4, 6, present=placements)
    ours = ExpertTables.of_placements(planned, num_max_replicas=9)
    listed, counts = compute_logical_maps(ours.physical_to_logical_map, 16)
    assert torch.equal(ours.logical_replica_count, counts)
    assert torch.equal(ours.logical_to_all_physical_map[..., : listed.shape[2]], listed)
    assert int((ours.logical_to_all_physical_map[..., listed.shape[2] :] != -1).sum()) == 0


@pytest.mark.client(
    "vLLM",
    way="`MOE_COMM_VLLM=1`",
    ran="API server, 2 data-parallel ranks, compiled: greedy tokens",
)
def test_two_ranks_give_the_tokens_of_one(
    checkpoint: str, tokens_of_one_rank: list[list[int]], tmp_path: Path
) -> None:
    """As torch.compile makes them, which is vLLM's default."""
    with serving(checkpoint, tmp_path / "log", *TWO_RANKS, environment=ASKED) as server:
        assert server.generate(PROMPTS, NUM_TOKENS) == tokens_of_one_rank
        assert "Using VllmPrepareAndFinalize" in server.said()


@pytest.mark.client(
    "vLLM",
    way="`MOE_COMM_VLLM=1`",
    ran="the same, eager, and a rank that is killed",
)
def test_a_rank_that_is_killed_is_named(
    checkpoint: str,
    tokens_of_one_rank: list[list[int]],
    deadly: tuple[Path, dict[str, str]],
    tmp_path: Path,
) -> None:
    when, environment = deadly
    arguments = (*TWO_RANKS, "--enforce-eager")
    with serving(
        checkpoint, tmp_path / "log", *arguments, environment=ASKED | environment
    ) as server:
        assert server.generate(PROMPTS, NUM_TOKENS) == tokens_of_one_rank
        when.touch()
        with pytest.raises(urllib.error.HTTPError):
            server.generate(PROMPTS, NUM_TOKENS)
        assert server.hears("PeerFailedError: rank 1 died while rank 0 waited (dispatch"), (
            server.said()[-4000:]
        )


@pytest.mark.client(
    "vLLM",
    way="`MOE_COMM_VLLM=1`",
    ran="the same without expert parallelism",
)
def test_whole_batches_are_gathered_where_experts_are_cut(
    checkpoint: str, tokens_of_one_rank: list[list[int]], tmp_path: Path
) -> None:
    """Without `--enable-expert-parallel` every rank has a part of every expert."""
    arguments = ("--data-parallel-size", "2", "--enforce-eager")
    with serving(checkpoint, tmp_path / "log", *arguments, environment=ASKED) as server:
        assert server.generate(PROMPTS, NUM_TOKENS) == tokens_of_one_rank
        assert "Using MoEPrepareAndFinalizeNaiveDPEPModular" in server.said()


def test_unasked_vllm_is_as_it_is_alone(checkpoint: str, tmp_path: Path) -> None:
    arguments = (*TWO_RANKS, "--enforce-eager")
    with serving(checkpoint, tmp_path / "log", *arguments, environment={}) as server:
        with pytest.raises(urllib.error.HTTPError):
            server.generate(PROMPTS[:1], NUM_TOKENS)
        said = server.said()
        assert "all_gatherv" in said
        assert "NotImplementedError" in said
        assert "Using MoEPrepareAndFinalizeNaiveDPEPModular" in said


def in_groups_of_vllm(context: RankContext, identifier: str) -> None:
    """The manager says of its groups what vLLM says."""
    # Does what a worker of vLLM does: ranks on this machine name the memory that they share by it.
    os.environ["VLLM_DIST_IDENT"] = identifier  # noqa: TID251
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(
            context.num_ranks, context.rank_idx, "env://", context.rank_idx, "gloo"
        )
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        tp_group = parallel_state.get_tp_group()
        manager = VllmAll2AllManager(tp_group.cpu_group)
        assert manager.tp_group is tp_group
        assert manager.dp_group is parallel_state.get_dp_group()
        assert (manager.dp_rank, manager.dp_world_size) == (0, 1)
        assert (manager.rank, manager.world_size) == (context.rank_idx, 2)
        assert manager.internode is False
        assert not manager.support_fault_tolerance
        with pytest.raises(NotImplementedError, match="1 data-parallel ranks share their tokens"):
            manager.dispatch_router_logits(torch.ones(1, 8), torch.ones(1, 4))
        manager.destroy()
        parallel_state.destroy_model_parallel()


@pytest.mark.client(
    "vLLM",
    way="`VllmAll2AllManager`",
    ran="in the groups of vLLM",
)
def test_the_manager_has_the_groups_of_vllm() -> None:
    run_ranks(in_groups_of_vllm, 2, str(os.getpid()), fresh=True)


def over_a_store(context: RankContext, path: str) -> list[float]:
    """As in vLLM's elastic groups, of which torch.distributed knows none."""
    mine, num_ranks = context.rank_idx, context.num_ranks
    store = dist.FileStore(path, num_ranks)
    store_group = StatelessProcessGroup(mine, num_ranks, dist.PrefixStore("vllm", store))
    unknown = dist.ProcessGroup(dist.PrefixStore("torch", store), mine, num_ranks)
    manager = VllmAll2AllManager(unknown, store_group)
    assert (manager.cpu_group, manager.tcp_store_group) == (unknown, store_group)
    rows, _ = manager.dispatch_router_logits(torch.full((mine + 1, 8), mine), torch.ones(mine + 1))
    manager.destroy()
    other = dist.ProcessGroup(dist.PrefixStore("other", store), 0, 1)
    with pytest.raises(
        ValueError, match="rank 0: cpu_group says rank 0 of 1, tcp_store_group rank"
    ):
        VllmAll2AllManager(other, store_group)
    return rows[:, 0].tolist()


@pytest.mark.client(
    "vLLM",
    way="`VllmAll2AllManager`",
    ran="over the store of vLLM",
)
def test_ranks_meet_in_a_store(tmp_path: Path) -> None:
    assert run_ranks(over_a_store, 2, str(tmp_path / "store"), fresh=True) == [[0, 1, 1]] * 2


def test_the_benchmark_checks_and_times_every_way() -> None:
    framework = vllm_experts.FRAMEWORK
    case = dataclasses.replace(
        framework.case, num_tokens=24, hidden=64, num_experts=8, num_topk=2, num_repeats=2
    )
    rows = clients.bench(framework, case)
    ways = (vllm_experts.ORACLE, *framework.case.clients)
    ops = [f"vllm_{phase}" for phase in ("prepare", "experts", "finalize", "layer")]
    assert {(row.extra["client"], row.op) for row in rows} == {(w, op) for w in ways for op in ops}
