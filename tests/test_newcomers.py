"""Parameters that come to a module after an adaptor has spread it: alike on all ranks by what the program does, or an error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

import meshcomm as mc
from meshcomm.parallel import data_parallel, fully_shard, tensor_parallel

MESH = mc.make_mesh({"dp": 2})
ADAPTORS: list[Any] = [data_parallel, fully_shard]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.down(self.up(x).relu()))
        return y


def trained(
    spread: Callable[[nn.Module], object],
    seed: int,
    before: Callable[[nn.Module], object] = lambda head: None,
    each: Callable[[nn.Module], object] = lambda head: None,
) -> list[Tensor]:
    """A new head, drawn from ``seed``, and two steps on other rows on each rank."""
    with mc.use_mesh(MESH):
        model = Model()
        spread(model)
        torch.manual_seed(seed)
        model.head = nn.Linear(4, 2)
        before(model.head)
        adam = torch.optim.AdamW(model.parameters())
        for step in range(2):
            torch.manual_seed(10 * step + MESH.rank)
            model(torch.randn(3, 4)).square().sum().backward()
            each(model.head)
            adam.step()
            adam.zero_grad()
        if MESH.rank == 0:  # who has been compared is its own, and nobody is asked again
            torch.optim.SGD(model.head.parameters()).step()
        return [p.detach() for p in model.head.parameters()]


@pytest.mark.parametrize("adaptor", ADAPTORS)
def test_other_values_are_an_error(adaptor: Any) -> None:
    def main() -> str:
        with pytest.raises(mc.MeshError) as caught:
            trained(lambda model: adaptor(model, "dp", grads="mean"), seed=5 + MESH.rank)
        return str(caught.value)

    for text in mc.launch(main, ranks=2):
        assert "'head.weight' came to Model after it was made parallel, and its value is another one" in text


def test_gradients_that_nobody_reduces_are_an_error() -> None:
    def main() -> str:
        with pytest.raises(mc.MeshError) as caught:
            trained(lambda model: fully_shard(model, "dp", grads="mean"), seed=5)
        return str(caught.value)

    assert all("'head.weight' came to Model" in text and "its gradient is" in text for text in mc.launch(main, ranks=2))


@pytest.mark.parametrize("added", [False, True])
def test_an_optimiser_is_looked_at_when_it_has_them(added: bool) -> None:
    """Alone, or beside those that it had before; a step without gradients says nothing of them."""

    def main() -> None:
        with mc.use_mesh(MESH):
            model = fully_shard(Model(), "dp", grads="mean")
            model.head = nn.Linear(4, 2)
            sgd = torch.optim.SGD((model.up if added else model.head).parameters(), lr=0.1)
            sgd.step()
            if added:
                sgd.add_param_group({"params": [*model.head.parameters()]})
            model(torch.full((3, 4), 1.0 + MESH.rank)).sum().backward()
            with pytest.raises(mc.MeshError, match="came to"):
                sgd.step()

    mc.launch(main, ranks=2)


def test_gradients_that_come_with_the_step_are_looked_at() -> None:
    def main() -> None:
        with mc.use_mesh(MESH):
            model = fully_shard(Model(), "dp", grads="mean")
            model.head = nn.Linear(4, 2)
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)

            def closure() -> Tensor:
                loss: Tensor = model(torch.full((3, 4), 1.0 + MESH.rank)).sum()
                loss.backward()
                return loss

            with pytest.raises(mc.MeshError, match="came to"):
                sgd.step(closure)

    mc.launch(main, ranks=2)


def test_who_reduces_them_within_the_step_goes_on() -> None:
    def main() -> list[Tensor]:
        with mc.use_mesh(MESH):
            model = fully_shard(Model(), "dp", grads="mean")
            model.head = nn.Linear(4, 2)
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            sgd.register_step_pre_hook(lambda *_: reduced(model.head))
            for _ in range(2):
                model(torch.full((3, 4), 1.0 + MESH.rank)).sum().backward()
                sgd.step()
            return [p.detach() for p in model.head.parameters()]

    one, other = mc.launch(main, ranks=2)
    assert all(map(torch.equal, one, other))


def test_ranks_that_step_other_ones_are_left_alone() -> None:
    """As where each rank steps some, and sends them to the others."""

    def main() -> None:
        with mc.use_mesh(MESH):
            model = fully_shard(Model(), "dp", grads="mean")
            model.head = nn.Linear(4, 2)
            model(torch.full((3, 4), 1.0 + MESH.rank)).sum().backward()
            torch.optim.SGD([[*model.head.parameters()][MESH.rank]], lr=0.1).step()

    mc.launch(main, ranks=2)


def test_tensors_can_be_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which those cannot that somebody has weak references to."""
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    mesh = mc.make_mesh({"dp": 1})
    for adaptor in ADAPTORS:
        adaptor(Model(), "dp", grads="mean", mesh=mesh).double()


def same(head: nn.Module) -> None:
    for p in head.parameters():
        with torch.no_grad():
            p.copy_(mc.broadcast(p, "dp"))


def reduced(head: nn.Module) -> None:
    for p in head.parameters():
        assert p.grad is not None
        p.grad = mc.all_reduce(p.grad, "dp", "mean")


