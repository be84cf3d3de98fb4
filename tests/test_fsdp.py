"""Fully sharded parameters against the unsharded model, and a number that changes for each option."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.func import functional_call, grad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import meshcomm as mc
from meshcomm import _torch
from meshcomm.parallel import fsdp
from meshcomm.parallel.clip import clip_grad_norm
from meshcomm.parallel.data.micro_batches import no_sync
from meshcomm.parallel.fsdp.buffers.flat_buffers import Layout
from meshcomm.parallel.fsdp.module import fully_shard
from meshcomm.parallel.fsdp.state import counts, pieces
from meshcomm.parallel.full_state import full_state_dict, load_full_state_dict
from meshcomm.runtime.start.workers import WorkerPool
from meshcomm.runtime.transports.threads import meeting_link, transport

WORDS, D, STEPS = 11, 6, 3


class Block(nn.Module):
    """Attention and MLP; sizes that nothing divides, a parameter of one element."""

    def __init__(self, inside: bool = False, scalar: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.qkv = nn.Linear(D, 3 * D)
        self.up = nn.Linear(D, 13)
        self.down = nn.Linear(13, D, bias=False)
        self.scale = nn.Parameter(torch.ones(() if scalar else 1))
        self.inside = inside
        self.calls = 0

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v) * self.scale
        return x + (checkpoint(self.mlp, x, use_reentrant=False) if self.inside else self.mlp(x))


class Net(nn.Module):
    """Input and output embedding are one parameter."""

    def __init__(self, layers: int = 3, inside: bool = False, scalar: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, D)
        self.blocks = nn.ModuleList(Block(inside, scalar) for _ in range(layers))
        self.head = nn.Linear(D, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.around: bool | None = None

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x) if self.around is None else checkpoint(block, x, use_reentrant=self.around)
        return self.head(x)

    def features(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.embed.weight).sum(1)


def model(seed: int = 0, **kwargs: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**kwargs).double()


def batch(step: int) -> Tensor:
    return torch.randint(0, WORDS, (8, 6), generator=torch.Generator().manual_seed(step))


def loss_of(net: nn.Module, rows: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(net(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten(), reduction=reduction)


def alone(net: nn.Module, steps: int = STEPS) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final state of the unsharded model."""
    adam = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        loss = loss_of(net, batch(step))
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    return losses, net.state_dict()


def sharded(net: nn.Module, mesh: mc.Mesh, steps: int = STEPS, **kwargs: Any) -> tuple[list[float], dict[str, Tensor]]:
    """The same on a rank, which sees its rows."""
    axis = kwargs.pop("axis", "fsdp")
    grads = kwargs.setdefault("grads", "mean")
    net = fully_shard(net, axis, mesh=mesh, **kwargs)
    adam = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        rows = batch(step).chunk(mesh.size)[mesh.rank]
        loss = loss_of(net, rows)
        whole = mc.all_reduce(loss, mesh.axis_names, "mean", mesh=mesh)
        adam.zero_grad()
        (loss if grads == "mean" else whole).backward()
        adam.step()
        losses.append(whole.item())
    return losses, full_state_dict(net)


def same(got: tuple[list[float], dict[str, Tensor]], wanted: tuple[list[float], dict[str, Tensor]]) -> None:
    torch.testing.assert_close(got[0], wanted[0])
    assert list(got[1]) == list(wanted[1])
    for name, x in wanted[1].items():
        torch.testing.assert_close(got[1][name], x, msg=lambda text: f"{name}: {text}")


def gradients_of(net: nn.Module) -> dict[str, Tensor]:
    """The whole gradients of a sharded module, made of what the ranks hold."""
    mesh = mc.current_mesh()
    assert mesh is not None
    found = {}
    for name, piece in pieces(net).items():
        whole = torch.zeros(piece.shape.numel(), dtype=torch.float64)
        param = dict(net.named_parameters())[name]
        if param.grad is not None:
            whole[piece.start : piece.stop] = param.grad.reshape(-1)
        found[name] = mc.all_reduce(whole, "fsdp").view(piece.shape)
    return found


@contextmanager
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, ...]]]:
    """What rank 0 begins and waits for: ("start", collective, dtype, elements) and ("wait", collective)."""
    log: list[tuple[Any, ...]] = []
    announce, wait = transport.InProcessLink.announce, meeting_link._Seat.wait

    def announced(self: Any, note: Any) -> None:
        if self._rank.index == 0:
            log.append(("start", note.what, note.dtype, math.prod(note.shape)))
        announce(self, note)

    def waited(self: Any, timeout: float | None) -> Any:
        if self._link._rank.index == 0:
            log.append(("wait", self._mine.call.what, self._mine.call.dtype, math.prod(self._mine.call.shape)))
        return wait(self, timeout)

    with monkeypatch.context() as patch:
        patch.setattr(transport.InProcessLink, "announce", announced)
        patch.setattr(transport.InProcessLink, "briefly", False)
        patch.setattr(meeting_link._Seat, "wait", waited)
        yield log


class Live(TorchDispatchMode):
    """Counts the bytes of the storages that this rank's operations have made and that are still there."""

    sees_meshcomm = True

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and not x.is_meta:
                self._note(x.untyped_storage())
        return out

    def _note(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._seen or not storage.nbytes():
            return
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)

        def gone(_: Any) -> None:
            self.now -= size
            self._seen.pop(key, None)

        self._seen[key] = weakref.ref(storage, gone)


# ---------------------------------------------------------------------------------------------- the flat layout


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_layout_loses_nothing(ranks: int, whole: bool) -> None:
    tensors = [torch.randn(shape) for shape in [(3, 5), (), (0, 4), (17,), (1,), (2, 2, 3)]]
    layout = Layout([x.shape for x in tensors], ranks, whole=whole)
    buffer = layout.buffer.join(tensors, tensors[0])
    assert buffer.shape == (layout.total,)
    assert buffer.count_nonzero() == sum(x.count_nonzero() for x in tensors)  # and zeros in between
    for x, view in zip(tensors, layout.views(buffer), strict=True):
        assert torch.equal(x, view)
        assert not x.numel() or view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    for index, chunk in enumerate(buffer.view(ranks, -1)):
        assert torch.equal(layout.padded(layout.stored_of(tensors, index)), chunk)
        for at, piece in enumerate(layout.cut(chunk, index)):
            first, last = layout.range_of(at, index)
            assert torch.equal(piece.reshape(-1), tensors[at].reshape(-1)[first:last])
            assert not whole or last - first in (0, tensors[at].numel())
    for at, x in enumerate(tensors):
        assert sum(last - first for first, last in (layout.range_of(at, i) for i in range(ranks))) == x.numel()


