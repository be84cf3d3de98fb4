"""clip_grad_norm: the norm of the whole model, however it is cut, and the step after it, are those of one rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.testing import assert_close

import meshcomm as mc
from meshcomm.parallel import Column, clip_grad_norm, data_parallel, full_state_dict, fully_shard, tensor_parallel

F64 = torch.float64
ROWS, WIDTH = 8, 8
PLAN: dict[str, Any] = {"*.up": "column", "*.down": "row", "*": "replicated"}
CUT_SEQUENCE: dict[str, Any] = {"first": "replicated", "*.up": "column", "*.down": "row", "*norm": "sequence"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(self.norm(x)))) * self.frozen
        return y


class Net(nn.Module):
    """Two blocks share a weight; a parameter is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.norm = nn.LayerNorm(WIDTH)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.norm(x)
        return y


def seeded(make: Callable[[], nn.Module] = Net) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().to(F64)


def rows() -> Tensor:
    return torch.randn(ROWS, 4, WIDTH, dtype=F64, generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = (model(x) * torch.arange(WIDTH, dtype=F64)).square().sum() / (ROWS * 4)
    return loss


def trained(model: nn.Module, x: Tensor, over: Any, clip: Callable[[], Tensor]) -> list[float]:
    """The norms of three steps."""
    adam = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.02, eps=1e-5, weight_decay=0.0)
    found = []
    for _ in range(3):
        adam.zero_grad()
        loss = loss_of(model, x)
        (mc.all_reduce(loss, over) if over else loss).backward()
        found.append(clip().item())
        adam.step()
    return found


def alone(kind: float) -> tuple[list[float], dict[str, Tensor]]:
    model = seeded()
    found = trained(model, rows(), None, lambda: clip_grad_norm_(model.parameters(), 0.5, kind))
    return found, model.state_dict()


def on_mesh(axes: dict[str, int], kind: float = 2.0) -> tuple[list[float], dict[str, Tensor] | None]:
    data = tuple(axis for axis in axes if axis != "tp")
    with mc.use_mesh(mc.make_mesh(axes)):
        model = seeded()
        if "tp" in axes:
            tensor_parallel(model, PLAN, axis="tp")
        if "fsdp" in axes:
            fully_shard(model, "fsdp", grads="sum", replica_axis="rep" if "rep" in axes else None)
        elif data:
            data_parallel(model, data, grads="sum")
        x = mc.shard(rows(), data) if data else rows()
        found = trained(model, x, data, lambda: clip_grad_norm(model, 0.5, kind))
        return found, full_state_dict(model)


