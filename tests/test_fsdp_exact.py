"""Programs that must be one rank's to the last digits, fully sharded and data parallel: ties, recurrent modules, ..."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import meshcomm as mc
from meshcomm.parallel import data_parallel
from meshcomm.parallel.data.micro_batches import no_sync
from meshcomm.parallel.fsdp.module import fully_shard
from meshcomm.parallel.fsdp.units import owner_of
from meshcomm.parallel.full_state import full_state_dict, load_full_state_dict
from meshcomm.runtime.start.workers import WorkerPool

STEPS, ROWS, WIDTH = 3, 8, 4
SHAPES = [{"fsdp": 2}, {"fsdp": 4}, {"rep": 2, "fsdp": 2}, {"rep": 2, "fsdp": 1}]


class Program(NamedTuple):
    """A module of ``[n, 4]``, its loss on a rank's rows, and how it is sharded."""

    make: Callable[[], nn.Module]
    options: Mapping[str, Any] = MappingProxyType({})
    loss: Callable[[nn.Module, Tensor, int], Tensor] = lambda net, x, rank: net(x).square().mean()


PROGRAMS: dict[str, Program] = {}


def rows(step: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def steps(net: nn.Module, loss: Callable[[Tensor], Tensor]) -> list[bool]:
    """Train; whether each parameter has a gradient at last."""
    adam = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(STEPS):
        adam.zero_grad()
        loss(rows(step)).backward()
        adam.step()
    return [p.grad is not None for p in net.parameters()]


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return PROGRAMS[name].make().double()


def alone(name: str, ranks: int) -> tuple[dict[str, Tensor], list[bool]]:
    net, loss = made(name), PROGRAMS[name].loss

    def whole(x: Tensor) -> Tensor:
        return torch.stack([loss(net, part, rank) for rank, part in enumerate(x.chunk(ranks))]).mean()

    used = steps(net, whole)
    return {key: x.clone() for key, x in net.state_dict().items()}, used


def on_a_rank(name: str, shape: dict[str, int], adaptor: str = "fully_shard") -> tuple[dict[str, Tensor], list[bool]]:
    mesh, net, program = mc.make_mesh(shape), made(name), PROGRAMS[name]
    if adaptor == "data_parallel":
        data_parallel(net, mesh.axis_names, grads="mean", mesh=mesh)
    else:
        replica = "rep" if "rep" in shape else None
        fully_shard(net, "fsdp", grads="mean", replica_axis=replica, mesh=mesh, **program.options)
    used = steps(net, lambda x: program.loss(net, x.chunk(mesh.size)[mesh.rank], mesh.rank))
    state = net.state_dict() if adaptor == "data_parallel" else full_state_dict(net)
    return {key: x.detach().clone() for key, x in state.items()}, used


def same(got: tuple[dict[str, Tensor], list[bool]], wanted: tuple[dict[str, Tensor], list[bool]]) -> None:
    assert list(got[0]) == list(wanted[0])
    for key, x in wanted[0].items():
        torch.testing.assert_close(got[0][key], x, rtol=0, atol=1e-9, msg=lambda text, key=key: f"{key}: {text}")
    assert got[1] == wanted[1]


# ------------------------------------------------------------------------------------------------------- ties


class Tied(nn.Module):
    """Two modules whose tables of parameters look equal."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())  # type: ignore[no-any-return]


class TiedNorms(nn.Module):
    """On an axis of size 1 a slice has the shape of the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.mix = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.b.weight, self.b.bias = self.a.weight, self.a.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.mix(self.a(x))) * x  # type: ignore[no-any-return]