def test_padding_is_zero_and_stays_zero() -> None:
    """The shards of a tree are what norms are taken of and what the optimiser has, padding and all."""
    params = {"w": torch.arange(1.0, 4.0).requires_grad_(), "v": torch.arange(4.0, 15.0).requires_grad_()}
    mesh = mc.make_mesh({"fsdp": 2})

    def main() -> list[tuple[float, float]]:
        shards, tree = fsdp.shard(params, "fsdp", mesh=mesh)
        adam = torch.optim.AdamW(shards, lr=0.1, weight_decay=0.5)
        found = []
        for _ in range(3):
            whole = fsdp.gather([shard.detach() for shard in shards], tree)
            parts = mc.all_reduce(
                torch.stack([shard.detach().square().sum() for shard in shards]).sum(), "fsdp", mesh=mesh
            )
            found.append((parts.item(), sum(x.square().sum().item() for x in whole.values())))
            loss = fsdp.apply(lambda p: p["w"].square().sum() + p["v"].sin().sum(), shards, tree)
            adam.zero_grad()
            mc.all_reduce(loss, "fsdp", "mean", mesh=mesh).backward()
            gs = mc.all_reduce(torch.stack([shard.grad.square().sum() for shard in shards]).sum(), "fsdp", mesh=mesh)
            exact = (2 * whole["w"]).square().sum() + whole["v"].cos().square().sum()
            found.append((gs.item(), exact.item()))
            adam.step()
        return found

    assert sum(x.numel() for x in params.values()) < Layout([x.shape for x in params.values()], 2).total
    for found in mc.launch(main, ranks=2):
        for of_shards, of_params in found:
            assert of_shards == pytest.approx(of_params)


# --------------------------------------------------------------------------------------------- functions of trees


def mlp(params: dict[str, Any], x: Tensor) -> Tensor:
    for w, b in params["layers"]:
        x = torch.tanh(x @ w + b)
    return (x @ params["out"]).square().mean()


def tree_of_params() -> dict[str, Any]:
    rng = torch.Generator().manual_seed(3)

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64).requires_grad_()

    return {"out": make(5, 3), "layers": [(make(5, 5), make(5)) for _ in range(2)]}


@pytest.mark.parametrize("regather", [True, False])
@pytest.mark.parametrize("shape", [{"fsdp": 2}, {"fsdp": 4}, {"replica": 2, "fsdp": 2}], ids=str)
def test_functions_train_as_the_unsharded_model(shape: dict[str, int], regather: bool) -> None:
    mesh = mc.make_mesh(shape)
    xs = torch.randn(8, 5, dtype=torch.float64)

    def run(loss: Callable[[], Tensor], leaves: list[Tensor]) -> list[float]:
        adam = torch.optim.AdamW(leaves, lr=1e-2)
        losses = []
        for _ in range(STEPS):
            adam.zero_grad()
            value = loss()
            value.backward()
            adam.step()
            losses.append(value.item())
        return losses

    params = tree_of_params()
    wanted = run(lambda: mlp(params, xs), tree_leaves(params))

    def main() -> tuple[list[float], Any]:
        shards, tree = fsdp.shard(
            tree_of_params(), "fsdp", replica_axis="replica" if "replica" in shape else None, mesh=mesh
        )
        rows = xs.chunk(mesh.size)[mesh.rank]

        def loss() -> Tensor:
            own = fsdp.apply(mlp, shards, tree, rows, regather=regather)
            return mc.all_reduce(own, mesh.axis_names, "mean", mesh=mesh)

        losses = run(loss, shards)
        with torch.no_grad():
            return losses, fsdp.gather(shards, tree)

    for losses, whole in mc.launch(main, ranks=mesh.size):
        torch.testing.assert_close(losses, wanted)
        torch.testing.assert_close(whole, params)


def test_apply_gathers_again_and_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = mc.make_mesh({"fsdp": 2})
    w = torch.randn(64, 64, requires_grad=True)

    def main(regather: bool) -> tuple[int, int]:
        shards, tree = fsdp.shard({"w": w}, "fsdp", mesh=mesh)
        x = torch.ones(1, 64, requires_grad=True)
        with Live() as live:
            y = fsdp.apply(lambda p, x: (x @ p["w"]).sum(), shards, tree, x, regather=regather)
            mc.barrier("fsdp", mesh=mesh)  # what one rank makes for another is there no more
            kept = live.now
            y.backward()
        return kept, sum(g is None for g in (x.grad, shards[0].grad))

    gathers = {}
    for regather in (True, False):
        with events(monkeypatch) as log:
            results = mc.launch(main, ranks=2, args=(regather,))
        gathers[regather] = [what for kind, what, *_ in log if kind == "start" and what != "barrier"]
        for kept, missing in results:
            assert missing == 0
            assert (kept < w.nbytes) == regather
    assert gathers == {True: ["all_gather", "all_gather", "reduce_scatter"], False: ["all_gather", "reduce_scatter"]}


def test_gather_for_later_is_the_same() -> None:
    mesh = mc.make_mesh({"fsdp": 2})

    def main() -> tuple[Tensor, Tensor]:
        found = []
        for later in (False, True):
            shards, tree = fsdp.shard(
                {"v": torch.arange(5.0).requires_grad_(), "i": torch.arange(3)}, "fsdp", mesh=mesh
            )
            assert [each.requires_grad for each in shards] == [False, True]  # in order of the keys
            params = fsdp.gather(shards, tree, async_op=True).wait() if later else fsdp.gather(shards, tree)
            assert params["i"].tolist() == [0, 1, 2]
            (params["v"] * (1 + mesh.rank)).sum().backward()
            found.append(shards[1].grad)
        return found[0], found[1]

    for index, (now, later) in enumerate(mc.launch(main, ranks=2)):
        assert torch.equal(now, later)
        assert now.tolist() == ([3.0] * 5 + [0.0] * 3)[: len(now)] if index == 0 else True


def test_functions_under_torch_func_and_twice() -> None:
    mesh = mc.make_mesh({"fsdp": 2})
    w = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)

    def cube(params: dict[str, Tensor]) -> Tensor:
        return (params["w"] ** 3).sum()

    def main() -> tuple[Tensor, Tensor, Tensor]:
        shards, tree = fsdp.shard({"w": w}, "fsdp", mesh=mesh)

        def loss(flat: Tensor) -> Tensor:
            return mc.all_reduce(fsdp.apply(cube, [flat], tree), "fsdp", "mean", mesh=mesh)

        own = shards[0].requires_grad_()
        (first,) = torch.autograd.grad(loss(own), own, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), own)
        return grad(loss)(shards[0].detach()), first.detach(), second

    flat = torch.cat([w, torch.zeros(5)]) if Layout([w.shape], 2).chunk == 8 else w
    for by_func, first, second in mc.launch(main, ranks=2)[:1]:
        torch.testing.assert_close(first, (3 * flat**2)[: len(first)])
        torch.testing.assert_close(by_func, first)
        torch.testing.assert_close(second, (6 * flat)[: len(first)])


def test_functions_say_what_is_wrong() -> None:
    mesh = mc.make_mesh({"fsdp": 2})

    def main() -> list[str]:
        shards, tree = fsdp.shard({"w": torch.ones(4, requires_grad=True)}, "fsdp", mesh=mesh)
        texts = []
        for wrong in (
            lambda: fsdp.shard({}, "fsdp", mesh=mesh),
            lambda: fsdp.shard({"w": 1.0}, "fsdp", mesh=mesh),
            lambda: fsdp.shard({"w": torch.ones(2)}, "tp", mesh=mesh),
            lambda: fsdp.gather(shards, "tree"),  # type: ignore[call-overload]
            lambda: fsdp.gather([*shards, *shards], tree),
            lambda: fsdp.gather([torch.ones(3)], tree),
        ):
            with pytest.raises(mc.MeshError) as error:
                wrong()
            texts.append(str(error.value))
        y = fsdp.apply(lambda p: p["w"].square().sum(), shards, tree)
        with torch.no_grad():
            shards[0].add_(1)
        with pytest.raises(RuntimeError, match="changed in place between forward and backward"):
            y.backward()
        return texts

    first, second = mc.launch(main, ranks=2)
    words = ["no parameters", "x['w']", "no axis 'tp'", "expected the FlatTree", "list of 1 shards", "shape (8,)"]
    for texts in (first, second):
        for text, word in zip(texts, words, strict=True):
            assert word in text