MESHES = [
    {"dp": 2}, {"fsdp": 2}, {"rep": 2, "fsdp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}, {"fsdp": 2, "tp": 2}, {"tp": 2, "fsdp": 2},
    {"rep": 2, "fsdp": 2, "tp": 2},
]  # fmt: skip


def named(axes: dict[str, int]) -> str:
    return "x".join(axes)


@pytest.mark.one_in(2, alike=True)
@pytest.mark.parametrize("axes", MESHES, ids=named)
def test_three_steps_are_those_of_one_rank(axes: dict[str, int]) -> None:
    norms, state = alone(2.0)
    results = mc.launch(on_mesh, ranks=math.prod(axes.values()), args=(axes,))
    for found, _ in results:
        assert_close(found, norms, rtol=1e-9, atol=1e-12)
    assert_close(results[0][1], state, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", [1, 3.0, math.inf])
def test_kinds_of_norms(kind: float) -> None:
    norms, state = alone(kind)
    results = mc.launch(on_mesh, ranks=4, args=({"fsdp": 2, "tp": 2}, kind))
    for found, _ in results:
        assert_close(found, norms, rtol=1e-9, atol=1e-12)
    assert_close(results[0][1], state, rtol=1e-9, atol=1e-9)


def test_on_processes(pool4: Any) -> None:
    norms, state = alone(2.0)
    for axes in ({"fsdp": 2, "tp": 2}, {"dp": 2, "tp": 2}):
        results = pool4.run(on_mesh, axes)
        assert all(found == results[0][0] for found, _ in results)
        assert_close(results[0][0], norms, rtol=1e-9, atol=1e-12)
        assert_close(results[0][1], state, rtol=1e-9, atol=1e-9)


def with_gradients(module: nn.Module) -> nn.Module:
    for number, p in enumerate(module.parameters()):
        p.grad = torch.linspace(1, 2, p.numel(), dtype=p.dtype).view(p.shape) * (number + 1)
    return module


def test_stages_that_differ_between_ranks() -> None:
    """One has other parameters, one has none."""
    mesh = mc.make_mesh({"pp": 3, "dp": 2})
    sizes = {0: (3, 5), 1: (2,), 2: ()}

    def main() -> tuple[float, list[float]]:
        stage = nn.Module()
        for name, size in enumerate(sizes[mesh.coordinate["pp"]]):
            stage.register_parameter(str(name), nn.Parameter(torch.ones(size)))
        mc.mark_varying(stage, "pp", mesh=mesh)
        with_gradients(stage)
        norm = clip_grad_norm(stage, 1.0, mesh=mesh).item()
        return norm, [p.grad.norm().item() for p in stage.parameters() if p.grad is not None]

    whole = nn.ParameterList()
    for of_stage in sizes.values():
        whole.extend(with_gradients(nn.ParameterList(torch.ones(size) for size in of_stage)))
    norm = clip_grad_norm_(whole.parameters(), 1.0).item()
    found = mc.launch(main, ranks=6)
    assert [each for each, _ in found] == pytest.approx([norm] * 6)
    clipped = [size for at in (0, 2, 4) for size in found[at][1]]
    assert clipped == pytest.approx([p.grad.norm().item() for p in whole if p.grad is not None])


def test_no_gradient_on_some_ranks_and_dtypes_that_differ() -> None:
    mesh = mc.make_mesh({"tp": 2})

    def main() -> float:
        net = nn.Sequential(nn.Linear(4, 4, bias=False).bfloat16(), nn.Linear(4, 4, bias=False))
        tensor_parallel(net, {"0": "column", "1": "row"}, axis="tp", mesh=mesh)
        for p in net.parameters():
            p.grad = torch.full_like(p, 2.0) if mesh.rank or p is net[1].weight else None
        norm = clip_grad_norm(net, 100.0)
        assert norm.dtype == torch.float32
        return norm.item()

    assert mc.launch(main, ranks=2) == pytest.approx([math.sqrt((8 + 16) * 4)] * 2)


def test_the_dtype_is_that_of_the_model_on_a_rank_without_parameters() -> None:
    mesh = mc.make_mesh({"pp": 3})

    def main() -> torch.dtype:
        stage = (
            nn.Identity() if mesh.rank == 1 else nn.Linear(2, 2, dtype=torch.float64 if mesh.rank else torch.float32)
        )
        return clip_grad_norm(mc.mark_varying(stage, "pp", mesh=mesh), 1.0, mesh=mesh).dtype

    assert mc.launch(main, ranks=3) == [torch.float64] * 3


@pytest.mark.parametrize("kind", [2.0, float("inf")])
def test_a_sparse_gradient_of_no_rows(kind: float) -> None:
    """As of padding alone: it counts as zero."""

    def main() -> float:
        with mc.use_mesh(mc.make_mesh({"dp": 2})):
            model = nn.Sequential(nn.Embedding(4, 2, sparse=True, padding_idx=0), nn.Linear(2, 2))
            model[1].bias.grad = torch.tensor([3.0, -3.0])
            model[0](torch.tensor([0, 0])).sum().backward()
            return clip_grad_norm(model, 0.1, kind).item()

    assert mc.launch(main, ranks=2) == [pytest.approx(3.0 if kind == float("inf") else 18**0.5)] * 2


@pytest.mark.parametrize("kind", [2.0, 1, math.inf])
def test_sparse_gradients(kind: float) -> None:
    """Of embeddings, whose rows are summed over ranks: a row that was asked for twice counts once."""
    ids = torch.tensor([1, 2, 2, 7, 2, 7])

    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4))

    def main() -> tuple[Tensor, dict[str, Tensor]]:
        with mc.use_mesh(mc.make_mesh({"dp": 3})) as mesh:
            model = data_parallel(seeded(make), "dp", grads="mean")
            model(ids.chunk(3)[mesh.rank]).square().mean().backward()
            norm = clip_grad_norm(model, 0.1, kind)
            assert model[0].weight.grad.is_sparse
            return norm, {name: p.grad.to_dense() for name, p in model.named_parameters() if p.grad is not None}

    one = seeded(make)
    one(ids).square().mean().backward()
    for p in one.parameters():
        assert p.grad is not None
        p.grad = p.grad.to_dense()
    expected = clip_grad_norm_(one.parameters(), 0.1, kind)
    for norm, found in mc.launch(main, ranks=3):
        assert_close(norm, expected)
        for name, p in one.named_parameters():
            assert_close(found[name], p.grad)


