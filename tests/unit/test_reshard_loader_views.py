"""An engine's own loader as the map of its tensors: small loaders in the style of vLLM's and SGLang's."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from moe_comm.resharding.describe.checkpoint_views import CheckpointView
from moe_comm.resharding.describe.loader_views import LoaderViews, TensorSpec, loader_views

Weights = Iterator[tuple[str, torch.Tensor]]
Loader = Callable[[Weights], object]

HIDDEN, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS = 12, 4, 4, 2
NUM_EXPERTS, INTERMEDIATE = 6, 10
VOCABULARY, PADDED_VOCABULARY = 21, 32


class Engine:
    """Parameters of one rank, with loaders as engines write them.

    Args:
        tp_rank: Of `tp_size` tensor-parallel ranks; there are more of them than key heads.
        experts: Global index of every local expert.
    """

    def __init__(self, tp_rank: int = 0, tp_size: int = 1, experts: tuple[int, ...] = ()) -> None:
        self.tp_rank, self.tp_size = tp_rank, tp_size
        self.experts = experts or tuple(range(NUM_EXPERTS))
        self.num_heads = NUM_HEADS // tp_size
        self.num_kv_heads = max(1, NUM_KV_HEADS // tp_size)
        rows = (self.num_heads + 2 * self.num_kv_heads) * HEAD_DIM
        num_local = len(self.experts)
        self.parameters = {
            "embed": self._made(PADDED_VOCABULARY, HIDDEN),
            "qkv": self._made(rows, HIDDEN),
            "w13": self._made(num_local, 2 * INTERMEDIATE, HIDDEN),
            "w2": self._made(num_local, HIDDEN, INTERMEDIATE),
            "scale": self._made(1),
        }

    @staticmethod
    def _made(*shape: int) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.full(shape, 7.0), requires_grad=True)

    def load(self, weights: Weights) -> None:
        for name, loaded in weights:
            if name == "embed.weight":
                self.load_embedding(self.parameters["embed"], loaded)
            elif name == "scale":
                self.parameters["scale"].data.fill_(loaded.item())
            elif name.endswith("_proj.weight") and ".experts." not in name:
                self.load_heads(self.parameters["qkv"], loaded, name[0])
            else:
                _, _, expert, projection, _ = name.split(".")
                shard = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}[projection]
                parameter = self.parameters["w2" if shard == "w2" else "w13"]
                self.load_expert(parameter, loaded, shard, int(expert))

    def load_embedding(self, parameter: torch.Tensor, loaded: torch.Tensor) -> None:
        loaded = loaded.narrow(0, 0, VOCABULARY)
        parameter[: loaded.shape[0]].data.copy_(loaded)
        parameter[loaded.shape[0] :].data.fill_(0)

    def load_heads(self, parameter: torch.Tensor, loaded: torch.Tensor, shard: str) -> None:
        own = self.num_heads if shard == "q" else self.num_kv_heads
        before = {"q": 0, "k": self.num_heads, "v": self.num_heads + self.num_kv_heads}[shard]
        total = NUM_HEADS if shard == "q" else NUM_KV_HEADS
        part = self.tp_rank * total // self.tp_size
        loaded = loaded.narrow(0, part * HEAD_DIM, own * HEAD_DIM)
        parameter.data.narrow(0, before * HEAD_DIM, own * HEAD_DIM).copy_(loaded)

    def load_expert(
        self, parameter: torch.Tensor, loaded: torch.Tensor, shard: str, expert: int
    ) -> None:
        if expert not in self.experts:
            return
        data = parameter.data[self.experts.index(expert)]
        if shard != "w2":
            data = data.narrow(0, 0 if shard == "w1" else INTERMEDIATE, INTERMEDIATE)
        data.copy_(loaded)

    def load_fused(self, weights: Weights) -> None:
        """Experts stacked on disk, [experts, hidden, 2 x intermediate], gate and up in turns."""
        for name, loaded in weights:
            if name == "experts.down_proj":
                stacked = loaded.transpose(-1, -2).contiguous()
                for local, expert in enumerate(self.experts):
                    self.parameters["w2"].data[local] = stacked[expert]
            elif name == "experts.gate_up_proj":
                stacked = loaded.permute(0, 2, 1)
                for half, start in ((slice(0, None, 2), 0), (slice(1, None, 2), INTERMEDIATE)):
                    for local, expert in enumerate(self.experts):
                        rows = self.parameters["w13"].data[local, start : start + INTERMEDIATE]
                        rows.copy_(stacked[expert][half])

    def targets(self, *names: str) -> list[tuple[str, torch.Tensor]]:
        return [(name, self.parameters[name]) for name in names or self.parameters]


def checkpoint() -> dict[str, torch.Tensor]:
    """Different values everywhere, by disk names."""
    shapes = {
        "embed.weight": (VOCABULARY, HIDDEN),
        "q_proj.weight": (NUM_HEADS * HEAD_DIM, HIDDEN),
        "k_proj.weight": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
        "v_proj.weight": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
        "scale": (),
    }
    for expert in range(NUM_EXPERTS):
        shapes[f"mlp.experts.{expert}.gate_proj.weight"] = (INTERMEDIATE, HIDDEN)
        shapes[f"mlp.experts.{expert}.up_proj.weight"] = (INTERMEDIATE, HIDDEN)
        shapes[f"mlp.experts.{expert}.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
    return numbered(shapes)


def numbered(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    tensors = {}
    first = 1
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        tensors[name] = torch.arange(first, first + size, dtype=torch.float32).reshape(shape)
        first += size
    return tensors


def filled(views: tuple[CheckpointView, ...], tensors: dict[str, torch.Tensor]) -> None:
    """Write through views alone."""
    for view in views:
        part = tensors[view.name].reshape(view.shape)
        for dim, ((start, _, length),) in enumerate(view.dims):
            part = part.narrow(dim, start, length)
        view.tensor.copy_(part)


def prove(
    make: Callable[[], Engine],
    load: str,
    tensors: dict[str, torch.Tensor],
    *names: str,
    other_ranks: bool = False,
) -> LoaderViews:
    """The views of one engine write what the loader of another writes."""
    loaded, viewed = make(), make()
    with torch.no_grad():
        getattr(loaded, load)(iter(tensors.items()))
    found = loader_views(
        getattr(viewed, load), tensors, viewed.targets(*names), other_ranks=other_ranks
    )
    for name, parameter in viewed.parameters.items():
        assert (parameter == 7.0).all(), f"{name} was written while its loader was recorded"
    filled(found.views, tensors)
    for tensor, constant in found.padding:
        tensor.fill_(constant)
    for name in names or loaded.parameters:
        assert torch.equal(loaded.parameters[name], viewed.parameters[name]), name
    return found


@pytest.mark.parametrize("tp_rank", range(4))
def test_views_write_what_the_loader_writes(tp_rank: int) -> None:
    """Heads of queries are cut over four ranks, those of keys and values repeated on two each."""
    found = prove(lambda: Engine(tp_rank, 4), "load", checkpoint())
    assert not found.ignored
    keys = next(view for view in found.views if view.name == "k_proj.weight")
    assert keys.dims[0] == ((tp_rank // 2 * HEAD_DIM, 0, HEAD_DIM),)
    (padding,) = found.padding
    assert padding[0].shape == (PADDED_VOCABULARY - VOCABULARY, HIDDEN)


def test_experts_of_other_ranks_are_passed_over() -> None:
    found = prove(lambda: Engine(experts=(1, 4)), "load", checkpoint(), other_ranks=True)
    others = {0, 2, 3, 5}
    assert {int(name.split(".")[2]) for name in found.ignored} == others
    assert len(found.ignored) == 3 * len(others)
    engine = Engine(experts=(1, 4))
    with pytest.raises(ValueError, match=r"experts\.0\.gate_proj.* puts it nowhere, nor 11 more"):
        loader_views(engine.load, checkpoint(), engine.targets())


def test_stacked_transposed_interleaved_experts() -> None:
    tensors = numbered(
        {
            "experts.gate_up_proj": (NUM_EXPERTS, HIDDEN, 2 * INTERMEDIATE),
            "experts.down_proj": (NUM_EXPERTS, INTERMEDIATE, HIDDEN),
        }
    )
    found = prove(lambda: Engine(experts=(3, 1)), "load_fused", tensors, "w13", "w2")
    gate = found.views[0]
    assert gate.shape == (NUM_EXPERTS, HIDDEN, INTERMEDIATE, 2)
    assert gate.dims == (((3, 0, 1),), ((0, 0, HIDDEN),), ((0, 0, INTERMEDIATE),), ((0, 0, 1),))


def one(load: Loader, shape: tuple[int, ...], *target: int) -> tuple[CheckpointView, ...]:
    """Views of a loader of one tensor `w` into one parameter `p` of the given shape."""
    return loader_views(load, {"w": TensorSpec(shape, torch.float32)}, [("p", made(*target))]).views


PARAMETER: dict[str, torch.Tensor] = {}


def made(*shape: int) -> torch.Tensor:
    PARAMETER["p"] = torch.zeros(shape)
    return PARAMETER["p"]


def into(change: Callable[[torch.Tensor], torch.Tensor]) -> Loader:
    """A loader that copies what `change` makes of each tensor."""

    def load(weights: Weights) -> None:
        for _, loaded in weights:
            PARAMETER["p"].copy_(change(loaded))

    return load


@pytest.mark.parametrize(
    ("change", "target"),
    [
        (lambda w: w, (4, 6)),
        (lambda w: w.t(), (6, 4)),
        (lambda w: w.unflatten(0, (2, 2)).transpose(0, 1), (2, 2, 6)),
        (lambda w: torch.chunk(w, 2, dim=1)[1], (4, 3)),
        (lambda w: torch.split(w, [1, 3])[1], (3, 6)),
        (lambda w: w.flatten(), (24,)),
        (lambda w: w.reshape(2, 12)[1:].view(2, 6), (2, 6)),
        (lambda w: w[::2], (2, 6)),
        (lambda w: w[1, 2:5], (3,)),
        (lambda w: w[None].expand(3, 4, 6), (3, 4, 6)),
        (lambda w: w[:, :1].squeeze(1).unsqueeze(0), (5, 4)),
        (lambda w: w.to(torch.float32).cpu().contiguous().detach(), (4, 6)),
        (lambda w: w.to(torch.bfloat16), (4, 6)),
        # Copies of a loader's own: rows of heads in turns, and what is one dimension only in a copy.
        (lambda w: w.view(2, 2, 6).transpose(0, 1).reshape(4, 6), (4, 6)),
        (lambda w: w.view(2, 2, 6).transpose(1, 2).reshape(12, 2)[6:], (6, 2)),
        (lambda w: w.t().contiguous().view(24), (24,)),
        (lambda w: w.t().contiguous().view(2, 3, 4).permute(2, 0, 1).contiguous().view(24), (24,)),
        (lambda w: w[:, 2:4].to(torch.bfloat16).view(8), (8,)),
        (lambda w: w.view(2, 2, 6)[:, None].expand(2, 3, 2, 6).reshape(12, 6), (12, 6)),
        (lambda w: w.t().contiguous()[None].expand(2, 6, 4).flatten(), (48,)),
    ],
)
def test_views_are_followed(
    change: Callable[[torch.Tensor], torch.Tensor], target: tuple[int, ...]
) -> None:
    dtype = change(torch.zeros(4, 6)).dtype
    parameter = torch.zeros(target, dtype=dtype)
    PARAMETER["p"] = parameter
    values = {"w": torch.arange(24.0).reshape(4, 6)}
    found = loader_views(into(change), values, [("p", parameter)])
    assert not parameter.any()
    assert all((view.disk_shape or view.shape) == (4, 6) for view in found.views)
    filled(found.views, values)
    assert torch.equal(parameter, change(values["w"]).to(dtype).expand(target))


def as_integers(weights: Weights) -> None:
    for _, loaded in weights:
        PARAMETER["p"].view(torch.int32).copy_(loaded)


def reversed_rows(weights: Weights) -> None:
    for _, loaded in weights:
        PARAMETER["p"].copy_(loaded[torch.tensor([1, 0])])


@pytest.mark.parametrize(
    ("load", "says"),
    [
        (into(lambda w: w * 2), r"^w: the loader asks for aten.mul"),
        (into(lambda w: w.to(torch.float16)), r"^w: .*cast to torch.float16 before .* p of"),
        (
            into(lambda w: w.to(torch.float16).to(torch.float32)),
            r"^w: .*float16 and one to torch.fl",
        ),
        (into(lambda w: torch.cat([w[1:], w[:1]])), r"^w: the loader asks for aten.cat"),
        (into(lambda w: w.flip(0)), r"^w: the loader asks for aten.flip"),
        (into(lambda w: w.view(torch.int32)), r"^w: the loader asks for aten.view.dtype"),
        (into(lambda w: torch.ones(2, 3)), r"^w: the loader asks for aten.copy_.default into p"),
        (
            into(lambda w: w.t().reshape(2, 3)),
            r"^w: the loader copies shape \(2, 3\).* no product",
        ),
        (
            into(lambda w: w.t()[:, :1].expand(3, 2).t().flip(1)),
            r"^w: the loader asks for aten.flip",
        ),
        (into(lambda w: w.view(3, 2)[1:].reshape(4)[:3]), r"^w: the loader copies .* no product"),
        (as_integers, r"^w: .* before a copy as torch.int32 into p of torch.float32"),
        (reversed_rows, r"^w: the loader asks for aten.index"),
        (lambda ws: [torch.empty(2, 3).copy_(w) for _, w in ws], r"^w: .*shape \(2, 3\), no param"),
    ],
)
def test_anything_else_is_refused_by_name(load: Loader, says: str) -> None:
    with pytest.raises(NotImplementedError, match=says):
        one(load, (2, 3), 2, 3)
    assert not PARAMETER["p"].any()


def test_what_a_loader_gives_to_a_pool_is_followed() -> None:
    """As SGLang loads experts; the thread of the pool is there before its loader is run."""
    parameter = torch.full((4, 3), 7.0)

    def load(weights: Weights) -> None:
        jobs = [pool.submit(parameter.zero_)]
        jobs += [pool.submit(parameter[:2].copy_, loaded) for _, loaded in weights]
        for job in concurrent.futures.as_completed(jobs):
            job.result()

    def load_wrongly(weights: Weights) -> None:
        for _, loaded in weights:
            pool.submit(torch.neg, loaded).result()

    tensors = numbered({"w": (2, 3)})
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        found = loader_views(load, tensors, [("p", parameter)])
        assert (parameter == 7.0).all()
        with pytest.raises(NotImplementedError, match=r"^w: the loader asks for aten.neg"):
            loader_views(load_wrongly, tensors, [("p", parameter)])
        assert pool.submit(threading.get_ident).result() != threading.get_ident()
    assert [(view.name, view.tensor.shape) for view in found.views] == [("w", (2, 3))]
    assert [(tensor.shape, constant) for tensor, constant in found.padding] == [((4, 3), 0.0)]


def test_a_thread_of_a_loader_is_refused() -> None:
    def load(weights: Weights) -> None:
        for _ in weights:
            thread = threading.Thread(target=parameter.zero_, name="filler")
            thread.start()
            thread.join()

    parameter = torch.full((4, 3), 7.0)
    with pytest.raises(NotImplementedError, match=r"^w: .* a thread of its own \(filler\)"):
        loader_views(load, {"w": torch.zeros(4, 3)}, [("p", parameter)])
    assert (parameter == 7.0).all()


def test_a_refusal_is_kept_where_a_loader_goes_on() -> None:
    def load(weights: Weights) -> None:
        for _, loaded in weights:
            with contextlib.suppress(NotImplementedError):
                PARAMETER["p"].copy_(loaded + 1)
            PARAMETER["p"].copy_(loaded)

    with pytest.raises(NotImplementedError, match=r"^w: the loader asks for aten.add"):
        one(load, (2, 3), 2, 3)


def test_a_missing_tensor_is_named_by_what_it_would_fill() -> None:
    tensors = checkpoint()
    engine = Engine()
    del tensors["mlp.experts.2.up_proj.weight"]
    with pytest.raises(ValueError, match=r"^w13\[2:3, 10:20, 0:12\] of shape .* from no tensor"):
        loader_views(engine.load, tensors, engine.targets())
    del tensors["embed.weight"]
    with pytest.raises(ValueError, match=r"^embed of shape \(32, 12\): .* from no tensor"):
        loader_views(engine.load, tensors, engine.targets())


def test_a_tensor_that_nobody_takes_is_named() -> None:
    def load(weights: Weights) -> None:
        engine.load(pair for pair in weights if pair[0] != "extra.weight")

    engine = Engine()
    tensors = checkpoint() | {"extra.weight": torch.zeros(3)}
    for other_ranks in (False, True):
        with pytest.raises(ValueError, match=r"^extra.weight of shape \(3,\): .* puts it nowhere"):
            loader_views(load, tensors, engine.targets(), other_ranks=other_ranks)


def test_two_tensors_for_one_place_are_named() -> None:
    def load(weights: Weights) -> None:
        for _, loaded in weights:
            parameter[: loaded.shape[0]].copy_(loaded)

    parameter = torch.zeros(4, 2)
    tensors = {"a": torch.zeros(4, 2), "b": torch.zeros(1, 2)}
    with pytest.raises(ValueError, match=r"^p\[0:1, 0:2\] of shape \(4, 2\): .* from a and from b"):
        loader_views(load, tensors, [("p", parameter)])


def test_a_wrong_shape_is_named() -> None:
    engine = Engine()
    tensors = checkpoint() | {"q_proj.weight": torch.zeros(3, HIDDEN)}
    with pytest.raises(ValueError, match=r"^q_proj.weight: the loader refuses it: RuntimeError"):
        loader_views(engine.load, tensors, engine.targets())


def test_a_copy_that_does_not_fit_names_the_parameter() -> None:
    def load(weights: Weights) -> None:
        for _, loaded in weights:
            parameter.copy_(loaded)

    parameter = torch.zeros(4, 2)
    text = (
        r"^a: the loader refuses it: ValueError: a copy of shape \(3, 2\) into shape \(4, 2\) of p$"
    )
    with pytest.raises(ValueError, match=text):
        loader_views(load, {"a": torch.zeros(3, 2)}, [("p", parameter)])


def test_a_constant_may_come_before_a_tensor_and_not_behind_it() -> None:
    def load(weights: Weights) -> None:
        for _, loaded in weights:
            for step in steps:
                step(loaded)

    parameter = torch.ones(4, 2)

    def fill(_: torch.Tensor) -> None:
        parameter.zero_()

    def copy(loaded: torch.Tensor) -> None:
        parameter[:3].copy_(loaded)

    tensors = {"w": torch.full((3, 2), 5.0)}
    steps = [fill, copy]
    found = loader_views(load, tensors, [("p", parameter)])
    assert parameter.all()
    for tensor, constant in found.padding:
        tensor.fill_(constant)
    filled(found.views, tensors)
    assert parameter.tolist() == [[5, 5]] * 3 + [[0, 0]]
    steps = [copy, fill]
    with pytest.raises(NotImplementedError, match=r"^w: the loader writes 0.0 over it in p"):
        loader_views(load, tensors, [("p", parameter)])


def test_optional_tensors_are_whole_or_left_alone() -> None:
    parameter, buffer = torch.zeros(2), torch.zeros(3)

    def load(weights: Weights) -> None:
        for name, loaded in weights:
            (parameter if name == "w" else buffer[: len(loaded)]).copy_(loaded)

    def views_of(tensors: dict[str, torch.Tensor]) -> tuple[CheckpointView, ...]:
        targets, optional = [("p", parameter)], [("b", buffer)]
        return loader_views(load, tensors, targets, optional=optional).views

    tensors = {"w": torch.ones(2)}
    assert len(views_of(tensors)) == 1
    assert len(views_of(tensors | {"b": torch.ones(3)})) == 2
    with pytest.raises(ValueError, match=r"^b\[2:3\] of shape \(3,\): .* from no tensor"):
        views_of(tensors | {"b": torch.ones(2)})


def test_parameters_may_share_a_storage() -> None:
    """As in a heap: one allocation with all of them."""
    memory = torch.zeros(20)
    first, second = memory[:8].view(2, 4), memory[8:20].view(4, 3).t()

    def load(weights: Weights) -> None:
        for name, loaded in weights:
            (first if name == "a" else second).data.copy_(loaded)

    tensors = numbered({"a": (2, 4), "b": (3, 4)})
    found = loader_views(load, tensors, [("first", first), ("second", second)])
    filled(found.views, tensors)
    assert torch.equal(first, tensors["a"])
    assert torch.equal(second, tensors["b"])


def test_a_value_may_fill_several_parameters() -> None:
    first, second = torch.zeros(1), torch.zeros(1)

    def load(weights: Weights) -> None:
        for _, loaded in weights:
            number = loaded.item()
            for parameter in (first, second):
                parameter.fill_(number)

    found = loader_views(load, {"s": torch.ones(())}, [("first", first), ("second", second)])
    assert not found.padding
    filled(found.views, {"s": torch.tensor(3.0)})
    assert (first.item(), second.item()) == (3.0, 3.0)


@pytest.mark.parametrize(
    ("use", "operation"),
    [
        (lambda number: 1 / number, "__rtruediv__"),
        (lambda number: number * 2, "__mul__"),
        (lambda number: -number, "__neg__"),
        (lambda number: 1.0 if number == 1.0 else 2.0, "__eq__"),
        (lambda number: 1.0 if number > 0.5 else 2.0, "__gt__"),
        (lambda number: max(number, 0.5), "__gt__|__lt__"),
        (lambda number: 1.0 if number else 2.0, "__bool__"),
        (float, "__float__"),
        (int, "__int__|__trunc__"),
    ],
)
def test_what_a_loader_makes_of_a_value_is_refused(
    use: Callable[[float], float], operation: str
) -> None:
    first, second = torch.zeros(1), torch.zeros(1)

    def load(weights: Weights) -> None:
        for _, loaded in weights:
            first.fill_(loaded.item())
            second.fill_(use(loaded.item()))

    targets = [("first", first), ("second", second)]
    with pytest.raises(NotImplementedError, match=rf"^s: .* asks for ({operation}) of its value"):
        loader_views(load, {"s": torch.ones(())}, targets)
    with pytest.raises(NotImplementedError, match=r"^w: .*_local_scalar_dense"):
        one(into(lambda w: torch.full((1,), float(w))), (1,), 1)
    assert torch.ones(1).item() == 1.0


class Replaces(torch.nn.Module):
    """Its loader gives it another parameter, or a parameter other memory."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.w = torch.nn.Parameter(torch.full((2,), 7.0))

    def load(self, weights: Weights) -> None:
        for name, loaded in weights:
            if self.way == "parameter":
                self.w = torch.nn.Parameter(loaded)
            elif self.way == "state":
                self.load_state_dict({name: loaded}, assign=True)
            elif self.way == "data":
                self.w.data = loaded
            else:
                self.w.data = torch.empty(2)
                with contextlib.suppress(NotImplementedError):
                    self.w.data.copy_(loaded)


@pytest.mark.parametrize(
    ("way", "says"),
    [
        ("parameter", "another parameter in the place of w"),
        ("state", "another parameter in the place of w"),
        ("data", "other memory for the parameter"),
        ("memory", r"a copy into a tensor of shape \(2,\), no parameter"),
    ],
)
def test_an_engine_keeps_its_parameters_where_a_loader_replaces_them(way: str, says: str) -> None:
    engine = Replaces(way)
    before, address = engine.w, engine.w.data_ptr()
    with pytest.raises(NotImplementedError, match=f"^w: the loader asks for {says}"):
        loader_views(engine.load, {"w": torch.zeros(2)}, list(engine.named_parameters()))
    assert engine.w is before
    assert engine.w.data_ptr() == address
    assert engine.w.eq(7.0).all()
    engine.w = torch.nn.Parameter(torch.zeros(2))  # elsewhere nobody is refused