# ------------------------------------------------------------------------------------- a module as the unsharded one

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "sum": {"grads": "sum"},
    "kept": {"regather": False},
    "nothing ahead": {"prefetch": 0},
    "two ahead": {"prefetch": 2},
    "whole": {"whole": True},
    "some whole": {"whole": ["blocks.1"]},
    "one unit": {"units": ()},
    "by class": {"units": [Block]},
    "by pattern": {"units": ["blocks.*", "blocks.*.qkv"]},
    "offload": {"offload": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_module_trains_as_the_unsharded_one(name: str) -> None:
    mesh = mc.make_mesh({"fsdp": 4})
    wanted = alone(model())
    for got in mc.launch(lambda: sharded(model(), mesh, **OPTIONS[name]), ranks=4):
        same(got, wanted)


@pytest.mark.parametrize("shape", [{"fsdp": 1}, {"fsdp": 2}, {"a": 2, "b": 2}], ids=str)
def test_on_other_meshes(shape: dict[str, int]) -> None:
    mesh = mc.make_mesh(shape)
    wanted = alone(model())
    axis = "fsdp" if "fsdp" in shape else ("b", "a")
    for got in mc.launch(lambda: sharded(model(), mesh, axis=axis), ranks=mesh.size):
        same(got, wanted)


@pytest.mark.parametrize("grads", ["sum", "mean"])
def test_replicas(grads: str) -> None:
    mesh = mc.make_mesh({"replica": 2, "fsdp": 2})
    wanted = alone(model())

    def main() -> tuple[Any, int, int]:
        net = model()
        got = sharded(net, mesh, replica_axis="replica", grads=grads)
        return got, counts(net).reductions, counts(net).replica_reductions

    for got, reductions, replica_reductions in mc.launch(main, ranks=4):
        same(got, wanted)
        assert reductions == replica_reductions == 4 * STEPS


def test_names_objects_and_groups_stay() -> None:
    mesh = mc.make_mesh({"fsdp": 2})

    def main() -> None:
        net = model()
        before = dict(net.named_parameters(remove_duplicate=False))
        names = list(net.state_dict())
        adam = torch.optim.AdamW([
            {"params": [p for name, p in net.named_parameters() if "norm" in name], "weight_decay": 0.0},
            {"params": [p for name, p in net.named_parameters() if "norm" not in name], "weight_decay": 0.5},
        ], lr=1e-2)  # fmt: skip
        assert fully_shard(net, "fsdp", grads="mean", mesh=mesh) is net
        assert type(net) is Net
        after = dict(net.named_parameters(remove_duplicate=False))
        assert list(after) == list(before)
        assert all(after[name] is before[name] for name in before)
        assert list(net.state_dict()) == names
        assert net.head.weight is net.embed.weight
        assert sum(p.numel() for p in net.parameters()) < 0.6 * sum(p.numel() for p in model().parameters())
        loss_of(net, batch(mesh.rank)).backward()
        adam.step()
        reference = model()
        loss = sum(loss_of(reference, batch(rank)) for rank in range(2)) / 2
        loss.backward()
        other = torch.optim.AdamW([
            {"params": [p for name, p in reference.named_parameters() if "norm" in name], "weight_decay": 0.0},
            {"params": [p for name, p in reference.named_parameters() if "norm" not in name], "weight_decay": 0.5},
        ], lr=1e-2)  # fmt: skip
        other.step()
        for name, x in reference.state_dict().items():
            torch.testing.assert_close(full_state_dict(net)[name], x)

    mc.launch(main, ranks=2)


def test_all_ranks_begin_with_the_model_of_index_0() -> None:
    mesh = mc.make_mesh({"replica": 2, "fsdp": 2})

    def main() -> dict[str, Tensor]:
        net = nn.Sequential(model(seed=mesh.rank), nn.BatchNorm1d(3))
        net[1].running_mean.fill_(mesh.rank)
        return full_state_dict(fully_shard(net, "fsdp", grads="mean", replica_axis="replica", mesh=mesh))

    for state in mc.launch(main, ranks=4):
        assert state["1.running_mean"].tolist() == [0, 0, 0]
        for name, x in model(seed=0).state_dict().items():
            assert torch.equal(state[f"0.{name}"], x)


@pytest.mark.parametrize("late", [False, True])
def test_frozen_parameters(late: bool) -> None:
    """Frozen before, they are a group of their own; frozen after, they lie among the others."""
    mesh = mc.make_mesh({"fsdp": 2})

    def freeze(net: Net) -> Net:
        for name, param in net.named_parameters():
            param.requires_grad_("qkv" not in name and not name.startswith("blocks.0"))
        return net

    wanted = alone(freeze(model()))

    def main() -> tuple[Any, int]:
        net = model() if late else freeze(model())
        fully_shard(net, "fsdp", grads="mean", mesh=mesh)
        if late:
            freeze(net)
        adam = torch.optim.AdamW(net.parameters(), lr=1e-2)
        losses = []
        for step in range(STEPS):
            loss = loss_of(net, batch(step).chunk(2)[mesh.rank])
            adam.zero_grad()
            loss.backward()
            adam.step()
            losses.append(mc.all_reduce(loss.detach(), "fsdp", "mean", mesh=mesh).item())
        assert all(p.grad is None for name, p in net.named_parameters() if "qkv" in name)
        return (losses, full_state_dict(net)), counts(net).reductions

    for got, reductions in mc.launch(main, ranks=2):
        same(got, wanted)
        assert reductions == 3 * STEPS  # the root and two blocks


def test_a_module_that_is_called_twice_and_a_unit_used_outside() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 3)])

        def forward(self, x: Tensor) -> Tensor:
            x = self.layers[0](torch.tanh(self.layers[0](x)))
            return F.linear(x, self.layers[1].weight)  # its forward is never called, and its bias not used

    mesh = mc.make_mesh({"fsdp": 2})
    torch.manual_seed(0)
    reference = Twice().double()
    x = torch.randn(4, 5, dtype=torch.float64)
    reference(x).square().sum().backward()

    def main() -> dict[str, Tensor]:
        with mc.use_mesh(mesh):
            net = fully_shard(copy.deepcopy(reference), "fsdp", grads="sum")
            net(x.chunk(2)[mesh.rank]).square().sum().backward()
            return gradients_of(net)

    for got in mc.launch(main, ranks=2):
        for name, param in reference.named_parameters():
            torch.testing.assert_close(got[name], torch.zeros(3).double() if param.grad is None else param.grad)


# ------------------------------------------------------------------------------------------------- what options do


def traffic(mesh: mc.Mesh, steps: int = 2, **kwargs: Any) -> Any:
    """The counters of the last of some steps."""
    net = kwargs.pop("net", None) or model()
    fully_shard(net, "fsdp", grads="mean", mesh=mesh, **kwargs)
    for step in range(steps):
        before = counts(net)
        loss_of(net, batch(step)).backward()
    after = counts(net)
    return {name: value - getattr(before, name) for name, value in vars(after).items()}