class TiedEmbeddings(nn.Module):
    """One table of embeddings in four modules, one a head; units inside of dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(7, WIDTH)
        self.parts = nn.ModuleDict({name: self.part() for name in ("encoder", "decoder")})
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.shared.weight

    def part(self) -> nn.ModuleDict:
        words = nn.Embedding(7, WIDTH)
        words.weight = self.shared.weight
        return nn.ModuleDict({"words": words, "layers": nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))})

    def forward(self, x: Tensor) -> Tensor:
        ids = (x.abs() * 3).long().clamp(0, 6)
        h = 0.0
        for part in self.parts.values():
            h = part["words"](ids) + h
            for layer in part["layers"]:
                h = layer(h).tanh()
        return self.head(h)  # type: ignore[no-any-return]


class TiedAcross(nn.Module):
    """Parameters that several units have, a module that is in several, and twice in the list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.blocks[2][0].weight = self.blocks[0][0].weight  # type: ignore[index]
        self.blocks[1][0].bias = self.blocks[0][0].bias  # type: ignore[index]
        inner = nn.Linear(WIDTH, WIDTH)
        self.blocks.extend([nn.Sequential(inner), nn.Sequential(inner, nn.Tanh()), self.blocks[1]])
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.again = self.scale

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * self.scale
        return x * self.again


PROGRAMS |= {
    "tied": Program(Tied),
    "tied norms": Program(TiedNorms),
    "tied embeddings": Program(TiedEmbeddings),
    "tied embeddings in units": Program(TiedEmbeddings, {"units": ["parts"]}),
    "tied across units": Program(TiedAcross),
    "tied across units, kept": Program(TiedAcross, {"regather": False}),
    "tied across units, whole": Program(TiedAcross, {"whole": True}),
}


# ------------------------------------------------------------------------------------------- recurrent modules


class Recurrent(nn.Module):
    """Of any kind, of sequences of three, packed or not."""

    def __init__(self, kind: Any = nn.LSTM, normed: bool = False, packed: bool = False, **kwargs: Any) -> None:
        super().__init__()
        self.inner = kind(WIDTH, 5, batch_first=True, **kwargs)
        if normed:
            parametrizations.weight_norm(self.inner, "weight_hh_l0")
        wide = kwargs.get("proj_size", 5) * (2 if kwargs.get("bidirectional") else 1)
        self.out, self.packed = nn.Linear(wide, WIDTH), packed

    def forward(self, x: Tensor) -> Tensor:
        x = torch.stack([x, x * 2, x.sin()], 1)
        self.inner.flatten_parameters()
        if self.packed:
            lengths = torch.arange(len(x)) % 3 + 1
            inside = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            y, _ = pad_packed_sequence(self.inner(inside)[0], batch_first=True)
        else:
            y, _ = self.inner(x)
        return self.out(y)  # type: ignore[no-any-return]


class Cells(nn.Module):
    """The cells, which keep no list, and a list of recurrent units of which two share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.LSTMCell(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH), nn.RNNCell(WIDTH, WIDTH)])
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH) for _ in range(3))
        self.layers[2].weight_hh_l0 = self.layers[0].weight_hh_l0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)[0]
        h, c = self.cells[0](x)
        return self.cells[2](x, self.cells[1](x, h)) + c  # type: ignore[no-any-return]


PROGRAMS |= {
    "lstm": Program(Recurrent),
    "gru, a unit": Program(lambda: Recurrent(nn.GRU, bias=False), {"units": ["inner"]}),
    "rnn, both ways": Program(lambda: Recurrent(nn.RNN, bidirectional=True, num_layers=2)),
    "lstm, projected": Program(lambda: Recurrent(proj_size=3)),
    "lstm, packed": Program(lambda: Recurrent(packed=True)),
    "lstm, weight norm": Program(lambda: Recurrent(normed=True)),
    "cells": Program(Cells),
}


# ---------------------------------------------------------------------------------- what has no gradient gets none


class Rare(nn.Module):
    """Parameters of its own that the ranks in ``users`` use and the others do not, beside units that all use."""

    def __init__(self, users: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.users = users
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.scale, self.never = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x * self.scale if rank in self.users else x


class Half(nn.Linear):
    """Has parameters of two dtypes, which are gathered and reduced apart."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def double(self) -> Any:
        return self

    def forward(self, x: Tensor, gained: bool = False) -> Tensor:
        x = super().forward(x)
        return x * self.gain.double() if gained else x


