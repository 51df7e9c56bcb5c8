"""Case of a measurement: shapes, routing and data that every process can make again from a seed."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import torch

from moe_comm.ep.call_options import DispatchOptions, check_options
from moe_comm.ep.config import EpConfig, Layout
from moe_comm.ep.placement import Placement, ReplicaRule
from moe_comm.ep.replica_spec import choose_slots
from moe_comm.ep.routing_trace import load_routing_trace
from moe_comm.ep.validation import check_dispatch, check_rows
from moe_comm.tensors.quantization import Quantization

APIS = ("native", "hybrid_ep")

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
# Rows are drawn in blocks, so that float32 temporaries stay small.
NUM_ROWS_PER_BLOCK = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchCase:
    """One configuration of the exchange; every process holds an equal copy.

    Args:
        num_ranks: Processes.
        num_tokens: Tokens of every rank, T.
        hidden: Elements per row, H.
        num_topk: Choices per token, K.
        num_experts: Experts over all ranks, E.
        dtype: Key of `DTYPES`.
        layout: Order of received rows.
        quantization: Rows are quantized while they are dispatched; None: they travel as they are.
        api: Interface that is timed, of `APIS`. "native": `EpBuffer`. "hybrid_ep":
            `moe_comm.fused_a2a`, routing map in.
        with_weights: Weights travel with the rows; always with "hybrid_ep".
        expert_alignment: Rows per local expert are padded to a multiple of this.
        skew: Exponent s of expert popularity: the i-th most popular expert is drawn with probability
            proportional to `1 / i ** s`. 0 is uniform, 1 is Zipf.
        routing: Trace file to replay instead of drawing; see `moe_comm.ep.routing_trace`.
        with_huge_page_x: x lies in 2 MiB pages instead of wherever torch puts it.
        reduced_local_ranks: Ranks of a node where combine adds rows on their node first
            (`EpConfig.node_reduction`); None where it does not.
        rank_reduction: Combine adds rows on their rank first (`EpConfig.rank_reduction`).
        check_messages: Messages between nodes carry checksums (`Communicator`).
        batch_idx: Index of the batch of the routing; of a trace, it has the tokens behind those of
            that many batches.
        placement: Placement of experts in slots, replicas included; None: each expert lies on one
            rank. The case without one is what it is compared with, and with the same bits.
        replica_rule: Rule by which a replica takes a row, if there is a placement.
        versus_given: A case with a placement is compared with the same slots handed in as ids.
        are_slots_given: The slots that `replica_rule` makes of choices are handed in as ids.
        ffn_hidden: Elements between the two matrices of an expert, where experts are timed.
        seed: Seed of data and routing.
    """

    num_ranks: int
    num_tokens: int
    hidden: int
    num_topk: int
    num_experts: int
    dtype: str = "bf16"
    layout: Layout = Layout.EXPERT_MAJOR
    quantization: Quantization | None = None
    api: str = "native"
    with_weights: bool = False
    expert_alignment: int = 1
    skew: float = 0.0
    routing: Path | None = None
    with_huge_page_x: bool = False
    reduced_local_ranks: int | None = None
    rank_reduction: bool = False
    check_messages: bool = False
    batch_idx: int = 0
    placement: Placement | None = None
    replica_rule: ReplicaRule = "balanced"
    versus_given: bool = False
    are_slots_given: bool = False
    ffn_hidden: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise ValueError(f"num_ranks must be >= 1, got {self.num_ranks}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.skew < 0.0:
            raise ValueError(f"skew must be >= 0, got {self.skew}")
        if self.routing is None and self.num_topk > self.num_experts:
            raise ValueError(
                f"num_topk must be <= num_experts to draw distinct experts, got {self.num_topk} > "
                f"{self.num_experts}"
            )
        if self.expert_alignment < 1:
            raise ValueError(f"expert_alignment must be >= 1, got {self.expert_alignment}")
        if self.api not in APIS:
            raise ValueError(f"api must be one of {', '.join(APIS)}, got {self.api!r}")
        if self.ffn_hidden < 1:
            raise ValueError(f"ffn_hidden must be >= 1, got {self.ffn_hidden}")
        if self.api == "hybrid_ep":
            self._check_hybrid_ep()
        if self.placement is not None:
            self._check_placement()
        elif self.versus_given or self.are_slots_given:
            raise ValueError("slots are given where there is a placement, got none")
        # The rules of the package itself: of shapes, and of the arguments of a call.
        config = self.config
        rows, _ = check_rows(torch.empty(0, self.hidden, dtype=self.torch_dtype), self.quantization)
        choices = torch.empty(0, self.num_topk, dtype=torch.int64)
        options = check_options(
            DispatchOptions(self.layout, self.expert_alignment, self.quantization)
        )
        check_dispatch(config, rows, choices, None, options, is_quantized=False)

    def _check_hybrid_ep(self) -> None:
        if self.layout is not Layout.EXPERT_MAJOR:
            raise ValueError(f"HybridEP permutes rows by expert, got layout {self.layout.name}")
        if self.is_reduced:
            which = "rank_reduction" if self.rank_reduction else "node_reduction"
            raise ValueError(f"HybridEP is compared unreduced, got {which}")
        if self.quantization is not None:
            raise ValueError(
                f"HybridEP is compared unquantized, got {self.quantization.format.name}"
            )
        if self.num_experts % self.num_ranks:
            raise ValueError(
                f"HybridEP has as many experts on every rank, got {self.num_experts} experts on "
                f"{self.num_ranks} ranks"
            )

    def _check_placement(self) -> None:
        for name, value, is_refused in (
            ("api", self.api, self.api == "hybrid_ep"),
            (
                "layout",
                self.layout.name,
                self.layout is Layout.RANK_MAJOR and not self.versus_given,
            ),
            ("rank_reduction", True, self.rank_reduction),
            ("node_reduction", True, self.reduced_local_ranks is not None),
        ):
            if is_refused:
                raise ValueError(
                    "sums with replicas are compared bit by bit with those without, which go by rank "
                    f"or have no slots with {name} {value}"
                )

    @property
    def is_reduced(self) -> bool:
        """Return whether combine adds rows where they lie first."""
        return self.rank_reduction or self.reduced_local_ranks is not None

    @property
    def sends_weights(self) -> bool:
        """Return whether weights travel with the rows."""
        return self.with_weights or self.api == "hybrid_ep"

    @property
    def baseline(self) -> tuple[str, BenchCase] | None:
        """Name and case of what this one is compared with in the same processes; None for nothing."""
        if self.versus_given and not self.are_slots_given:
            return "given", dataclasses.replace(self, are_slots_given=True)
        if self.placement is not None and not self.are_slots_given:
            plain = dataclasses.replace(self, placement=None, replica_rule="balanced")
            return "no_replicas", plain
        if self.check_messages:
            return "unchecked", dataclasses.replace(self, check_messages=False)
        if self.api == "hybrid_ep":
            return "native", dataclasses.replace(self, api="native", with_weights=True)
        if self.quantization is not None:
            return "unquantized", dataclasses.replace(self, quantization=None)
        if self.layout is Layout.LOW_LATENCY:
            return "expert_major", dataclasses.replace(self, layout=Layout.EXPERT_MAJOR)
        if self.is_reduced:
            plain = dataclasses.replace(self, reduced_local_ranks=None, rank_reduction=False)
            return "unreduced", plain
        return None

    @property
    def torch_dtype(self) -> torch.dtype:
        """Element type of rows."""
        return DTYPES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the input, of an expert output and of the sums."""
        return self.hidden * self.torch_dtype.itemsize

    @property
    def dispatched_row_bytes(self) -> int:
        """Bytes of one row as it is dispatched, with its scale factors."""
        if self.quantization is None:
            return self.row_bytes
        scales_bytes = (
            self.quantization.num_scales(self.hidden) * self.quantization.sf_dtype.itemsize
        )
        return self.quantization.row_bytes(self.hidden) + scales_bytes

    @property
    def config(self) -> EpConfig:
        """Configuration of the buffer."""
        return EpConfig(
            num_experts=self.num_experts,
            num_topk=self.num_topk,
            hidden=self.hidden,
            num_max_tokens_per_rank=self.num_tokens,
            dtype=self.torch_dtype,
            node_reduction=self.reduced_local_ranks is not None,
            rank_reduction=self.rank_reduction,
            placement=self.placement,
            replica_rule="given" if self.are_slots_given else self.replica_rule,
        )

    @property
    def place_rank(self) -> torch.Tensor:
        """The rank of every slot, without a placement of every expert: int64 `[P]`."""
        return self.config.resolve_expert_rank(self.num_ranks).to(torch.int64)

    @property
    def place_expert(self) -> torch.Tensor:
        """The expert in every slot, -1 for an empty one; without a placement all: int64 `[P]`."""
        if self.placement is None:
            return torch.arange(self.num_experts)
        return torch.tensor(self.placement.slot_expert)