def test_numbers_of_collectives() -> None:
    mesh = mc.make_mesh({"fsdp": 2})

    def main() -> dict[str, Any]:
        return {
            name: traffic(mesh, **OPTIONS[name])
            for name in ("default", "kept", "nothing ahead", "two ahead", "one unit")
        }

    got = mc.launch(main, ranks=2)[0]
    assert (got["default"]["gathers"], got["default"]["regathers"], got["default"]["reductions"]) == (7, 3, 4)
    assert (got["kept"]["gathers"], got["kept"]["regathers"], got["kept"]["reductions"]) == (4, 0, 4)
    assert got["default"]["ahead"] == 3 + 2
    assert got["nothing ahead"]["ahead"] == 0
    assert got["two ahead"]["ahead"] == 3 + 2
    assert (got["one unit"]["gathers"], got["one unit"]["reductions"]) == (1, 1)
    assert got["one unit"]["bytes_reduced"] < got["default"]["bytes_reduced"] + 100


def test_the_order_of_start_and_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = mc.make_mesh({"fsdp": 2})

    def main(prefetch: int) -> int:
        net = fully_shard(model(layers=2), "fsdp", grads="mean", mesh=mesh, prefetch=prefetch)
        for step in range(2):
            if mesh.rank == 0:
                log.clear()
            loss_of(net, batch(step)).backward()
        return net.blocks[0].norm.weight.shape[0]

    orders = {}
    for prefetch in (0, 1):
        with events(monkeypatch) as log:
            mc.launch(main, ranks=2, args=(prefetch,))
        short = {"all_gather": "g", "reduce_scatter": "r", "all_reduce": "u"}
        orders[prefetch] = " ".join(("+" if kind == "start" else "-") + short[what] for kind, what, *_ in log)
    # root, block 0, block 1; block 1 and block 0 again; reductions of block 1, block 0 and the root; what has gradients
    assert orders[0] == "+g -g +g -g +g -g  +g -g +r +g -g -r +r -r +r +u -r -u".replace("  ", " ")
    assert orders[1] == "+g +g -g +g -g -g  +g +g -g +r -g -r +r -r +r +u -r -u".replace("  ", " ")


def test_bytes_between_forward_and_backward_and_at_the_peak() -> None:
    mesh = mc.make_mesh({"fsdp": 2})

    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    layer = (64 * 64 + 64) * 4

    def main(options: dict[str, Any]) -> tuple[float, float]:
        net = fully_shard(Tower(), "fsdp", grads="mean", mesh=mesh, **options)
        x = torch.randn(2, 64)
        net(x).sum().backward()
        net.zero_grad()
        with Live() as live:
            y = net(x).sum()
            kept = live.now
            y.backward()
        return kept / layer, live.peak / layer

    def run(**options: Any) -> tuple[float, float]:
        kept, peaks = zip(*mc.launch(main, ranks=2, args=(options,)), strict=True)
        return min(kept), max(peaks)  # by turns one rank's thread makes what both have gathered, and counts it

    kept, peak = run()
    assert kept < 0.5
    assert peak < 4 + 4.5  # the gradients of the shards, and not one of the 8 layers whole but those at work
    kept_all, peak_all = run(regather=False)
    assert kept_all > 7.9
    assert peak_all > peak + 1
    one_kept, one_peak = run(units=())
    assert one_kept > 7.9
    assert one_peak > 14
    assert run(prefetch=0)[1] <= peak


@pytest.mark.parametrize(
    ("options", "regathers"),
    [({"regather": True}, True), ({"regather": False}, False), ({"units": ()}, False)],
    ids=["regathers", "keeps", "one unit"],
)
def test_hooks_of_saved_tensors_only_where_weights_are_gathered_again(options: dict[str, Any], regathers: bool) -> None:
    mesh = mc.make_mesh({"fsdp": 2})

    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(_torch.saved_hooks_on_top() is not None)
            return super().forward(x)

    seen: list[bool] = []

    def main() -> None:
        net = nn.Sequential(Looks(4, 4), Looks(4, 4))
        fully_shard(net, "fsdp", grads="mean", mesh=mesh, **({"units": [Looks]} | options))
        net(torch.ones(2, 4)).sum().backward()
        assert _torch.saved_hooks_on_top() is None

    mc.launch(main, ranks=2)
    assert seen == [regathers] * 4


def test_mixed_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = mc.make_mesh({"fsdp": 2})
    torch.manual_seed(0)
    net = nn.Linear(8, 4)
    x = torch.randn(6, 8)

    def main(reduce_dtype: torch.dtype | None) -> tuple[Tensor, ...]:
        with mc.use_mesh(mesh):
            own = fully_shard(
                copy.deepcopy(net), "fsdp", grads="sum", param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype
            )
            y = own(x.chunk(2)[mesh.rank])
            y.float().square().sum().backward()
            assert own.weight.dtype == own.weight.grad.dtype == torch.float32
            return y, gradients_of(own)["weight"], full_state_dict(own)["weight"]

    wanted = []
    for rows in x.chunk(2):
        half = copy.deepcopy(net).bfloat16()
        half(rows.bfloat16()).float().square().sum().backward()
        wanted.append((half(rows.bfloat16()), half.weight.grad))
    for reduce_dtype in (None, torch.float32):
        with events(monkeypatch) as log:
            results = mc.launch(main, ranks=2, args=(reduce_dtype,))
        moved = [
            (what, dtype)
            for kind, what, dtype, _ in log
            if kind == "start" and what in ("all_gather", "reduce_scatter") and dtype.is_floating_point
        ]
        assert moved == [("all_gather", torch.bfloat16), ("reduce_scatter", reduce_dtype or torch.bfloat16)]
        total = wanted[0][1].float() + wanted[1][1].float()
        for index, (y, g, master) in enumerate(results):
            assert torch.equal(y, wanted[index][0])
            assert torch.equal(g.float(), total if reduce_dtype else total.bfloat16().float())
            assert torch.equal(master, net.weight)


def test_gradients_add_up() -> None:
    mesh = mc.make_mesh({"replica": 2, "fsdp": 2})
    reference = model()
    for step in range(3):
        loss_of(reference, batch(step)).backward()

    def main(quiet: bool) -> tuple[dict[str, Tensor], int]:
        with mc.use_mesh(mesh):
            net = fully_shard(model(), "fsdp", grads="mean", replica_axis="replica")
            for step in range(3):
                rows = batch(step).chunk(4)[mesh.rank]
                if quiet and step < 2:
                    with no_sync(net):
                        loss_of(net, rows).backward()
                    assert all(p.grad is None for p in net.parameters())
                else:
                    loss_of(net, rows).backward()
            return gradients_of(net), counts(net).reductions

    for quiet, reductions in ((False, 12), (True, 4)):
        for got, number in mc.launch(main, ranks=4, args=(quiet,)):
            assert number == reductions
            for name, param in reference.named_parameters():
                torch.testing.assert_close(got[name], param.grad)


class GoneError(RuntimeError):
    """A backward that does not come to its end."""


