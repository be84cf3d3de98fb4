"""fully_shard of blocks one by one, and then of the model around them: what ``units=`` makes in one call."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint as computed_again

import meshcomm as mc
from meshcomm.parallel import (
    checkpoint,
    clip_grad_norm,
    counts,
    full_state_dict,
    fully_shard,
    load_full_state_dict,
    no_sync,
    pieces,
    tensor_parallel,
)

Options = dict[str, Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu()) * self.scale


class Model(nn.Module):
    def __init__(self, again: bool | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11)
        self.again = again

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x) if self.again is None else computed_again(layer, x, use_reentrant=self.again)
        scores: Tensor = self.head(self.norm(x))
        return scores


def model(again: bool | None = None) -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Model(again).double()


def one_by_one(net: Model, options: Options, own: Callable[[int], Options] = lambda at: {}) -> Model:
    for at, layer in enumerate(net.layers):
        fully_shard(layer, **{**options, **own(at)})
    return fully_shard(net, **options)


def batch(step: int, micro: int, index: int) -> Tensor:
    return (torch.arange(6) * 5 + step + 7 * micro + 3 * index) % 11


def train(net: nn.Module, index: int, clip: bool = False, micro: int = 1, of: int = 1) -> list[float]:
    """Three steps; ``of``: how many ranks' batches this one takes."""
    adam = torch.optim.AdamW(net.parameters(), lr=0.1)
    norms = []
    for step in range(3):
        adam.zero_grad()
        for at in range(micro):
            with no_sync(net) if at < micro - 1 and of == 1 else contextlib.nullcontext():
                losses = [net(batch(step, at, each)).logsumexp(-1).mean() for each in range(index, index + of)]
                (sum(losses, torch.zeros(())) / of).backward()
        if clip:
            norms.append(
                float(clip_grad_norm(net, 0.1) if of == 1 else nn.utils.clip_grad_norm_(net.parameters(), 0.1))
            )
        adam.step()
    return norms


OPTIONS: list[Options] = [
    {},
    {"regather": False},
    {"prefetch": 0},
    {"prefetch": 2},
    {"reduce_dtype": torch.float32},
    {"param_dtype": torch.float32},
    {"offload": True},
    {"replica_axis": "rep"},
]


@pytest.mark.one_in(3, alike=True)
@pytest.mark.parametrize(("clip", "micro"), [(False, 1), (True, 1), (True, 2)])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_as_units(options: Options, clip: bool, micro: int) -> None:
    """The same bits, the same calls, the same slices, the same names."""

    def main() -> None:
        mesh = mc.make_mesh({"rep": 2, "fs": 2})
        index = mesh.rank if "replica_axis" in options else mesh.coordinate["fs"]
        given = {"axis": "fs", "grads": "mean", "mesh": mesh, **options}
        ours, theirs = one_by_one(model(), given), fully_shard(model(), units=["layers.*"], **given)
        assert train(ours, index, clip, micro) == train(theirs, index, clip, micro)
        assert_close(full_state_dict(ours), full_state_dict(theirs), rtol=0, atol=0)
        assert counts(ours) == counts(theirs)
        assert pieces(ours) == pieces(theirs)
        assert list(ours.state_dict()) == list(theirs.state_dict())

    mc.launch(main, ranks=4)


OWN: dict[str, Callable[[int], Options]] = {
    "regather": lambda at: {"regather": at != 1},
    "prefetch": lambda at: {"prefetch": at},
    "offload": lambda at: {"offload": at == 1},
    "whole": lambda at: {"whole": at == 0},
    "units": lambda at: {"units": ["up", "down"] if at == 2 else []},
    "ignore": lambda at: {"ignore": ["norm.*"] if at == 1 else []},
}


@pytest.mark.parametrize("again", [None, False, True])
@pytest.mark.parametrize("own", OWN)
def test_blocks_with_options_of_their_own(own: str, again: bool | None) -> None:
    alone = model()
    train(alone, 0, of=2)

    def main() -> None:
        mesh = mc.make_mesh({"fs": 2})
        net = one_by_one(model(again), {"axis": "fs", "grads": "mean", "mesh": mesh}, OWN[own])
        if own == "ignore":
            hidden = [p for name, p in net.named_parameters() if name.startswith("layers.1.norm")]
            for p in hidden:
                p.requires_grad_(False)
            net(batch(0, 0, mesh.rank)).sum().backward()
            assert all(p.shape == (8,) for p in hidden)
            return
        train(net, mesh.rank)
        assert_close(full_state_dict(net), dict(alone.state_dict()), rtol=0, atol=1e-10)

    mc.launch(main, ranks=2)