@functools.lru_cache(maxsize=64)
def make_topk_idx(case: BenchCase, rank_idx: int) -> torch.Tensor:
    """Choices of one rank, drawn or replayed; the same in every process.

    Returns:
        int64 `[num_tokens, num_topk]`.

    Raises:
        ValueError: The trace's top-k or experts differ from the case's.
    """
    source_idx = case.batch_idx * case.num_ranks + rank_idx
    if case.routing is not None:
        trace = load_routing_trace(case.routing)
        if (trace.num_topk, trace.num_experts) != (case.num_topk, case.num_experts):
            raise ValueError(
                f"{case.routing} was recorded with top-{trace.num_topk} of {trace.num_experts} experts, "
                f"the case has top-{case.num_topk} of {case.num_experts}"
            )
        return trace.rank_topk_idx(source_idx, case.num_tokens)
    popularity = torch.Generator().manual_seed(case.seed)
    place = torch.randperm(case.num_experts, generator=popularity).to(torch.float64) + 1.0
    log_weight = -case.skew * torch.log(place)
    draw = torch.Generator().manual_seed(_mix(case.seed, source_idx, 1))
    uniform = torch.rand(
        case.num_tokens, case.num_experts, generator=draw, dtype=torch.float64
    ).clamp_(min=1e-300)
    # The K largest of log w + Gumbel noise are K draws without replacement with weights w.
    gumbel = -torch.log(-torch.log(uniform))
    return torch.topk(log_weight + gumbel, case.num_topk, dim=1).indices.contiguous()