class Halves(nn.Module):
    """The rarer dtype is used by one rank in one unit, by another rank in the other unit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Half() for _ in range(2))
        for block in self.blocks:
            block.weight.data, block.bias.data = block.weight.data.double(), block.bias.data.double()

    def double(self) -> Any:
        return self

    def forward(self, x: Tensor, rank: int) -> Tensor:
        for at, block in enumerate(self.blocks):
            x = block(x, rank == at).tanh()
        return x


class Experts(nn.Module):
    """Each rank uses two of four."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        x = self.enter(x)
        return torch.stack([x, *(self.experts[at](x) for at in {0, rank})]).sum(0)


def with_rank(net: nn.Module, x: Tensor, rank: int) -> Tensor:
    return net(x, rank).square().mean()  # type: ignore[no-any-return]


def twice(net: nn.Module, x: Tensor, rank: int) -> Tensor:
    """Two forward passes, of which only one uses the rare parameter."""
    return with_rank(net, x, rank) + net(2 * x, rank + 1).abs().mean()  # type: ignore[no-any-return]


PROGRAMS |= {
    "nobody": Program(Rare, loss=with_rank),
    "one rank": Program(lambda: Rare((1,)), loss=with_rank),
    "one rank, kept": Program(lambda: Rare((0,)), {"regather": False}, with_rank),
    "one rank, one unit": Program(lambda: Rare((0,)), {"units": ()}, with_rank),
    "one rank, whole": Program(lambda: Rare((0,)), {"whole": True}, with_rank),
    "one rank, twice": Program(lambda: Rare((1,)), loss=twice),
    "two dtypes": Program(Halves, loss=with_rank),
    "experts": Program(Experts, loss=with_rank),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_fully_sharded(name: str, shape: dict[str, int]) -> None:
    mesh = mc.make_mesh(shape)
    wanted = alone(name, mesh.size)
    for got in mc.launch(on_a_rank, ranks=mesh.size, args=(name, shape)):
        same(got, wanted)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if "units" not in PROGRAMS[name].options])
def test_data_parallel(name: str) -> None:
    for got in mc.launch(on_a_rank, ranks=2, args=(name, {"fsdp": 2}, "data_parallel")):
        same(got, alone(name, 2))


@pytest.mark.parametrize("name", ["tied", "tied across units", "lstm", "nobody", "one rank", "experts", "two dtypes"])
def test_on_processes(name: str, pool4: WorkerPool) -> None:
    for got in pool4.run(on_a_rank, name, {"rep": 2, "fsdp": 2}):
        same(got, alone(name, 4))