def test_one_node_takes_the_gradients_of_all_passes() -> None:
    """Between shards and parameters it is the same for each forward, however many there are before a backward, and after
    one that was interrupted; when the parameters become others, or others of them get gradients, it is a new one.
    """
    mesh = mc.make_mesh({"fsdp": 2})

    def passes(net: nn.Module, rows: Tensor) -> Iterator[tuple[str, list[Tensor | None]]]:
        params = list(net.parameters())

        def grads() -> list[Tensor | None]:
            found = [None if p.grad is None else p.grad.clone() for p in params]
            net.zero_grad()
            return found

        def interrupted(_: Tensor) -> None:
            raise GoneError

        params[0].requires_grad_(False)
        net(rows).sum().backward()
        yield "one frozen", grads()
        params[0].requires_grad_(True)
        first, second = net(rows).square().sum(), net(2 * rows).sum()
        (first + second).backward()
        yield "two forwards, one backward", grads()
        first, second = net(rows).square().sum(), net(2 * rows).sum()
        second.backward()
        first.backward()
        yield "the later one first", grads()
        hidden = net[0](rows)
        hidden.register_hook(interrupted)
        with pytest.raises(GoneError):
            (net[1](hidden) + net[1](rows)).sum().backward()
        net.zero_grad()
        net(net(rows)).sum().backward()
        yield "a unit used twice, after an interruption", grads()
        yield "grad", list(torch.autograd.grad(net(rows).sum(), params))
        seen: list[int] = []
        handle = params[1].register_post_accumulate_grad_hook(lambda _: seen.append(1))
        net(rows).sum().backward()
        handle.remove()
        assert seen == [1]
        yield "a hook", grads()
        net.double()
        net(rows.double()).sum().backward()
        yield "double", grads()
        yield "grad in double", list(torch.autograd.grad(net(rows.double()).sum(), params))

    def two() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    rows = torch.arange(12.0).view(3, 4) / 7
    wanted = list(passes(two(), rows))

    def main() -> None:
        net = fully_shard(two(), "fsdp", grads="mean", units=["*"], mesh=mesh)
        for (name, theirs), (_, mine) in zip(wanted, passes(net, rows), strict=True):
            for want, got, piece in zip(theirs, mine, pieces(net).values(), strict=True):
                assert (want is None) == (got is None), name
                if want is not None and got is not None:
                    torch.testing.assert_close(got, want.flatten()[piece.start : piece.stop], msg=name)

    mc.launch(main, ranks=2)


@pytest.mark.parametrize("kind", [2.0, 3.0, math.inf])
def test_clipping_by_the_norm_of_the_whole_model(kind: float) -> None:
    mesh = mc.make_mesh({"replica": 2, "fsdp": 2})
    reference = model()
    loss_of(reference, batch(0)).backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05, norm_type=kind)

    def main() -> tuple[Tensor, dict[str, Tensor], Tensor]:
        with mc.use_mesh(mesh):
            net = fully_shard(model(), "fsdp", grads="mean", replica_axis="replica", ignore=["blocks.1.scale"])
            loss_of(net, batch(0)).backward()  # the same rows everywhere: what is ignored has the whole gradient
            total = clip_grad_norm(net, 0.05, kind)
            return total, gradients_of(net), net.blocks[1].scale.grad

    for total, got, scale in mc.launch(main, ranks=4):
        torch.testing.assert_close(total, norm)
        torch.testing.assert_close(scale, reference.blocks[1].scale.grad)
        for name, g in got.items():
            torch.testing.assert_close(g, dict(reference.named_parameters())[name].grad)
        assert len(got) == len(list(reference.parameters())) - 1


def test_clipping_where_parameters_are_cut_along_another_axis_too() -> None:
    mesh = mc.make_mesh({"tp": 2, "fsdp": 2})

    def main() -> float:
        net = nn.Linear(4, 4, bias=True).double()  # the weight is this tp rank's own, the bias the same on all
        fully_shard(net, "fsdp", grads="sum", mesh=mesh)
        mc.mark_varying(net.weight, "tp", mesh=mesh)
        for param in net.parameters():
            param.grad = torch.ones_like(param)
        return clip_grad_norm(net, 1.0).item()

    assert mc.launch(main, ranks=4) == pytest.approx([math.sqrt(2 * 16 + 4)] * 4)


def test_whole_parameters_for_an_optimiser_of_matrices() -> None:
    """An update that needs the matrix: its gradient over its spectral norm."""
    mesh = mc.make_mesh({"fsdp": 2})

    @torch.no_grad()
    def step(net: nn.Module) -> None:
        for param in net.parameters():
            if param.ndim == 2 and param.grad is not None:
                param -= 0.1 * param.grad / torch.linalg.matrix_norm(param.grad, 2)

    reference = model()
    for number in range(2):
        reference.zero_grad()
        loss_of(reference, batch(number)).backward()
        step(reference)

    def main() -> tuple[dict[str, Tensor], list[str]]:
        net = fully_shard(model(), "fsdp", grads="mean", mesh=mesh, whole=True)
        for number in range(2):
            net.zero_grad()
            loss_of(net, batch(number).chunk(2)[mesh.rank]).backward()
            step(net)
        return full_state_dict(net), [name for name, p in net.named_parameters() if p.ndim == 2]

    results = mc.launch(main, ranks=2)
    assert results[0][1], results[1][1]
    assert not set(results[0][1]) & set(results[1][1])
    for state, _ in results:
        for name, x in reference.state_dict().items():
            torch.testing.assert_close(state[name], x)


def test_a_model_that_no_rank_could_hold() -> None:
    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
            self.norm = nn.BatchNorm1d(64)

    layer = (64 * 64 + 64) * 4

    def main() -> tuple[float, dict[str, Tensor]]:
        with torch.device("meta"):
            net = Tower()
        with Live() as live:
            fully_shard(net, "fsdp", grads="mean", mesh=mc.make_mesh({"fsdp": -1}))
        return live.peak / layer, full_state_dict(net)

    torch.manual_seed(5)
    two = mc.launch(main, ranks=2)
    torch.manual_seed(5)
    four = mc.launch(main, ranks=4)
    for peak, _ in four:
        assert peak < 8 / 4 + 3.5  # shards, one layer, one layer on its way
    for _, state in (*two, *four):
        for name, x in state.items():
            assert torch.equal(x, two[0][1][name])
        assert state["norm.running_var"].tolist() == [1.0] * 64
        assert not torch.equal(state["layers.0.weight"], state["layers.1.weight"])
        assert state["layers.3.weight"].abs().max() <= 1 / 8


def test_init_of_ones_own() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.empty(3))

    def main() -> list[float]:
        mesh = mc.make_mesh({"fsdp": 2})
        with torch.device("meta"):
            net = nn.Sequential(Odd())
        fully_shard(net, "fsdp", grads="sum", mesh=mesh)
        with pytest.raises(
            mc.MeshError, match=r"was made on the meta device, and 1 of its parameters have no values yet"
        ):
            net(torch.ones(3))
        with torch.device("meta"):
            net = nn.Sequential(Odd())
        fully_shard(net, "fsdp", grads="sum", mesh=mesh, init=lambda part: nn.init.constant_(part.w, 7))
        return full_state_dict(net)["0.w"].tolist()

    assert mc.launch(main, ranks=2) == [[7.0] * 3] * 2