def test_dtypes_of_their_own() -> None:
    """A block computes and reduces in its dtype, what is around it in its own."""
    seen = []

    def main() -> None:
        mesh = mc.make_mesh({"fs": 2})
        given = {"axis": "fs", "grads": "mean", "mesh": mesh}
        net = one_by_one(model(), given, lambda at: {"param_dtype": torch.float32 if at == 1 else None})
        for part in (net.layers[0], net.layers[1], net.head):
            part.register_forward_hook(lambda part, args, y: seen.append(y.dtype))
        with pytest.raises(RuntimeError, match="dtype"):  # as of FSDP2: who mixes them casts what comes out
            net(batch(0, 0, 0))
        net.layers[1].register_forward_hook(lambda part, args, y: y.double())
        net(batch(0, 0, mesh.rank)).sum().backward()
        assert net.layers[1].up.weight.grad.dtype == torch.float64

    mc.launch(main, ranks=2)
    assert torch.float32 in seen
    assert torch.float64 in seen


def test_parts_in_parts() -> None:
    alone = model()
    train(alone, 0, of=2)

    def main() -> None:
        mesh = mc.make_mesh({"fs": 2})
        with mc.use_mesh(mesh):
            net = model()
            for layer in net.layers:
                fully_shard(layer.up, "fs", grads="mean")
                fully_shard(layer, "fs", grads="mean")
            fully_shard(net.table, "fs", grads="mean", regather=False)
            fully_shard(net, "fs", grads="mean")
            other = copy.deepcopy(net)
            train(net, mesh.rank)
            train(other, mesh.rank)
        assert [each for each in pieces(net) if each.startswith("layers.0")] == [
            f"layers.0.{name}"
            for name in ("down.weight", "down.bias", "norm.weight", "norm.bias", "up.weight", "up.bias")
        ]
        for found in (net, other):
            assert_close(full_state_dict(found), dict(alone.state_dict()), rtol=0, atol=1e-10)

    mc.launch(main, ranks=2)


def test_copies_of_blocks_become_units() -> None:
    alone = model()
    train(alone, 0, of=2)

    def main() -> None:
        mesh = mc.make_mesh({"fs": 2})
        with mc.use_mesh(mesh):
            net = model()
            for at, layer in enumerate(net.layers):
                net.layers[at] = copy.deepcopy(fully_shard(layer, "fs", grads="mean"))
            train(fully_shard(net, "fs", grads="mean"), mesh.rank)
        assert_close(full_state_dict(net), dict(alone.state_dict()), rtol=0, atol=1e-10)

    mc.launch(main, ranks=2)


def test_a_block_that_was_trained_by_itself() -> None:
    """And one whose forward was interrupted."""

    def main() -> None:
        mesh = mc.make_mesh({"fs": 2})
        given = {"axis": "fs", "grads": "mean", "mesh": mesh}
        net, expected = model(), fully_shard(model(), **given)
        for layer in net.layers:
            fully_shard(layer, **given)
            layer(torch.ones(2, 8, dtype=torch.float64)).sum().backward()
            for p in layer.parameters():
                p.grad = None
        with pytest.raises(RuntimeError):
            net.layers[1](torch.ones(2, 3, dtype=torch.float64))
        fully_shard(net, **given)
        train(net, mesh.rank)
        train(expected, mesh.rank)
        assert_close(full_state_dict(net), full_state_dict(expected), rtol=0, atol=0)

    mc.launch(main, ranks=2)


def test_meta_and_checkpoints(tmp_path: Path) -> None:
    """Made on the meta device, loaded, saved, and loaded by what ``units=`` has made."""
    state = model().state_dict()

    def main() -> None:
        mesh = mc.make_mesh({"rep": 2, "fs": 2})
        given = {"axis": "fs", "grads": "mean", "mesh": mesh, "replica_axis": "rep"}
        with torch.device("meta"):
            net = Model().double()
        one_by_one(net, given)
        load_full_state_dict(net, state)
        train(net, mesh.rank)
        adam = torch.optim.AdamW(net.parameters())
        saved = checkpoint.save(tmp_path, net, adam)
        other = fully_shard(model(), **given)
        checkpoint.load(saved, other)
        assert_close(other.state_dict(), net.state_dict(), rtol=0, atol=0)
        checkpoint.load(saved, one_by_one(model(), given))
        again = one_by_one(model(), given)
        again.load_state_dict(net.state_dict())
        assert_close(full_state_dict(again), full_state_dict(net), rtol=0, atol=0)

    mc.launch(main, ranks=4)


