"""shard_optimizer: the same bits as the optimizer by itself, states in parts, checkpoints that move."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.testing import assert_close

import meshcomm as mc
from meshcomm.parallel import checkpoint, clip_grad_norm, data_parallel, fully_shard, shard_optimizer, tensor_parallel

Make = Callable[[Any], Optimizer]
SIZES = (24, 40, 7)
KINDS: dict[str, Make] = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, 0.01),
    "AdamW amsgrad maximize": lambda ps: torch.optim.AdamW(ps, 0.01, amsgrad=True, maximize=True),
    "AdamW foreach": lambda ps: torch.optim.AdamW(ps, 0.01, foreach=True),
    "AdamW fused": lambda ps: torch.optim.AdamW(ps, 0.01, fused=True),
    "AdamW a tensor of a rate": lambda ps: torch.optim.AdamW(ps, torch.tensor(0.01), foreach=False),
    "Adam": lambda ps: torch.optim.Adam(ps, 0.01, weight_decay=0.1),
    "SGD": lambda ps: torch.optim.SGD(ps, 0.1),
    "SGD momentum": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD fused": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, fused=True),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, 0.01, momentum=0.9, centered=True),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, 0.1, initial_accumulator_value=0.1),
    "Adagrad fused": lambda ps: torch.optim.Adagrad(ps, 0.1, fused=True),
    "Adadelta": lambda ps: torch.optim.Adadelta(ps),
    "Adamax": lambda ps: torch.optim.Adamax(ps, 0.01),
    "NAdam": lambda ps: torch.optim.NAdam(ps, 0.01),
    "RAdam": lambda ps: torch.optim.RAdam(ps, 0.01),
    "ASGD": lambda ps: torch.optim.ASGD(ps, 0.01),
    "Rprop": lambda ps: torch.optim.Rprop(ps, 0.01),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, 0.1),
    "Lion": lambda ps: Lion(ps),
}


class Lion(Optimizer):
    """One of a user's, with numbers of its own in groups and on itself."""

    def __init__(self, params: Any) -> None:
        self.steps = 0
        super().__init__(params, {"lr": 0.01, "seen": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.steps += 1
        for group in self.param_groups:
            group["seen"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    m = state.setdefault("m", torch.zeros_like(p))
                    p.add_(torch.sign(m.lerp(p.grad, 0.1)), alpha=-group["lr"] / group["seen"])
                    m.lerp_(p.grad, 0.01)
        return loss


class Net(nn.Module):
    """Weights of odd sizes, one that is a number, one that is frozen, one that nothing uses."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first = nn.Linear(SIZES[0], SIZES[1], dtype=dtype)
            self.last = nn.Linear(SIZES[1], SIZES[2], dtype=dtype)
            self.scale = nn.Parameter(torch.ones((), dtype=dtype))
            self.frozen = nn.Parameter(torch.ones(SIZES[1], dtype=dtype), requires_grad=False)
            self.unused = nn.Parameter(torch.ones(300, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.tanh(self.first(x)) * self.frozen) * self.scale
        return y


def rows(step: int, mesh: mc.Mesh, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + mesh.coordinate["dp"])
    return torch.randn(4, SIZES[0], generator=generator, dtype=dtype)


def trained(make: Make, shards: bool, steps: int = 4, closure: bool = False) -> list[Tensor]:
    """The weights after some steps with two groups, a schedule and a new group on the way."""
    mesh = mc.current_mesh()
    assert mesh is not None
    net = data_parallel(Net(), "dp", grads="mean")
    groups = [{"params": [net.first.weight, net.scale, net.unused]}, {"params": [net.first.bias], "lr": 0.05}]
    optimizer = make(groups)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    if shards:
        assert shard_optimizer(optimizer, "dp") is optimizer
    for step in range(steps):
        if step == 2 and "Adagrad" not in type(optimizer).__name__:  # whose new groups have no state, in torch too
            optimizer.add_param_group({"params": [net.last.weight, net.last.bias]})

        def closure_(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = net(rows(step, mesh)).square().mean()
            loss.backward()
            return loss

        if closure:
            assert optimizer.step(closure_) is not None
        else:
            closure_()
            clip_grad_norm(net, 0.5)
            optimizer.step()
        schedule.step()
    if isinstance(optimizer, Lion):
        assert optimizer.steps == optimizer.param_groups[0]["seen"] == steps
    return [p.detach().clone() for p in net.parameters()]


def same_bits(kind: str, ranks: int, closure: bool = False) -> None:
    with mc.use_mesh(mc.make_mesh({"dp": ranks})):
        plain, cut = (trained(KINDS[kind], shards, closure=closure) for shards in (False, True))
        for a, b in zip(plain, cut, strict=True):
            assert torch.equal(a, b)
        assert not torch.equal(plain[0], Net().first.weight) or ranks < 1


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits(kind: str, ranks: int) -> None:
    mc.launch(same_bits, ranks=ranks, args=(kind, ranks))


@pytest.mark.parametrize("kind", ["SGD momentum", "AdamW", "Lion"])
def test_closures(kind: str) -> None:
    mc.launch(same_bits, ranks=2, args=(kind, 2, True))


@pytest.mark.parametrize("kind", ["AdamW", "Adafactor", "SGD fused"])
def test_on_processes(kind: str, pool4: Any) -> None:
    pool4.run(same_bits, kind, 4)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon() -> None:
    def main() -> None:
        with mc.use_mesh(mc.make_mesh({"dp": 2})):
            found = []
            for cut in (False, True):
                net = data_parallel(
                    nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False)), "dp", grads="sum"
                )
                torch.manual_seed(1)
                nn.init.normal_(net[0].weight), nn.init.normal_(net[1].weight)
                optimizer = torch.optim.Muon(net.parameters(), 0.1)
                if cut:
                    shard_optimizer(optimizer, "dp")
                for _ in range(2):
                    optimizer.zero_grad()
                    mc.all_reduce(net(torch.eye(8)).square().sum(), "dp").backward()
                    optimizer.step()
                found.append([p.detach().clone() for p in net.parameters()])
                assert len(optimizer.state) == (1 if cut else 2)
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

    mc.launch(main, ranks=2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_dtypes_and_strides(dtype: torch.dtype) -> None:
    def main(cut: bool) -> list[Tensor]:
        with mc.use_mesh(mc.make_mesh({"dp": 4})):
            torch.manual_seed(0)
            params = [nn.Parameter(torch.randn(30, 20).to(dtype).T), nn.Parameter(torch.randn(0, 3).to(dtype)),
                      nn.Parameter(torch.randn(2, 3, 8, 8).to(dtype, memory_format=torch.channels_last)) ]  # fmt: skip
            optimizer = torch.optim.AdamW(params, 0.1)
            if cut:
                shard_optimizer(optimizer, "dp")
            for _ in range(3):
                for p in params:
                    p.grad = torch.randn(p.shape).to(dtype)
                optimizer.step()
            assert params[0].stride() == (1, 20)
            return [p.detach().clone() for p in params]

    seeded = [mc.launch(main, ranks=4, args=(cut,)) for cut in (False, True)]
    for plain, sharded in zip(seeded[0][0], seeded[1][0], strict=True):
        assert torch.equal(plain, sharded)
    assert all(torch.equal(a, b) for a, b in zip(seeded[1][0], seeded[1][3], strict=True))


def test_states_take_a_part_of_the_memory() -> None:
    def main() -> tuple[int, int]:
        with mc.use_mesh(mc.make_mesh({"dp": 4})) as mesh:
            model = data_parallel(nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)), "dp", grads="mean")
            optimizer = shard_optimizer(torch.optim.AdamW(model.parameters()), "dp")
            model(torch.ones(2, 256)).sum().backward()
            with mc.trace() as sent:
                optimizer.step()
            size = sum(p.nbytes for p in model.parameters())
            wire = sum(
                event.wire for event in sent.events if event.primitive == "all_gather" and event.rank == mesh.rank
            )
            assert 0.75 * size <= wire < 0.77 * size
            held = sum(x.untyped_storage().nbytes() for s in optimizer.state.values() for x in s.values() if x.ndim)
            return held, size

    for held, params in mc.launch(main, ranks=4):
        assert abs(held - 2 * params / 4) < 2 * 64 * 4 * 5


def test_on_axes_of_other_parallelisms(tmp_path: Path) -> None:
    """With columns and rows along another axis, and over the replicas of shards; from its checkpoint on one rank."""

    def one() -> tuple[Any, Any]:
        net = Net(torch.float64)
        return net, torch.optim.AdamW(net.parameters(), 0.01)

    def main(kind: str) -> None:
        mesh = mc.make_mesh({"dp": 2, "x": 2})
        with mc.use_mesh(mesh):
            net, optimizer = one()
            shard_optimizer(optimizer, "dp")
            if kind == "columns":
                tensor_parallel(
                    net, {"first": "column", "last": "row", "frozen": mc.parallel.Cut(0), "*": "replicated"}, axis="x"
                )
                data_parallel(net, "dp", grads="mean")
            else:
                fully_shard(net, "x", replica_axis="dp", grads="mean")
            for step in range(3):
                optimizer.zero_grad()
                net(rows(step, mesh, torch.float64)).square().mean().backward()
                optimizer.step()
            checkpoint.save(tmp_path / kind, net, optimizer)
            again, other = one()
            data_parallel(again, "dp", grads="mean")
            shard_optimizer(other, ("x", "dp"))
            checkpoint.load(tmp_path / kind, again, other)
            checkpoint.save(tmp_path / f"{kind} again", again, other)

    net, optimizer = one()
    for step in range(3):
        optimizer.zero_grad()
        parts = [torch.randn(4, SIZES[0], generator=torch.Generator().manual_seed(100 * step + at), dtype=torch.float64)
                 for at in range(2)]  # fmt: skip
        net(torch.cat(parts)).square().mean().backward()
        optimizer.step()
    for kind in ("columns", "shards"):
        mc.launch(main, ranks=4, args=(kind,))
        for folder in (kind, f"{kind} again"):
            back, state = one()
            checkpoint.load(tmp_path / folder, back, state)
            assert_close(back.state_dict(), net.state_dict(), rtol=1e-9, atol=1e-12)
            for a, b in zip(net.parameters(), back.parameters(), strict=True):
                assert_close(dict(state.state[b]), dict(optimizer.state[a]), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["AdamW", "SGD momentum", "Adafactor", "Adagrad"])
def test_checkpoints_on_other_numbers_of_ranks(kind: str, tmp_path: Path) -> None:
    def main(ranks: int, begin: int, end: int, cut: bool) -> list[Tensor]:
        mesh = mc.make_mesh({"dp": ranks})
        with mc.use_mesh(mesh):
            net = data_parallel(Net(), "dp", grads="mean")
            optimizer = KINDS[kind](net.parameters())
            if cut:
                shard_optimizer(optimizer, "dp")
            if begin:
                checkpoint.load(tmp_path / str(begin), net, optimizer)
            for step in range(begin, end):
                optimizer.zero_grad()
                x = torch.randn(6, SIZES[0], generator=torch.Generator().manual_seed(step))
                net(x).square().mean().backward()
                optimizer.step()
            checkpoint.save(tmp_path / str(end), net, optimizer)
            return [p.detach().clone() for p in net.parameters()]

    whole = mc.launch(main, ranks=1, args=(1, 0, 8, False))[0]
    for ranks, begin, end, cut in (
        (2, 0, 2, True),
        (4, 2, 4, True),
        (3, 4, 6, True),
        (2, 6, 7, False),
        (1, 7, 8, True),
    ):
        found = mc.launch(main, ranks=ranks, args=(ranks, begin, end, cut))[0]
    for a, b in zip(whole, found, strict=True):
        assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_states_of_this_rank_and_of_others() -> None:
    def main() -> None:
        with mc.use_mesh(mc.make_mesh({"dp": 2})) as mesh:
            net = Net()
            plain = torch.optim.AdamW(net.parameters(), 0.01)
            for p in net.parameters():
                p.grad = torch.ones_like(p) if p.requires_grad else None
            plain.step()
            whole = plain.state_dict()
            late = shard_optimizer(plain, "dp")  # in the middle of a run: what is there is cut
            other = shard_optimizer(torch.optim.AdamW(net.parameters(), 0.01), "dp")
            other.load_state_dict(whole)
            own, same = other.state_dict(), late.state_dict()
            assert_close(own["state"], same["state"])
            assert sum(x["exp_avg"].numel() for x in own["state"].values()) < 0.6 * sum(
                p.numel() for p in net.parameters()
            )
            other.load_state_dict(own)
            assert_close(other.state_dict()["state"], own["state"])
            theirs = mc.all_gather_object(own, "dp")[1 - mesh.rank]
            with pytest.raises(mc.MeshError, match=r"the states are of other parts[\s\S]*checkpoint.save"):
                other.load_state_dict(theirs)
            theirs.pop("meshcomm_slices")
            with pytest.raises(mc.MeshError, match=r"nothing says of which part it is"):
                other.load_state_dict(theirs)

    mc.launch(main, ranks=2)


def test_amp() -> None:
    """A gradient that is not finite on one rank is not finite on all, and no rank makes the step."""

    def main() -> None:
        with mc.use_mesh(mc.make_mesh({"dp": 2})) as mesh:
            net = data_parallel(Net(), "dp", grads="mean")
            optimizer = shard_optimizer(torch.optim.AdamW(net.parameters(), 0.01), "dp")
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            before = net.first.weight.detach().clone()
            for step in range(2):
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    loss = net(rows(step, mesh)).float().square().mean()
                if step == 0 and mesh.rank == 1:
                    loss = loss * torch.inf
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                clip_grad_norm(net, 1.0)
                scaler.step(optimizer)
                scaler.update()
                assert torch.equal(before, net.first.weight) == (step == 0)
            mc.assert_invariant([*net.parameters()], "dp")

    mc.launch(main, ranks=2)


def refusals(ranks: int) -> None:
    with mc.use_mesh(mc.make_mesh({"dp": ranks})) as mesh:
        torch.manual_seed(mesh.rank)
        net = nn.Linear(64, 4)
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        optimizer = shard_optimizer(torch.optim.SGD(net.parameters(), 0.1), "dp")
        with pytest.raises(mc.MeshError, match="sharded already"):
            shard_optimizer(optimizer, "dp")
        with pytest.raises(mc.MeshError, match=r"have other values on other ranks[\s\S]*data_parallel"):
            optimizer.step()
        odd = nn.Linear(3 + mesh.rank, 2)
        with pytest.raises(mc.MeshError, match="have other shapes or dtypes on other ranks"):
            shard_optimizer(torch.optim.SGD(odd.parameters(), 0.1), "dp").step()
        with pytest.raises(mc.MeshError, match=r"LBFGS has one state[\s\S]*fully_shard"):
            shard_optimizer(torch.optim.LBFGS(net.parameters()), "dp")
        with pytest.raises(mc.MeshError, match="differentiable=True"):
            shard_optimizer(torch.optim.SGD(net.parameters(), 0.1, differentiable=True), "dp")
        cut = fully_shard(nn.Linear(64, 4), "dp", grads="mean")
        with pytest.raises(
            mc.MeshError, match=r"'weight' is cut along axis 'dp' by fully_shard, and so are its states"
        ):
            shard_optimizer(torch.optim.SGD(cut.parameters(), 0.1), "dp")
        same = nn.Linear(64, 4)
        for p in same.parameters():
            p.data.fill_(0.5)
            p.grad = torch.ones_like(p)
        kinds = (torch.optim.SGD, torch.optim.Adam)
        groups: list[Any] = [*same.parameters()]
        for other, said in (
            (kinds[min(mesh.rank, 1)](same.parameters(), lr=0.1), "of another class"),
            (kinds[0](same.parameters(), lr=0.1 + mesh.rank), r"other settings[\s\S]*'lr'"),
            (kinds[0](same.parameters(), lr=0.1, momentum=0.5 * mesh.rank), "other settings"),
            (kinds[1](same.parameters(), lr=0.1, betas=(0.9, 0.99 if mesh.rank else 0.999)), "other settings"),
            (kinds[1](same.parameters(), lr=torch.tensor(0.1 + mesh.rank)), "other settings"),
            (kinds[0]([{"params": groups[: 1 + (mesh.rank > 0)]}, {"params": groups[1 + (mesh.rank > 0) :]}], lr=0.1),
             "other groups"),
        ):  # fmt: skip
            with pytest.raises(mc.MeshError, match=said):
                shard_optimizer(other, "dp").step()
        cuts = ("elements", "tensors")
        with pytest.raises(mc.MeshError, match="cut in another way"):
            shard_optimizer(kinds[0](same.parameters(), lr=0.1), "dp", cut=cuts[min(mesh.rank, 1)]).step()  # type: ignore[arg-type]
        later = shard_optimizer(kinds[0](same.parameters(), lr=0.1), "dp")
        for _ in range(3):
            later.step()
        later.param_groups[0]["lr"] += mesh.rank  # a schedule that follows a loss of this rank
        with pytest.raises(mc.MeshError, match=r"other settings[\s\S]*its mean"):
            later.step()
        table = nn.Embedding(8, 2, sparse=True)
        with torch.no_grad():
            table.weight.fill_(1.0)
        table(torch.tensor([1])).sum().backward()
        with pytest.raises(mc.MeshError, match="a gradient is sparse"):
            shard_optimizer(torch.optim.SGD(table.parameters(), 0.1), "dp").step()


def test_what_is_refused() -> None:
    mc.launch(refusals, ranks=2, args=(2,))


def test_refused_on_processes(pool4: Any) -> None:
    pool4.run(refusals, 4)