class Sharing(nn.Module):
    """Blocks that share weights, and nothing around them has parameters."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)) for _ in range(4))
        first = self.blocks[0][0]
        if kind == "frozen":
            first.weight.requires_grad_(False)
        if kind == "bias":
            self.blocks[2][0].bias = first.bias
        elif kind == "unit":
            self.blocks[0][2].weight = first.weight
        elif kind == "module":
            self.blocks[3][0] = first
        else:
            for number in (1, 2, 3) if kind == "three" else (3,):
                self.blocks[number][0].weight = first.weight
        if kind == "around":
            self.head = nn.Linear(6, 6, bias=False)
            self.head.weight = first.weight
        if kind == "buffers":
            self.norm = nn.BatchNorm1d(6, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.children():
            for block in part if isinstance(part, nn.ModuleList) else (part,):
                x = block(x)
        return x


@pytest.mark.parametrize("kind", ["two", "three", "unit", "module", "bias", "frozen", "around", "buffers"])
@pytest.mark.parametrize("how", ["reset", "init", "loaded", "partly"])
def test_weights_shared_by_units_on_the_meta_device(kind: str, how: str) -> None:
    """Equal on any mesh, of the distribution that initialises them, and a step as the whole model makes it."""
    torch.manual_seed(8)
    real = Sharing(kind)
    wanted = real.state_dict()

    def init(part: nn.Module) -> None:
        for x in part.parameters(recurse=False):
            nn.init.uniform_(x, 2, 3)
        if isinstance(part, nn.BatchNorm1d):
            part.reset_parameters()

    def main() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        mesh = mc.make_mesh({"fsdp": -1})
        with torch.device("meta"):
            net = Sharing(kind)
        if how == "partly":
            net.blocks[2][2] = copy.deepcopy(real.blocks[2][2])
        fully_shard(net, "fsdp", grads="sum", mesh=mesh, init=init if how == "init" else None)
        assert not any(x.is_meta for x in (*net.parameters(), *net.buffers()))
        if how == "loaded":
            load_full_state_dict(net, wanted)
        before = full_state_dict(net)
        net.train(False)
        net(torch.linspace(-1, 1, 12).view(2, 6)).square().sum().backward()
        grown = {name: x.grad for name, x in net.named_parameters() if x.grad is not None}
        assert len(grown) == len([*net.parameters()]) - (kind == "frozen")
        with torch.no_grad():
            for x in net.parameters():
                if x.grad is not None:
                    x -= 0.01 * x.grad / mesh.size
        return before, full_state_dict(net)

    found = []
    for ranks in (1, 2, 3):
        torch.manual_seed(9)
        found += mc.launch(main, ranks=ranks)
    before, _ = found[0]
    for each, after in found:
        alone = Sharing(kind)
        alone.load_state_dict(each)
        alone.train(False)
        alone(torch.linspace(-1, 1, 12).view(2, 6)).square().sum().backward()
        for name, x in alone.named_parameters():
            torch.testing.assert_close(after[name], x - 0.01 * x.grad if x.grad is not None else x)
        for name, x in each.items():
            assert torch.equal(x, before[name])
            if "weight" in name or "bias" in name:
                kept = how == "partly" and name.startswith("blocks.2.2.")
                low, high = (2, 3) if how == "init" else (-(6**-0.5), 6**-0.5)
                assert low <= x.min() <= x.max() <= high
                assert x.unique().numel() == x.numel()
                assert torch.equal(x, wanted[name]) or not kept
            if how == "loaded":
                assert torch.equal(x, wanted[name])


# ------------------------------------------------------------------------------------------- checkpoints, transforms


@pytest.mark.parametrize("way", ["inside", "around", "around, reentrant", "both"])
def test_checkpointed_blocks_compute_and_gather_again(way: str) -> None:
    mesh = mc.make_mesh({"fsdp": 2})
    wanted = alone(model())

    def main() -> tuple[Any, int, Any]:
        net = model(inside=way in ("inside", "both"))
        net.around = None if way == "inside" else "reentrant" in way
        got = sharded(net, mesh)
        return got, net.blocks[1].calls, counts(net)

    for got, calls, number in mc.launch(main, ranks=2):
        same(got, wanted)
        assert calls == (STEPS if way == "inside" else 2 * STEPS)
        assert number.gathers == 7 * STEPS  # as often as without
        assert number.reductions == 4 * STEPS


def test_a_checkpoint_around_a_unit_keeps_neither_activations_nor_weights() -> None:
    mesh = mc.make_mesh({"fsdp": 2})

    def main(around: bool | None) -> tuple[int, int]:
        net = fully_shard(model(), "fsdp", grads="mean", mesh=mesh)
        net.around = around
        loss_of(net, batch(0)).backward()
        net.zero_grad()
        with Live() as live:
            loss = loss_of(net, batch(0))
            kept = live.now
            loss.backward()
        return kept, live.peak

    plain, less = (mc.launch(main, ranks=2, args=(around,))[0] for around in (None, False))
    assert less[0] < 0.6 * plain[0]
    assert less[1] < plain[1]


def test_double_backward() -> None:
    mesh = mc.make_mesh({"fsdp": 2})

    def penalty(net: nn.Module, rows: Tensor, params: list[Tensor]) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
            grads = torch.autograd.grad(loss_of(net, rows), params, create_graph=True)
        return sum((g.square().sum() for g in grads), torch.zeros(()))

    reference = model(layers=2)
    penalty(reference, batch(0), list(reference.parameters())).backward()

    def main() -> dict[str, Tensor]:
        with mc.use_mesh(mesh):
            net = fully_shard(model(layers=2), "fsdp", grads="mean")
            own = penalty(net, batch(0), list(net.parameters()))  # the same rows: each rank has its part of the norm
            # "mean" divides by 2 what both ranks do to a shard; each rank's penalty is of its own shards
            (2 * own).backward()
            return gradients_of(net)

    for got in mc.launch(main, ranks=2):
        for name, param in reference.named_parameters():
            torch.testing.assert_close(got[name], param.grad, msg=lambda text: f"{name}: {text}")


def test_backward_twice_and_a_change_in_between() -> None:
    mesh = mc.make_mesh({"fsdp": 2})

    def main() -> None:
        with mc.use_mesh(mesh):
            net = fully_shard(model(), "fsdp", grads="mean")
            loss = loss_of(net, batch(0))
            loss.backward(retain_graph=True)
            once = gradients_of(net)
            loss.backward()
            for name, g in gradients_of(net).items():
                torch.testing.assert_close(g, 2 * once[name])
            loss = loss_of(net, batch(0))
            with torch.no_grad():
                for param in net.parameters():
                    param.add_(1.0)
            with pytest.raises(RuntimeError, match="changed in place between forward and backward"):
                loss.backward()
            net.zero_grad()
            loss_of(net, batch(0)).backward()  # and on with the new values

    mc.launch(main, ranks=2)


def test_an_activation_that_was_changed_in_place_is_found() -> None:
    class Spoils(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            y = torch.exp(x * self.w)
            y.add_(1)
            return y

    def main() -> None:
        net = fully_shard(nn.ModuleList([Spoils()]), "fsdp", grads="sum", mesh=mc.make_mesh({"fsdp": 2}))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            net[0](torch.ones(3)).sum().backward()

    mc.launch(main, ranks=2)


def test_torch_func_over_a_module() -> None:
    mesh = mc.make_mesh({"fsdp": 2})
    reference = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = torch.randn(5, 3, dtype=torch.float64)

    def loss(net: nn.Module, params: dict[str, Tensor]) -> Tensor:
        return functional_call(net, params, (x,)).square().mean()

    wanted = grad(lambda params: loss(reference, params))(dict(reference.named_parameters()))

    def main() -> dict[str, Tensor]:
        with mc.use_mesh(mesh):
            net = fully_shard(copy.deepcopy(reference), "fsdp", grads="sum")
            params = {name: p.detach() for name, p in net.named_parameters()}
            got = grad(lambda params: mc.all_reduce(loss(net, params), "fsdp", "mean"))(params)
            for name, param in net.named_parameters():
                param.grad = got[name]
            return gradients_of(net)

    for got in mc.launch(main, ranks=2):
        torch.testing.assert_close(got, wanted)

    def mean() -> None:
        net = fully_shard(copy.deepcopy(reference), "fsdp", grads="mean", mesh=mesh)
        with pytest.raises(mc.MeshError, match="under torch.func and functional_call gradients are summed"):
            grad(lambda params: loss(net, params))({name: p.detach() for name, p in net.named_parameters()})
        with torch.no_grad():
            torch.testing.assert_close(
                loss(net, dict(net.named_parameters())), loss(reference, dict(reference.named_parameters()))
            )

    mc.launch(mean, ranks=2)


# --------------------------------------------------------------------------------------------------- around forward


def test_methods_errors_in_forward_and_evaluation() -> None:
    mesh = mc.make_mesh({"fsdp": 2})
    reference = model()

    def main() -> None:
        net = fully_shard(model(), "fsdp", grads="mean", mesh=mesh, methods=["features"])
        torch.testing.assert_close(net.features(batch(0)), reference.features(batch(0)))
        with pytest.raises(IndexError):
            net(torch.full((1, 2), WORDS))
        assert net.blocks[0].norm.weight.ndim == 1
        assert all(p.ndim == 1 for p in net.parameters())
        with torch.no_grad():
            torch.testing.assert_close(net(batch(1)), reference(batch(1)))
            torch.testing.assert_close(
                net.blocks[0](torch.ones(1, 2, D).double()), reference.blocks[0](torch.ones(1, 2, D).double())
            )
        seen = []
        net.blocks[1].register_forward_hook(lambda part, args, out: seen.append(out.shape))
        loss_of(net, batch(1)).backward()
        assert seen == [torch.Size([8, 5, D])]

    mc.launch(main, ranks=2)


def test_a_forward_that_was_interrupted_leaves_nothing_behind() -> None:
    mesh = mc.make_mesh({"fsdp": 2})

    class Stops(nn.Module):
        """As Ctrl-C does, for which modules call no hooks."""

        def forward(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt

    def main() -> None:
        net = fully_shard(model(), "fsdp", grads="mean", mesh=mesh)
        down, net.blocks[1].down = net.blocks[1].down, Stops()
        with pytest.raises(KeyboardInterrupt):
            net(batch(0))
        net.blocks[1].down = down
        reference = model()
        with torch.no_grad():
            for param in (*net.parameters(), *reference.parameters()):
                param.mul_(2)
        torch.testing.assert_close(net(batch(0)), reference(batch(0)))
        loss_of(net, batch(0)).backward()
        x = torch.ones(3, requires_grad=True)
        y = torch.exp(x)
        y.add_(1)  # no hooks are left
        with pytest.raises(RuntimeError, match="modified by an inplace operation: .torch"):  # in autograd's own words
            y.sum().backward()

    mc.launch(main, ranks=2)


def test_a_unit_without_parameters_of_its_own_and_inference_mode() -> None:
    mesh = mc.make_mesh({"fsdp": 2})
    reference = model()

    def main() -> None:
        units = ["blocks.*", "blocks.*.norm", "blocks.*.qkv", "blocks.*.up", "blocks.*.down"]
        net = fully_shard(
            nn.Sequential(model()), "fsdp", grads="mean", mesh=mesh, units=["0", *(f"0.{u}" for u in units)]
        )
        with torch.inference_mode():
            torch.testing.assert_close(net(batch(0)), reference(batch(0)))
        loss_of(net, batch(0)).backward()
        torch.testing.assert_close(net(batch(1)), reference(batch(1)))

    mc.launch(main, ranks=2)


@pytest.mark.gpu
def test_offloaded_shards_take_no_memory_of_the_device() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    if device.type != "cuda":
        pytest.skip("counts CUDA's memory")

    def main(offload: bool) -> int:
        with torch.device(device):
            net = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
            net(torch.ones(1, 512)).sum().backward()  # cuBLAS has its room, one for each thread
            net.zero_grad()
            mesh = mc.make_mesh({"fsdp": 2})
            mc.barrier("fsdp", mesh=mesh)
            before = torch.cuda.memory_allocated()
            fully_shard(net, "fsdp", grads="mean", mesh=mesh, offload=offload, units=["*"])
            net(torch.ones(1, 512)).sum().backward()
            assert all((p.grad.device.type == "cpu") == offload for p in net.parameters() if p.grad is not None)
            return torch.cuda.memory_allocated() - before

    with torch.device(device):
        assert mc.launch(main, ranks=2, args=(True,))[0] < mc.launch(main, ranks=2, args=(False,))[0]


def test_other_dtypes_and_loads_afterwards() -> None:
    mesh = mc.make_mesh({"fsdp": 2})
    other = model(seed=9)
    rows = batch(0)

    def main() -> None:
        net = fully_shard(model(), "fsdp", grads="mean", mesh=mesh)
        load_full_state_dict(net, other.state_dict())
        torch.testing.assert_close(net(rows), other(rows))
        again = fully_shard(model(), "fsdp", grads="mean", mesh=mesh)
        again.load_state_dict(net.state_dict())
        torch.testing.assert_close(again(rows), other(rows))
        assigned = fully_shard(nn.Linear(9, 2), "fsdp", grads="mean", mesh=mesh)
        assigned.load_state_dict({name: torch.ones_like(p) for name, p in assigned.named_parameters()}, assign=True)
        assert assigned(torch.ones(1, 9)).tolist() == [[10.0, 10.0]]
        assigned(torch.ones(1, 9)).sum().backward()
        assert all(p.grad is not None for p in assigned.parameters())
        net.float()
        assert net(rows).dtype == torch.float32
        torch.testing.assert_close(net(rows), other(rows).float(), rtol=1e-4, atol=1e-5)
        loss_of(net, rows).backward()
        assert net.embed.weight.grad is not None
        with pytest.raises(mc.MeshError, match="'embed.weight' has shape"):
            load_full_state_dict(net, {"embed.weight": torch.ones(3)})
        with pytest.raises(RuntimeError, match="Missing key"):
            load_full_state_dict(net, {})
        with pytest.raises(
            mc.MeshError, match=r"state is neither a mapping nor a path, but NoneType[^!]*\n  fix: .*broadcast_object"
        ):
            load_full_state_dict(net, None)  # type: ignore[arg-type]

    mc.launch(main, ranks=2)


def test_what_is_wrong_is_said_on_every_rank() -> None:
    mesh = mc.make_mesh({"fsdp": 2})
    cases: list[tuple[str, Callable[[], Any]]] = [
        ("not a torch.nn.Module but str", lambda: fully_shard("net", "fsdp", grads="sum", mesh=mesh)),  # type: ignore[type-var]
        ("no axis 'tp'", lambda: fully_shard(model(), "tp", grads="sum", mesh=mesh)),
        ("grads='avg'", lambda: fully_shard(model(), "fsdp", grads="avg", mesh=mesh)),
        ("prefetch=-1", lambda: fully_shard(model(), "fsdp", grads="sum", prefetch=-1, mesh=mesh)),
        ("param_dtype=torch.int32", lambda: fully_shard(model(), "fsdp", grads="sum", param_dtype=torch.int32, mesh=mesh)),
        ("'layers.*' is no part", lambda: fully_shard(model(), "fsdp", grads="sum", units=["layers.*"], mesh=mesh)),
        ("ignore: 'nope' matches nothing", lambda: fully_shard(model(), "fsdp", grads="sum", ignore=["nope"], mesh=mesh)),
        ("whole: 'nope' matches nothing", lambda: fully_shard(model(), "fsdp", grads="sum", whole=["nope"], mesh=mesh)),
        ("methods: 'nope' matches nothing", lambda: fully_shard(model(), "fsdp", grads="sum", methods=["nope"], mesh=mesh)),
        ("is not sharded", lambda: counts(model())),
        ("there is no mesh", lambda: clip_grad_norm(model(), 1.0)),
        ("is sharded already", lambda: fully_shard(fully_shard(model(), "fsdp", grads="sum", mesh=mesh), "fsdp", grads="sum", mesh=mesh)),
        ("cannot be copied without", lambda: copy.deepcopy(fully_shard(model(), "fsdp", grads="sum", mesh=mesh).blocks[0])),
        ("norm_type=0", lambda: clip_grad_norm(fully_shard(model(), "fsdp", grads="sum", mesh=mesh), 1.0, 0)),
    ]  # fmt: skip

    def main() -> int:
        for words, wrong in cases:
            with pytest.raises(mc.MeshError) as error:
                wrong()
            assert words in str(error.value)
        return len(cases)

    assert mc.launch(main, ranks=2) == [len(cases)] * 2


# ----------------------------------------------------------------------------------------------------- processes


def on_processes(shape: dict[str, int], options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    return sharded(model(), mc.make_mesh(shape), **options)


@pytest.mark.parametrize("replicas", [False, True])
def test_processes(pool4: WorkerPool, replicas: bool) -> None:
    wanted = alone(model())
    shape = {"replica": 2, "fsdp": 2} if replicas else {"fsdp": 4}
    for got in pool4.run(on_processes, shape, {"replica_axis": "replica"} if replicas else {}):
        same(got, wanted)


def beside_torch() -> tuple[list[float], list[float], dict[str, Tensor], dict[str, Tensor]]:
    mesh = mc.make_mesh({"fsdp": 4})
    ours = sharded(model(scalar=False), mesh)
    theirs = model(scalar=False)  # torch's refuses a 0-d parameter
    for block in theirs.blocks:
        torch_fully_shard(block, mesh=mesh.device_mesh)
    torch_fully_shard(theirs, mesh=mesh.device_mesh)
    adam = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        loss = loss_of(theirs, batch(step).chunk(4)[mesh.rank])
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(mc.all_reduce(loss.detach(), "fsdp", "mean", mesh=mesh).item())
    state: dict[str, Any] = theirs.state_dict()
    return ours[0], losses, ours[1], {name: x.full_tensor() for name, x in state.items()}


def test_the_same_as_torch_has_it(pool4: WorkerPool) -> None:
    for ours, theirs, our_state, their_state in pool4.run(beside_torch):
        torch.testing.assert_close(ours, theirs)
        for name, x in their_state.items():
            torch.testing.assert_close(our_state[name], x)


class OneOfTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, other: bool) -> Tensor:
        return self.other(x) if other else self.one(x)


@pytest.mark.parametrize("replicas", [False, True])
def test_units_that_are_alike_are_not_mixed_up(replicas: bool) -> None:
    """Ranks that run other units of one size hear which, forward and backward."""

    def main(odd: bool) -> None:
        mesh = mc.make_mesh({"replica": 2, "fsdp": 2})
        options = {"replica_axis": "replica"} if replicas else {}
        net = fully_shard(OneOfTwo(), "fsdp", grads="sum", units=["one", "other"], mesh=mesh, **options)
        net(torch.ones(1, 4), odd and mesh.coordinate["fsdp"] == 1).sum().backward()

    mc.launch(main, ranks=4, args=(False,))
    with pytest.raises(mc.CommError, match="unit 'o(ther|ne)' of OneOfTwo") as refused:
        mc.launch(main, ranks=4, args=(True,))
    assert "unit 'one' of OneOfTwo f32[" in str(refused.value)
    assert "unit 'other' of OneOfTwo f32[" in str(refused.value)


def test_replicas_that_run_other_units_are_told() -> None:
    def main() -> None:
        mesh = mc.make_mesh({"replica": 2, "fsdp": 2})
        net = fully_shard(OneOfTwo(), "fsdp", grads="sum", units=["one", "other"], mesh=mesh, replica_axis="replica")
        net(torch.ones(1, 4), mesh.coordinate["replica"] == 1).sum().backward()

    with pytest.raises(mc.CommError, match=r"all_reduce x of unit 'o(ther|ne)' of OneOfTwo"):
        mc.launch(main, ranks=4)


# ------------------------------------------------------------------------------------------ parts called by themselves


class Stack(nn.Module):
    """A part around units, with parameters that belong to the whole."""

    def __init__(self, embed: nn.Embedding) -> None:
        super().__init__()
        self.embed = embed
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(D)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Two(nn.Module):
    """An encoder and a decoder with one embedding, which a user may call one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, D)
        self.encoder, self.decoder, self.head = Stack(self.embed), Stack(self.embed), nn.Linear(D, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(ids) + self.decoder(ids.flip(-1)))

    def by_hand(self, ids: Tensor) -> Tensor:
        """As whoever has the parts calls them."""
        return self.head(self.encoder(ids) + self.decoder(ids.flip(-1)))