def test_experts_inside_of_a_sharded_module() -> None:
    """Nested, on other axes, and other experts along one that nobody has cut them along."""
    mesh = mc.make_mesh({"fs": 2, "ep": 2})

    def main() -> float:
        net = nn.ModuleDict({"dense": nn.Linear(4, 4, bias=False), "experts": nn.Linear(4, 4, bias=False)}).to(F64)
        mc.mark_varying(net["experts"], "ep", mesh=mesh)
        fully_shard(net, ("fs", "ep"), grads="sum", ignore=["experts.*"], mesh=mesh)
        fully_shard(net["experts"], "fs", grads="sum", mesh=mesh)
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        return clip_grad_norm(net, 1.0).item()

    found = mc.launch(main, ranks=4)
    assert found == pytest.approx([math.sqrt(16 + 2 * 16)] * 4)


def test_two_meshes_over_the_same_ranks() -> None:
    one, two = mc.make_mesh({"dp": 4}), mc.make_mesh({"fs": 2, "ep": 2})

    def main() -> tuple[float, float]:
        net = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
        fully_shard(net["a"], "fs", grads="sum", mesh=two)
        fully_shard(net["b"], "dp", grads="sum", mesh=one)
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        norms = [clip_grad_norm(net, 100.0, mesh=mesh).item() for mesh in (one, two)]
        return norms[0], norms[1]

    assert mc.launch(main, ranks=4) == [pytest.approx((math.sqrt(32), math.sqrt(32)))] * 4


def test_what_is_declared_is_remembered() -> None:
    mesh = mc.make_mesh({"ep": 2, "dp": 1})

    def main() -> float:
        net = nn.Linear(2, 2, bias=False)
        mc.mark_varying(net, "ep", mesh=mesh)
        net.weight.grad = torch.full((2, 2), 1.0 + mesh.rank)
        with mc.use_mesh(mesh):
            return clip_grad_norm(net, 1.0).item()

    assert mc.launch(main, ranks=2) == pytest.approx([math.sqrt(4 + 16)] * 2)


def test_gradients_that_should_be_the_same_and_are_not() -> None:
    mesh = mc.make_mesh({"dp": 2, "ep": 2})

    def main() -> None:
        net = nn.Linear(2, 2, bias=False)
        net.weight.grad = torch.full((2, 2), 1.0 + mesh.coordinate["ep"])
        with mc.use_mesh(mesh):
            clip_grad_norm(net, 1.0)

    with pytest.raises(mc.MeshError, match=r"that are not cut differ between ranks along 'ep'[^!]*mark_varying"):
        mc.launch(main, ranks=4)


@pytest.mark.parametrize("axis", ["tp", "fsdp"])
def test_a_part_of_what_was_cut_as_a_whole(axis: str) -> None:
    mesh = mc.make_mesh({axis: 2})

    def norm_of(net: nn.Module, clip: Callable[[nn.Module], Tensor]) -> float:
        loss_of(net, rows()).backward()
        return clip(net.get_submodule("blocks.0")).item()

    def main() -> float:
        net = seeded()
        if axis == "tp":
            tensor_parallel(net, PLAN, axis="tp", mesh=mesh)
        else:
            fully_shard(net, "fsdp", grads="mean", units=[], mesh=mesh)
        return norm_of(net, lambda part: clip_grad_norm(part, 1.0, mesh=mesh))

    one = norm_of(seeded(), lambda part: clip_grad_norm_(part.parameters(), 1.0))
    assert_close(mc.launch(main, ranks=2), [one, one])


def of_one_kind(how: str) -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if how == "tp":
        return tensor_parallel(net, {"0": "column", "1": "row"}, axis="ax")
    return fully_shard(net, "ax", grads="sum")