def make_places(case: BenchCase, rank_idx: int) -> torch.Tensor:
    """Return the slots that the choices of one rank go to, by the definition; experts without a placement.

    Returns:
        int64 `[num_tokens, num_topk]`.
    """
    if case.placement is None:
        return make_topk_idx(case, rank_idx)
    return _all_slots(dataclasses.replace(case, are_slots_given=False))[rank_idx]


@functools.lru_cache(maxsize=4)
def _all_slots(case: BenchCase) -> list[torch.Tensor]:
    """The slots of the choices of every rank."""
    assert case.placement is not None
    topk_idx = [make_topk_idx(case, rank_idx) for rank_idx in range(case.num_ranks)]
    return choose_slots(topk_idx, case.placement, case.replica_rule, case.num_ranks)


def make_topk_weights(case: BenchCase, rank_idx: int) -> torch.Tensor:
    """Weights of the choices of one rank, the same in every process.

    Returns:
        float32 `[num_tokens, num_topk]`, in `[0, 1)`.
    """
    draw = torch.Generator().manual_seed(_mix(case.seed, rank_idx, 3))
    return torch.rand(case.num_tokens, case.num_topk, generator=draw)


def make_routing_map(case: BenchCase, rank_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Choices and weights of one rank in the dense form that HybridEP takes.

    Returns:
        bool `[num_tokens, num_experts]` and float32 `[num_tokens, num_experts]`, 0 where not chosen.

    Raises:
        ValueError: A token chooses an expert twice, which a map cannot say.
    """
    topk_idx = make_topk_idx(case, rank_idx)
    token_idx, topk_pos = (topk_idx >= 0).nonzero(as_tuple=True)
    expert_idx = topk_idx[token_idx, topk_pos]
    routing_map = torch.zeros(case.num_tokens, case.num_experts, dtype=torch.bool)
    routing_map[token_idx, expert_idx] = True
    if int(routing_map.sum()) != token_idx.numel():
        raise ValueError(f"rank {rank_idx} has a token that chooses an expert twice")
    probs = torch.zeros(case.num_tokens, case.num_experts)
    probs[token_idx, expert_idx] = make_topk_weights(case, rank_idx)[token_idx, topk_pos]
    return routing_map, probs


def make_x(case: BenchCase, rank_idx: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """Rows of one rank: standard normal, so that they have the entropy of real activations.

    Write bandwidth depends on the data (zero lines stream up to twice as fast), so never zeros.

    Args:
        case: The case.
        rank_idx: Rank whose rows are made.
        out: `[num_tokens, hidden]` to fill, or None.

    Returns:
        `[num_tokens, hidden]`.
    """
    if out is None:
        out = torch.empty(case.num_tokens, case.hidden, dtype=case.torch_dtype)
    draw = torch.Generator().manual_seed(_mix(case.seed, rank_idx, 2))
    wide = torch.float64 if case.torch_dtype == torch.float64 else torch.float32
    for start in range(0, case.num_tokens, NUM_ROWS_PER_BLOCK):
        block = out[start : start + NUM_ROWS_PER_BLOCK]
        block.copy_(torch.randn(block.shape, generator=draw, dtype=wide))
    return out


def _mix(seed: int, rank_idx: int, purpose: int) -> int:
    return (seed * 1_000_003 + rank_idx) * 8 + purpose