def parts_alone(how: str) -> None:
    mesh = mc.make_mesh({"fsdp": 4})
    with mc.use_mesh(mesh):
        torch.manual_seed(1)
        alone = Two().double()
        model = fully_shard(copy.deepcopy(alone), "fsdp", grads="mean")
        mine, own = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, alone))
        ids = torch.arange(8).view(4, 2) % WORDS
        for _ in range(3):
            if how != "trained":
                with torch.no_grad() if how == "no_grad" else torch.inference_mode():
                    torch.testing.assert_close(model.encoder(ids), alone.encoder(ids))
                    torch.testing.assert_close(model.by_hand(ids), alone.by_hand(ids))
                assert model.embed.weight.dim() == 1
            call = Two.by_hand if how == "trained" else nn.Module.__call__
            for each, rows, optimizer in [(model, ids[mesh.rank :][:1], mine), (alone, ids, own)]:
                call(each, rows).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        with pytest.raises(IndexError), torch.no_grad():
            model.encoder(ids + WORDS)
        assert model.embed.weight.dim() == 1
        for name, x in full_state_dict(model).items():
            torch.testing.assert_close(x, alone.state_dict()[name], rtol=0, atol=1e-9)


@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "trained"])
def test_parts_around_units_are_called_by_themselves(run4: Callable[..., Any], how: str) -> None:
    run4(parts_alone, how)
