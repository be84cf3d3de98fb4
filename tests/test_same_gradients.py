"""Parameters that are used outside of a data parallel module's methods: right, or an error that names them on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshcomm as mc
from meshcomm.parallel import data_parallel, no_sync
from meshcomm.parallel.data.same_gradients import compare

Run = Callable[..., list[Any]]
Grads = Any


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layer = nn.Embedding(8, 4), nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(self.table(ids))

    def scores(self, y: Tensor) -> Tensor:
        return y @ self.table.weight.T


def outside(model: Model, y: Tensor) -> Tensor:
    return (y @ model.table.weight.T).logsumexp(-1).sum()


def as_method(model: Model, y: Tensor) -> Tensor:
    return model.scores(y).logsumexp(-1).sum()


def varied(model: Model, y: Tensor) -> Tensor:
    return (y @ mc.pvary(model.table.weight, "dp").T).logsumexp(-1).sum()


def penalty(model: Model, y: Tensor) -> Tensor:
    return y.square().sum() + sum((p.square().sum() for p in model.parameters()), torch.zeros(()))


def gradients(
    loss: Callable[[Model, Tensor], Tensor], grads: Grads, sees: tuple[str, ...], alone: bool
) -> list[Tensor]:
    """Of two ranks with other ids each; ``alone``: of one rank with those of both."""
    mesh = mc.make_mesh({"dp": 2})
    with mc.use_mesh(mesh):
        model = Model()
        if alone:
            (loss(model, model(torch.arange(6))) / (2 if grads == "mean" else 1)).backward()
        else:
            data_parallel(model, "dp", grads=grads, methods=sees)
            found = loss(model, model(torch.arange(3) + 3 * mesh.rank))
            (mc.all_reduce(found, "dp") if grads == "sum" else found).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("grads", ["sum", "mean"])
def test_outside_is_refused_on_every_rank(grads: Grads) -> None:
    def main() -> str:
        with pytest.raises(mc.MeshError) as caught:
            gradients(outside, grads, ("forward",), alone=False)
        return str(caught.value)

    for text in mc.launch(main, ranks=2):
        assert "meshcomm.data_parallel: the gradient of 'table.weight' is another one on each rank" in text
        assert "methods=" in text


def test_outside_is_refused_on_processes(pool4: Any) -> None:
    assert all(pool4.run(on_four))


def on_four() -> bool:
    mesh = mc.make_mesh({"dp": 4})
    with mc.use_mesh(mesh):
        model = data_parallel(Model(), "dp", grads="mean")
        loss = outside(model, model(torch.arange(2) + mesh.rank))
        with pytest.raises(mc.MeshError, match=r"'table\.weight' is another one on each rank"):
            loss.backward()
        return mc.all_reduce(torch.ones(()), "dp").item() == 4  # and the ranks go on


@pytest.mark.parametrize(
    ("loss", "grads", "sees"),
    [
        (as_method, "sum", ("forward", "scores")),
        (as_method, "mean", ("forward", "scores")),
        (varied, "sum", ("forward",)),
    ],
)
def test_the_ways_that_the_error_names(loss: Any, grads: Grads, sees: tuple[str, ...]) -> None:
    got = mc.launch(gradients, ranks=2, args=(loss, grads, sees, False))
    wanted = mc.launch(gradients, ranks=2, args=(as_method, grads, sees, True))
    for mine, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("grads", ["sum", "mean"])
def test_a_penalty_that_is_the_same_on_all_ranks(grads: Grads) -> None:
    for mine in mc.launch(gradients, ranks=2, args=(penalty, grads, ("forward",), False)):
        assert len(mine) == 3


def test_it_is_asked_once_when_there_are_gradients() -> None:
    def main() -> list[int]:
        mesh = mc.make_mesh({"dp": 2})
        with mc.use_mesh(mesh), mc.trace() as t:
            model = data_parallel(Model(), "dp", grads="mean", buffers="leave")
            begun, counts = len(t.events), []
            for step in range(5):
                loss = model(torch.arange(3) + mesh.rank).sum()
                if step == 1:
                    with no_sync(model):
                        model(torch.arange(3)).sum().backward()
                if step == 0:
                    torch.autograd.grad(loss, list(model.parameters()))
                else:
                    loss.backward()
                counts.append(len(t.events) - begun)
                begun = len(t.events)
        return counts

    first, second, *others = mc.launch(main, ranks=2)[0]
    assert first >= second == others[0] + 1
    assert len(set(others)) == 1


def replaced(model: Model, ids: Tensor) -> Tensor:
    model.forward = lambda ids: model.layer(model.table(ids) ** 2)  # type: ignore[method-assign]
    return model(ids)


def in_parts(model: Model, ids: Tensor) -> Tensor:
    return model.layer(model.table(ids))


@pytest.mark.parametrize("run", [replaced, in_parts])
def test_the_first_step_asks_if_no_method_has_run(run: Callable[[Model, Tensor], Tensor]) -> None:
    def main(step_alike: bool) -> None:
        mesh = mc.make_mesh({"dp": 2})
        model = data_parallel(Model(), "dp", grads="mean", mesh=mesh)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        sgd.step()  # nobody has any
        run(model, torch.arange(3) + (0 if step_alike else 3 * mesh.rank)).sum().backward()
        sgd.step()
        sgd.step()

    with pytest.raises(mc.MeshError, match=r"weight' is another one on each rank[^!]*none of which is replaced"):
        mc.launch(main, ranks=2, args=(False,))
    mc.launch(main, ranks=2, args=(True,))


def test_what_counts_as_the_same() -> None:
    def main(dtype: torch.dtype, values: list[float | None]) -> str:
        mesh = mc.make_mesh({"dp": 2})
        p = nn.Parameter(torch.zeros(2, dtype=dtype))
        value = values[mesh.rank]
        p.grad = None if value is None else torch.full((2,), value, dtype=dtype)
        try:
            compare("here", ["p"], [p], mesh.axis("dp"))
        except mc.MeshError as error:
            return str(error)
        return ""

    def text(*values: float | None, dtype: torch.dtype = torch.float32) -> list[str]:
        return mc.launch(main, ranks=2, args=(dtype, list(values)))

    inf, nan = float("inf"), float("nan")
    for same in ((1.0, 1.0), (0.0, 0.0), (None, None), (inf, inf), (nan, nan), (1.0, 1.0 + 1e-6)):
        assert text(*same) == ["", ""], same
    for other in ((1.0, 1.01), (0.0, 1e-3), (None, 0.0), (1.0, None), (inf, 1.0), (1.0, nan), (0.0, inf)):
        assert all("'p' is another one on each rank" in one for one in text(*other)), other
    assert text(1.0, 1.001, dtype=torch.bfloat16) == ["", ""]
    assert all(text(1.0, 1.00001, dtype=torch.float64))


def test_several_modules_are_compared_in_the_same_order_on_all_ranks() -> None:
    """None has reduced anything: their penalties are equal, and nobody says that they are not."""

    def main() -> list[Tensor]:
        mesh = mc.make_mesh({"dp": 2})
        torch.manual_seed(0)
        models = [data_parallel(nn.Linear(k, k), "dp", grads="mean", mesh=mesh) for k in range(1, 9)]
        params = [p for model in models for p in model.parameters()]
        sum(p.square().sum() for p in params).backward()  # type: ignore[union-attr]
        torch.optim.SGD(params, 0.1).step()
        return [p.detach() for p in params]

    first, second = mc.launch(main, ranks=2)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


class WithEmpty(nn.Module):
    """Has a parameter without elements between others, as models have that are cut to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.none, self.last = (nn.Parameter(torch.ones(*shape)) for shape in ((2, 3), (0, 3), (3,)))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ torch.cat([self.first, self.none]).t()).sum() + (self.last * x).sum()


@pytest.mark.parametrize("bucket_mb", [25, 1e-6])
def test_gradients_have_the_shapes_of_their_parameters_and_count_their_own_versions(bucket_mb: float) -> None:
    def main() -> None:
        mesh = mc.make_mesh({"dp": 2})
        model = data_parallel(WithEmpty(), "dp", grads="mean", mesh=mesh, bucket_mb=bucket_mb)
        for _ in range(3):
            model.zero_grad()
            model(torch.full((1, 3), 1.0 + mesh.rank)).backward()
            grads = [p.grad for p in model.parameters()]
            assert [None if g is None else g.shape for g in grads] == [p.shape for p in model.parameters()]
            first, _, last = (g for g in grads if g is not None)
            assert first.eq(1.5).all()
            assert last.eq(1.5).all()
            before = last._version
            first.add_(1)
            assert last._version == before
            assert last.eq(1.5).all()

    mc.launch(main, ranks=2)