@pytest.mark.parametrize("silent", [True, False])
def test_gradients_that_add_up_are_of_what_any_micro_batch_has_used(silent: bool) -> None:
    mesh = mc.make_mesh({"fsdp": 2})

    def parts(x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = x.chunk(2)
        return first, second

    def one_rank() -> tuple[dict[str, Tensor], list[bool]]:
        net = made("one rank")
        return net.state_dict(), steps(net, lambda x: both(net, *parts(x)))

    def both(net: nn.Module, first: Tensor, second: Tensor) -> Tensor:
        # Of the first micro-batch both ranks' rows, of which rank 1 alone uses the scale; in the second nobody does.
        losses = [with_rank(net, x, rank) for rank, x in enumerate(first.chunk(2))]
        losses += [with_rank(net, x, 0) for x in second.chunk(2)]
        return torch.stack(losses).sum() / 2

    def main() -> tuple[dict[str, Tensor], list[bool]]:
        net = fully_shard(made("one rank"), "fsdp", grads="mean", mesh=mesh)

        def loss(x: Tensor) -> Tensor:
            first, second = (part.chunk(2)[mesh.rank] for part in parts(x))
            with no_sync(net) if silent else nullcontext():
                with_rank(net, first, mesh.rank).backward()
            return with_rank(net, second, 0)

        used = steps(net, loss)
        return full_state_dict(net), used

    for got in mc.launch(main, ranks=2):
        same(got, one_rank())


def test_ties_stay_ties() -> None:
    mesh = mc.make_mesh({"fsdp": 2})

    def main() -> None:
        net = fully_shard(made("tied across units"), "fsdp", grads="mean", mesh=mesh)
        names = len(list(net.named_parameters()))
        assert names < len(list(net.named_parameters(remove_duplicate=False)))
        before = full_state_dict(net)
        net.load_state_dict({key: x + 1 for key, x in net.state_dict().items()})
        load_full_state_dict(net, {key: 2 * x for key, x in before.items()})
        net.float()
        assert len(list(net.named_parameters())) == names
        for key, x in full_state_dict(net).items():
            torch.testing.assert_close(x, 2 * before[key].float())

    mc.launch(main, ranks=2)


def test_a_recurrent_module_keeps_no_whole_parameter() -> None:
    mesh = mc.make_mesh({"fsdp": 2})

    def main() -> bool:
        net = fully_shard(made("lstm"), "fsdp", grads="mean", mesh=mesh)
        with torch.no_grad():
            net(rows(0))
        own = dict(net.inner.named_parameters())  # type: ignore[operator, union-attr]
        kept = net.inner._flat_weights  # type: ignore[union-attr]
        return all(own[name] is x for name, x in zip(own, kept, strict=True))  # type: ignore[arg-type]

    assert mc.launch(main, ranks=2) == [True, True]


# ---------------------------------------------------------------------------------------------------------- copies


@pytest.mark.parametrize("name", ["tied across units", "lstm", "experts"])
def test_a_copy_is_its_own(name: str) -> None:
    mesh = mc.make_mesh({"fsdp": 2})

    def main() -> None:
        net = fully_shard(made(name), "fsdp", grads="mean", mesh=mesh)
        before = full_state_dict(net)
        twin = copy.deepcopy(net)
        ours = steps(net, lambda x: PROGRAMS[name].loss(net, x.chunk(2)[mesh.rank], mesh.rank))
        for key, x in full_state_dict(twin).items():
            torch.testing.assert_close(x, before[key])
        names = [len(list(each.named_parameters())) for each in (net, twin)]
        assert names[0] == names[1]
        assert ours == steps(twin, lambda x: PROGRAMS[name].loss(twin, x.chunk(2)[mesh.rank], mesh.rank))
        for key, x in full_state_dict(twin).items():
            torch.testing.assert_close(x, full_state_dict(net)[key], rtol=0, atol=0)

    mc.launch(main, ranks=2)


def averaged(net: nn.Module, loss: Callable[[nn.Module, Tensor], Tensor]) -> tuple[nn.Module, Tensor]:
    """Train, keep a moving average, and what the average says of other rows."""
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    adam = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(STEPS):
        adam.zero_grad()
        loss(net, rows(step)).backward()
        adam.step()
        average.update_parameters(net)
    with torch.no_grad():
        return average.module, average(rows(STEPS))


@pytest.mark.parametrize("options", [{}, {"methods": ["forward"]}, {"units": ()}], ids=str)
def test_a_moving_average_of_a_sharded_module(options: dict[str, Any]) -> None:
    mesh = mc.make_mesh({"fsdp": 2})
    wanted, said = averaged(made("uneven"), lambda net, x: net(x).square().mean())

    def main() -> tuple[dict[str, Tensor], Tensor]:
        net = fully_shard(made("uneven"), "fsdp", grads="mean", mesh=mesh, **options)
        average, own = averaged(net, lambda net, x: net(x.chunk(2)[mesh.rank]).square().mean())
        return full_state_dict(average), own

    for state, own in mc.launch(main, ranks=2):
        torch.testing.assert_close(own, said)
        for key, x in wanted.state_dict().items():
            torch.testing.assert_close(state[key], x)


# ------------------------------------------------------------------------------------ one inside another, other axes


class Nested(nn.Module):
    """A part goes over another axis than what is around it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.part = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * self.scale
        return x + self.part(x)  # type: ignore[no-any-return]


PROGRAMS["nested"] = Program(Nested)


@pytest.mark.parametrize("inner_first", [True, False])
def test_a_part_that_is_sharded_over_another_axis(inner_first: bool) -> None:
    mesh = mc.make_mesh({"a": 2, "b": 2})

    def main() -> tuple[dict[str, Tensor], list[bool]]:
        net = made("nested")
        if inner_first:
            fully_shard(net.part, "b", replica_axis="a", grads="mean", mesh=mesh)  # type: ignore[arg-type]
            fully_shard(net, ("a", "b"), grads="mean", mesh=mesh)
        else:
            fully_shard(net, ("a", "b"), grads="mean", ignore=["part.*"], mesh=mesh)
            fully_shard(net.part, "b", replica_axis="a", grads="mean", mesh=mesh)  # type: ignore[arg-type]
        used = steps(net, lambda x: net(x.chunk(4)[mesh.rank]).square().mean())
        state = full_state_dict(net)
        state.update({f"part.{key}": x for key, x in full_state_dict(net.part).items()})  # type: ignore[arg-type]
        return state, used

    for got in mc.launch(main, ranks=4):
        same(got, alone("nested", 4))


def test_what_cannot_be_nested_is_said() -> None:
    mesh = mc.make_mesh({"a": 1, "b": 1})
    net = fully_shard(Nested(), "a", grads="mean", mesh=mesh)
    with pytest.raises(mc.MeshError, match="is sharded already[\\s\\S]*over another axis, before"):
        fully_shard(net.part, "b", grads="mean", mesh=mesh)  # type: ignore[arg-type]
    tied = Tied()
    fully_shard(tied.a, "a", grads="mean", mesh=mesh)
    with pytest.raises(mc.MeshError, match="'b.weight' is one of a part that was sharded"):
        fully_shard(tied, "b", grads="mean", mesh=mesh)


# ---------------------------------------------------------------------------------------------------- containers


class Lists(nn.Module):
    """Lists, dicts and lists of lists, of which none is called."""

    def __init__(self) -> None:
        super().__init__()

        def layer() -> nn.Linear:
            return nn.Linear(WIDTH, WIDTH)

        self.layers = nn.ModuleList([layer(), layer()])
        self.named = nn.ModuleDict({"x": layer(), "y": nn.ModuleList([layer(), layer()])})
        self.steps = nn.Sequential(layer(), nn.Tanh())
        self.down = nn.ModuleList([nn.ModuleList([layer(), nn.Identity()]), nn.ModuleDict({"z": layer()})])
        self.experts = nn.ModuleList([layer(), layer()])

    def forward(self, x: Tensor) -> Tensor:
        inner = [*self.layers, self.named["x"], *self.named["y"], *self.steps, *self.down[0], self.down[1]["z"]]
        for part in inner:
            x = part(x)
        return x


UNITS: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    "a list": (lambda net: net.layers, ["layers.0", "layers.1"]),
    "a dict": (lambda net: net.named, ["named.x", "named.y.0", "named.y.1"]),
    "lists of lists": (lambda net: [net.down, net.layers], ["layers.0", "layers.1", "down.0.0", "down.0.1", "down.1.z"]),
    "by pattern": (lambda net: ["down.*"], ["down.0.0", "down.0.1", "down.1.z"]),
    "by class": (lambda net: nn.ModuleDict, ["named.x", "named.y.0", "named.y.1", "down.1.z"]),
    "a sequence": (lambda net: net.steps, ["steps.0", "steps.1"]),
    "a sequence in a list": (lambda net: [net.steps], ["steps"]),
    "a generator": (lambda net: (part for part in net.layers), ["layers.0", "layers.1"]),
    "by default": (
        lambda net: None, ["layers.0", "layers.1", "named.y.0", "named.y.1", "down.0.0", "down.1.z"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNITS)
def test_a_container_stands_for_its_items(name: str) -> None:
    mesh = mc.make_mesh({"fsdp": 1})
    net = Lists()
    units, wanted = UNITS[name]
    fully_shard(net, "fsdp", grads="mean", units=units(net), mesh=mesh)
    found = [unit.name for unit in owner_of("test", net).units[1:]]
    assert found == wanted


PROGRAMS["lists"] = Program(Lists, {"units": [nn.ModuleList, nn.ModuleDict]})


def test_units_of_lists_train_as_one_rank() -> None:
    for got in mc.launch(on_a_rank, ranks=2, args=("lists", {"fsdp": 2})):
        same(got, alone("lists", 2))


# ------------------------------------------------------------------------------------ checkpoints of activations


def save_products(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


def save_all(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


KINDS: dict[str, dict[str, Any]] = {
    "plain": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "products": {
        "use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, save_products)
    },
    "everything": {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, save_all)},
}  # fmt: skip


class Recomputed(nn.Module):
    """Units with a checkpoint inside, checkpoints around units, one around all."""

    def __init__(self, inside: str = "", around: str = "", everything: str = "") -> None:
        super().__init__()
        self.inside, self.around, self.everything = inside, around, everything
        self.blocks = nn.ModuleList(nn.ModuleDict({"a": nn.Linear(WIDTH, 6), "b": nn.Linear(6, WIDTH)}) for _ in "12")
        self.units = nn.ModuleList(_Block(part, inside) for part in self.blocks)
        self.head = nn.Linear(WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = x + (checkpoint(unit, x, **KINDS[self.around]) if self.around else unit(x))
        return self.head(x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return checkpoint(self.body, x, **KINDS[self.everything]) if self.everything else self.body(x)  # type: ignore[no-any-return]


class _Block(nn.Module):
    def __init__(self, parts: nn.Module, inside: str) -> None:
        super().__init__()
        self.parts, self.inside = parts, inside

    def body(self, x: Tensor) -> Tensor:
        return self.parts["b"](self.parts["a"](x).tanh()).sin()  # type: ignore[index, no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, **KINDS[self.inside]) if self.inside else self.body(x)  # type: ignore[no-any-return]


WAYS = [
    ("products", "", ""), ("", "products", ""), ("everything", "", ""), ("", "everything", ""), ("", "", "products"),
    ("plain", "plain", ""), ("reentrant", "reentrant", ""), ("plain", "reentrant", ""), ("reentrant", "plain", ""),
    ("products", "reentrant", ""), ("reentrant", "products", ""), ("plain", "products", ""), ("plain", "", "products"), ("", "plain", "products"),
]  # fmt: skip
for way in WAYS:
    PROGRAMS[f"recomputed {way}"] = Program(partial(Recomputed, *way), {"units": ["units.*"]})


@pytest.mark.one_in(2, alike=True)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_checkpoints_inside_and_around_units(way: tuple[str, str, str]) -> None:
    name = f"recomputed {way}"
    for got in mc.launch(on_a_rank, ranks=4, args=(name, {"rep": 2, "fsdp": 2})):
        same(got, alone(name, 4))


@pytest.mark.one_in(4, alike=True)
@pytest.mark.parametrize("way", WAYS[:5], ids=str)
def test_checkpoints_on_processes(way: tuple[str, str, str], pool4: WorkerPool) -> None:
    name = f"recomputed {way}"
    for got in pool4.run(on_a_rank, name, {"fsdp": 4}):
        same(got, alone(name, 4))


# ----------------------------------------------------------------------------------------------------- compiled


class Uneven(nn.Module):
    """Units that differ in size."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, n), nn.Linear(n, WIDTH, bias=False)) for n in (3, 7))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)  # type: ignore[no-any-return]


PROGRAMS["uneven"] = Program(Uneven)


def compiled(inside: bool) -> tuple[dict[str, Tensor], list[bool], int]:
    torch._dynamo.reset()
    mesh = mc.make_mesh({"rep": 2, "fsdp": 2})
    net = fully_shard(made("uneven"), "fsdp", grads="mean", replica_axis="rep", mesh=mesh)
    for part in net.blocks if inside else [net]:  # type: ignore[union-attr]
        part.compile(backend="aot_eager")
    used = steps(net, lambda x: net(x.chunk(4)[mesh.rank]).square().mean())
    graphs: int = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return full_state_dict(net), used, graphs


@pytest.mark.thorough
@pytest.mark.parametrize("inside", [True, False])
def test_compiled_with_units_of_different_sizes(inside: bool, pool4: WorkerPool) -> None:
    for state, used, graphs in pool4.run(compiled, inside):
        same((state, used), alone("uneven", 4))
        assert graphs