def test_who_reduces_them_goes_on() -> None:
    def main() -> list[Tensor]:
        return trained(lambda model: fully_shard(model, "dp", grads="mean"), 5 + MESH.rank, same, reduced)

    one, other = mc.launch(main, ranks=2)
    assert all(map(torch.equal, one, other))


def test_what_data_parallel_sees_and_drew_alike_is_right() -> None:
    one, other = mc.launch(lambda: trained(lambda model: data_parallel(model, "dp", grads="mean"), seed=5), ranks=2)
    assert all(map(torch.equal, one, other))


def test_what_is_to_differ_may() -> None:
    def main() -> list[Tensor]:
        spread = lambda model: fully_shard(model, "dp", grads="mean")  # noqa: E731
        return trained(spread, 5 + MESH.rank, lambda head: mc.mark_varying(head, "dp"))

    one, other = mc.launch(main, ranks=2)
    assert not torch.equal(one[0], other[0])


def test_copies_have_members_of_their_own() -> None:
    def main() -> None:
        with mc.use_mesh(MESH):
            for adaptor in ADAPTORS:
                model = copy.deepcopy(adaptor(Model(), "dp", grads="mean"))
                adam = torch.optim.AdamW(model.parameters())
                for _ in range(2):
                    model(torch.full((3, 4), 1.0 + MESH.rank)).sum().backward()
                    adam.step()
                model.head = nn.Linear(4, 2)
                with torch.no_grad():
                    model.head.weight.fill_(1.0 + MESH.rank)
                with pytest.raises(mc.MeshError, match="came to"):
                    torch.optim.AdamW(model.parameters()).step()

    mc.launch(main, ranks=2)


def test_a_later_adaptor_knows_them() -> None:
    def main() -> None:
        with mc.use_mesh(MESH):
            model = Model()
            tensor_parallel(model, {"up": "column", "down": "row", "head": "replicated"}, axis="dp")
            model.head = nn.Linear(4, 4)
            tensor_parallel(model.head, {"*": "column"}, axis="dp")
            adam = torch.optim.AdamW(model.parameters())
            model(torch.ones(3, 4)).sum().backward()
            adam.step()

    mc.launch(main, ranks=2)


class Unwilling(nn.Module):
    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        raise ValueError("this one is not to be copied")


@pytest.mark.parametrize("adaptor", ADAPTORS)
def test_a_copy_that_was_never_finished_is_in_nobodys_way(adaptor: Any) -> None:
    def main() -> None:
        with mc.use_mesh(MESH):
            model = adaptor(Model(), "dp", grads="mean")
            model.last = Unwilling()
            with pytest.raises(ValueError, match="not to be copied") as kept:
                copy.deepcopy(model)
            adam = torch.optim.AdamW(model.parameters())
            for _ in range(2):
                model(torch.ones(3, 4)).sum().backward()
                mc.parallel.clip_grad_norm(model, 1.0)
                adam.step()
            del kept

    mc.launch(main, ranks=2)


# -------------------------------------------------------------------------------- what goes, and what is put in its place


def of_another_length(model: Model) -> None:
    model.down.weight.data = torch.ones(4, 4)


REPLACED: dict[str, Callable[[Model], object]] = {
    "removed": lambda model: model.down.register_parameter("bias", None) if delattr(model.down, "bias") is None else 0,
    "None": lambda model: setattr(model.down, "bias", None),
    "whole": lambda model: setattr(model.down, "weight", nn.Parameter(torch.ones(4, 4))),
    "whole on one rank": lambda model: setattr(model.head, "bias", nn.Parameter(torch.ones(2))),
    "parametrized": lambda model: register_parametrization(model.down, "weight", nn.Identity()),
    "data": of_another_length,
    "tied": lambda model: setattr(model.head, "bias", model.down.weight),
}


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("grads", ["mean", "sum"])
@pytest.mark.parametrize("how", REPLACED)
def test_what_was_replaced_in_a_sharded_module_is_named(how: str, grads: Any, gradients: bool) -> None:
    def main() -> str:
        with mc.use_mesh(MESH), torch.set_grad_enabled(gradients):
            model = Model()
            fully_shard(model.down, "dp", grads=grads)
            fully_shard(model, "dp", grads=grads)
            model(torch.ones(3, 4))
            REPLACED[how](model)
            with pytest.raises((mc.MeshError, mc.CommError)) as caught:
                model(torch.ones(3, 4))
            return str(caught.value)

    for found in mc.launch(main, ranks=2):
        assert "was replaced or removed after fully_shard" in found


@pytest.mark.parametrize("how", ["whole", "data", "tied"])
def test_no_state_is_made_of_what_was_replaced(how: str) -> None:
    def main() -> None:
        with mc.use_mesh(MESH):
            model = fully_shard(Model(), "dp", grads="mean")
            model.down.weight = nn.Parameter(torch.ones(6, 4)) if how == "whole" else model.down.weight
            if how == "data":
                model.down.weight.data = torch.arange(24.0).view(6, 4)
            elif how == "tied":
                model.head.bias = model.down.weight
            with pytest.raises(mc.MeshError, match="a parameter was replaced after it was cut"):
                mc.parallel.full_state_dict(model)

    mc.launch(main, ranks=2)