TORCHS: dict[str, Callable[[nn.Module], object]] = {
    "clip_grad_norm_": lambda net: clip_grad_norm_(net.parameters(), 1.0),
    "of one": lambda net: clip_grad_norm_(next(net.parameters()), 1.0, error_if_nonfinite=True),
    "through the module": lambda net: nn.utils.clip_grad_norm_(list(net.parameters()), 1.0, foreach=False),
    "get_total_norm": lambda net: get_total_norm([p.grad for p in net.parameters() if p.grad is not None], 1.0),
    "of a copy": lambda net: clip_grad_norm_(with_gradients(__import__("copy").deepcopy(net)).parameters(), 1.0),
}


@pytest.mark.parametrize("name", TORCHS)
@pytest.mark.parametrize("how", ["tp", "fsdp"])
def test_torchs_own_norm_is_refused(how: str, name: str) -> None:
    def main(size: int) -> bool:
        with mc.use_mesh(mc.make_mesh({"ax": size, "one": 1})):
            net = with_gradients(of_one_kind(how))
            before = [p.grad.clone() for p in net.parameters() if p.grad is not None]
            if size == 1:
                TORCHS[name](net)
                return True
            with pytest.raises(mc.MeshError, match=r"is cut along axis 'ax' [^!]*parallel.clip_grad_norm\(module"):
                TORCHS[name](net)
            nn.utils.clip_grad_value_(net.parameters(), 100.0)  # is right
            nn.utils.clip_grads_with_norm_(net.parameters(), 1e9, torch.tensor(1.0))
            return all(
                torch.equal(p.grad, g) for p, g in zip(net.parameters(), before, strict=True) if p.grad is not None
            )

    assert mc.launch(main, ranks=2, args=(2,)) == [True] * 2
    assert mc.launch(main, ranks=1, args=(1,)) == [True]


@pytest.mark.parametrize("mode", [True, "error"])
def test_while_types_are_checked(mode: Any) -> None:
    """The factor is the same on every rank, and so are gradients that were the same."""
    mesh = mc.make_mesh({"dp": 2, "tp": 2})

    def main() -> float:
        with mc.use_mesh(mesh):
            net = mc.mark_varying(nn.Linear(2, 2, bias=False), ())
            own = mc.mark_varying(nn.Parameter(torch.ones(2)), "tp")
            net.own = own
            sgd = torch.optim.SGD(net.parameters(), lr=0.1)
            with mc.check_vma(mode):
                x = torch.ones(2) * mc.axis_index("dp")
                w = mc.pvary(net.weight, ("dp", "tp"))
                mc.all_reduce((x @ w * mc.pvary(own, "dp")).sum(), ("dp", "tp")).backward()
                norm = clip_grad_norm(net, 0.1)
                sgd.step()
                return norm.item()

    found = mc.launch(main, ranks=4)
    assert len(set(found)) == 1


def test_torchs_own_norm_of_anything_else() -> None:
    net = with_gradients(nn.Linear(3, 3))
    expected = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]).norm()
    assert_close(clip_grad_norm_(net.parameters(), 1.0), expected)


def test_heads_that_ranks_share() -> None:
    """Whole on all ranks, and their gradients summed: they count once."""
    mesh = mc.make_mesh({"tp": 4})

    def run(parallel: bool) -> tuple[float, float]:
        net = nn.ModuleDict({"q": nn.Linear(8, 8), "k": nn.Linear(8, 4), "o": nn.Linear(8, 8)})
        seed = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in net.parameters():
                p.copy_(torch.randn(p.shape, generator=seed))
        net.to(F64)
        if parallel:
            plan = {"q": "column", "k": Column(kv_heads=2), "o": "row"}
            tensor_parallel(net, plan, axis="tp", mesh=mesh)
        x = torch.randn(3, 8, generator=seed).to(F64)
        q, k = net["q"](x).unflatten(-1, (-1, 2)), net["k"](x).unflatten(-1, (-1, 2))
        k = k.repeat_interleave(q.shape[-2] // k.shape[-2], -2)
        net["o"]((q * k).flatten(-2)).square().sum().backward()
        if parallel:
            return clip_grad_norm(net, 1.0, mesh=mesh).item(), net["k"].weight.grad.norm().item()
        return clip_grad_norm_(net.parameters(), 1.0).item(), net["k"].weight.grad.norm().item()

    assert mc.launch(run, ranks=4, args=(True,)) == [pytest.approx(run(False))] * 4