PLAN: Any = {"layers.*.up": "column", "layers.*.down": "row", "*": "replicated"}


def test_with_tensor_parallel() -> None:
    alone = model()
    train(alone, 0, of=2)

    def main() -> None:
        mesh = mc.make_mesh({"fs": 2, "tp": 2})
        with mc.use_mesh(mesh):
            net = tensor_parallel(model(), PLAN, axis="tp")
            train(one_by_one(net, {"axis": "fs", "grads": "mean"}), mesh.coordinate["fs"])
        assert_close(full_state_dict(net), dict(alone.state_dict()), rtol=0, atol=1e-10)

    mc.launch(main, ranks=4)


def one_of(net: Model, mesh: mc.Mesh) -> None:
    fully_shard(net, "fs", grads="mean", mesh=mesh)
    fully_shard(net.layers[0], "fs", grads="mean", mesh=mesh)


def twice(net: Model, mesh: mc.Mesh) -> None:
    for _ in range(2):
        fully_shard(net.layers[0], "fs", grads="mean", mesh=mesh)


def shared(net: Model, mesh: mc.Mesh) -> None:
    net.layers[1].up.weight = net.layers[0].up.weight  # type: ignore[union-attr]
    for layer in net.layers:
        fully_shard(layer, "fs", grads="mean", mesh=mesh)


def shared_with_the_root(net: Model, mesh: mc.Mesh) -> None:
    net.head.weight = net.table.weight
    fully_shard(net.head, "fs", grads="mean", mesh=mesh)
    fully_shard(net, "fs", grads="mean", mesh=mesh)


def otherwise(key: str, inner: object, outer: object) -> Callable[[Model, mc.Mesh], None]:
    def call(net: Model, mesh: mc.Mesh) -> None:
        options: Options = {"grads": "mean", "mesh": mesh}
        fully_shard(net.layers[0], "fs", **{**options, key: inner})
        fully_shard(net, "fs", **{**options, key: outer})

    return call


WRONG: dict[str, tuple[Callable[[Model, mc.Mesh], None], str]] = {
    "the model first": (one_of, r"'the module' is sharded already|'up' is sharded already, as a part of Model"),
    "twice": (twice, "'the module' is sharded already"),
    "a weight of two blocks": (shared, r"'up.weight' has been cut by fully_shard[\s\S]*one call for all that share it"),
    "a weight of a block and the model": (
        shared_with_the_root,
        "'table.weight' is one of a part that was sharded before",
    ),
    "grads": (otherwise("grads", "sum", "mean"), "'layers.0' was sharded with grads='sum', and the module around it"),
    "replicas": (otherwise("replica_axis", "rep", None), "'layers.0' was sharded with replica_axis='rep'"),
    "a mean": (otherwise("mean_over", ("rep", "fs"), "fs"), r"'layers.0' was sharded with mean_over=\('rep', 'fs'\)"),
}


@pytest.mark.parametrize("how", WRONG)
def test_refused(how: str) -> None:
    call, said = WRONG[how]

    def main() -> None:
        with pytest.raises(mc.MeshError, match=said):
            call(model(), mc.make_mesh({"rep": 2, "fs": 2}))

    mc.launch(main, ranks=4)


def test_rest_of_the_blocks_belong_to_the_model() -> None:
    """As with FSDP2: only what was given to fully_shard is gathered by itself."""

    def main() -> int:
        mesh = mc.make_mesh({"fs": 2})
        net = model()
        fully_shard(net.layers[0], "fs", grads="mean", mesh=mesh)
        fully_shard(net, "fs", grads="mean", mesh=mesh)
        with torch.no_grad():
            net(batch(0, 0, 0))
        return counts(net).gathers

    assert mc.launch(main, ranks=2) == [2, 2]


def on_processes() -> list[bool]:
    mesh = mc.make_mesh({"rep": 2, "fs": 2})
    found = []
    for options, again in itertools.product(({}, {"replica_axis": "rep"}, {"prefetch": 2}), (None, False)):
        given = {"axis": "fs", "grads": "mean", "mesh": mesh, **options}
        ours, theirs = one_by_one(model(again), given), fully_shard(model(again), **given)
        index = mesh.rank if "replica_axis" in options else mesh.coordinate["fs"]
        assert train(ours, index, True, 2) == train(theirs, index, True, 2)
        states = full_state_dict(ours), full_state_dict(theirs)
        found.append(all(torch.equal(x, states[1][name]) for name, x in states[0].items()))
    return found


@pytest.mark.thorough
def test_processes(pool4: Any) -> None:
    assert pool4.run(on_processes) == [[True] * 6] * 4
