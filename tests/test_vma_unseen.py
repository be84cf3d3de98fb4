"""Writes that modes do not see, and what the checker of varying types makes of them: the right number, or a refusal."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from vma_twins import F64, LINE, Program, check, data, refused, zeros

import meshcomm as mc
from meshcomm.spmd.types import foreign_memory
from meshcomm.spmd.types.checker import Checker
from meshcomm.spmd.types.rules import at_once, in_place
from meshcomm.spmd.types.rules.torch_rules import kind_of
from meshcomm.spmd.types.seen_changes import AGAIN

Write = Callable[[Tensor, Tensor], Any]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # newer torch says that TorchScript will go

    @torch.jit.script
    def scripted_copy(z: Tensor, x: Tensor) -> None:
        z.copy_(x)

    @torch.jit.script
    def scripted_add(z: Tensor, x: Tensor) -> Tensor:
        z += x
        return z * 2


def set_storage(z: Tensor, x: Tensor) -> None:
    z.set_(x.clone().untyped_storage(), 0, z.shape)  # type: ignore[call-overload]


def with_no_mode(z: Tensor, x: Tensor) -> None:
    with torch._C.DisableTorchFunction():
        z.copy_(x)


def with_no_check(z: Tensor, x: Tensor) -> None:
    with mc.check_vma(False):
        z.add_(x)


COUNTED: dict[str, Write] = {
    "set_": lambda z, x: z.set_(x.clone()),
    "set_ to a storage": set_storage,
    "scripted copy": scripted_copy,
    "scripted addition": scripted_add,
    "no mode": with_no_mode,
    "no check": with_no_check,
}
"""torch counts these as changes, and nobody sees them."""

USES: dict[str, Callable[[Tensor, Write, Tensor], Tensor]] = {}


def use(fn: Callable[[Tensor, Write, Tensor], Tensor]) -> None:
    USES[fn.__name__] = fn


@use
def itself(x: Tensor, write: Write, other: Tensor) -> Tensor:
    z = zeros(2)
    write(z, x)
    return z


@use
def itself_after_changes_that_are_seen(x: Tensor, write: Write, other: Tensor) -> Tensor:
    z = zeros(2)
    z.add_(1)
    write(z, x)
    z.mul_(2)
    return z


@use
def made_of_it_without_grad(x: Tensor, write: Write, other: Tensor) -> Tensor:
    z = zeros(2)
    with torch.no_grad():
        write(z, x)
        return other.copy_(z)


@use
def added_without_grad(x: Tensor, write: Write, other: Tensor) -> Tensor:
    z = zeros(2)
    write(z, x)
    with torch.no_grad():
        other += z
    return other


@use
def a_buffer_of_a_module(x: Tensor, write: Write, other: Tensor) -> Tensor:
    module = nn.Module()
    module.register_buffer("z", zeros(2))
    write(module.z, x)
    return module.z


@pytest.mark.parametrize("how", USES)
@pytest.mark.parametrize("write", COUNTED)
def test_a_change_that_nobody_saw(write: str, how: str) -> None:
    def program(s: Tensor, x: Tensor) -> Tensor:
        return (s * USES[how](x, COUNTED[write], zeros(2))).sum() + x.sum()

    refused(program, "changed out of sight|made out of sight")


VIEWS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "a view": lambda z: (z, z[:]),
    "its base": lambda z: (z[:], z),
    "an alias": lambda z: (z, z.detach()),
    "of an alias": lambda z: (z.detach(), z),
    "another view": lambda z: (z.view(1, 2)[0], z.view(2, 1)[:, 0]),
}


@pytest.mark.parametrize("views", VIEWS)
@pytest.mark.parametrize("write", [scripted_copy, scripted_add, with_no_mode, with_no_check])
def test_a_change_of_what_shares_memory(write: Write, views: str) -> None:
    def program(s: Tensor, x: Tensor) -> Tensor:
        written, read = VIEWS[views](zeros(2))
        write(written, x)
        return (s * read).sum() + x.sum()

    refused(program, "changed out of sight")


def real_part(s: Tensor, x: Tensor) -> Tensor:
    z = torch.zeros(2, dtype=torch.complex128)
    z.real = x
    return (s * z.real).sum() + x.sum()


def imaginary_part(s: Tensor, x: Tensor) -> Tensor:
    z = torch.zeros(2, dtype=torch.complex128)
    z.imag = x
    return (s * z.imag).sum() + x.sum()


def part_of_a_view(s: Tensor, x: Tensor) -> Tensor:
    z = torch.zeros(4, dtype=torch.complex128)
    z[2:].real = x
    return (s * z.real[2:]).sum() + x.sum()


def part_with_a_graph(s: Tensor, x: Tensor) -> Tensor:
    z = torch.zeros(2, dtype=torch.complex128)
    z.imag.copy_(x)
    z.real = s
    return (z.real * x).sum()


def in_the_graph(s: Tensor, x: Tensor) -> Tensor:
    z = s * 1
    scripted_add(z, x)
    return (s * z).sum() + x.sum()


def by_another_thread(s: Tensor, x: Tensor) -> Tensor:
    z = zeros(2)
    with_no_mode(z, x)
    return (s * z).sum() + x.sum()


def by_a_hook(s: Tensor, x: Tensor) -> Tensor:
    z, h = zeros(2), torch.ones(2, dtype=F64).requires_grad_()
    y = (h * 2).sum()
    y.register_hook(lambda g: [g, z.copy_(x)][0])
    torch.autograd.grad(y, h)
    return (s * z).sum() + x.sum()


@pytest.mark.parametrize(
    "program", [real_part, imaginary_part, part_of_a_view, part_with_a_graph, in_the_graph, by_another_thread]
)
def test_refused(program: Program) -> None:
    refused(program, "changed out of sight")


def test_of_a_hook() -> None:
    """It is looked at, too."""
    check(by_a_hook)


def overwritten_in_sight(s: Tensor, x: Tensor) -> Tensor:
    z = zeros(2)
    scripted_copy(z, x)
    z.copy_(x * 2)
    return (s * z).sum()


def declared_afterwards(s: Tensor, x: Tensor) -> Tensor:
    z = zeros(2)
    scripted_copy(z, x)
    return (s * mc.mark_varying(z, "dp")).sum()


def changes_that_are_seen(s: Tensor, x: Tensor) -> Tensor:
    z = zeros(2)
    v, d = z[:1], z.detach()
    for _ in range(3):
        z += 1
        v.mul_(2)
        d.sub_(0.5)
        z.data.add_(1)
        z.unsqueeze_(0).t_().transpose_(0, 1).squeeze_(0)
        torch._foreach_add_([z, d], 1.0)
        nn.init.constant_(v, 2.0)
    return (s * z * x).sum() + (v * x).sum() + (s * d * x).sum()


def counted_from_the_beginning(s: Tensor, x: Tensor) -> Tensor:
    """What some functions make has been changed in place already."""
    one = torch.nn.functional.one_hot(torch.tensor([0, 1]))
    return (s * (one.to(F64) @ x) * torch.quantile(x, 0.5) * copy.deepcopy(x)).sum()


def in_many_places(s: Tensor, x: Tensor) -> Tensor:
    """More apart than are kept, each with a count of its own."""
    z = zeros(2)
    for i in range(40):
        z.data[i % 2 :].add_(1).mul_(2).clamp_(max=5)
        z.add_(x)
    return (s * z).sum()


@pytest.mark.parametrize(
    "program",
    [overwritten_in_sight, declared_afterwards, changes_that_are_seen, counted_from_the_beginning, in_many_places],
)
def test_right(program: Program) -> None:
    check(program)


# -------------------------------------------------------------------------------------------- memory with many owners

ALIASES: dict[str, Callable[[Tensor], Tensor]] = {
    "numpy": lambda z: torch.from_numpy(z.numpy()),
    "asarray": lambda z: torch.from_numpy(np.asarray(z)),
    "a part": lambda z: torch.from_numpy(z.numpy()[:]),
    "buffer": lambda z: torch.frombuffer(memoryview(z.numpy()), dtype=F64),
    "dlpack": torch.from_dlpack,
    "capsule": lambda z: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(z)),
    "numpy's dlpack": lambda z: torch.from_numpy(np.from_dlpack(z).view()),
    "storage": lambda z: torch.empty(0, dtype=F64).set_(z.untyped_storage(), 0, z.shape),  # type: ignore[call-overload]
    "parameter": lambda z: nn.Parameter(z, requires_grad=False),
    "subclass": lambda z: torch.Tensor._make_subclass(torch.Tensor, z),
}

INTO: dict[str, Write] = {
    "copy_": lambda z, x: z.copy_(x),
    "add_": lambda z, x: z.add_(x),
    "setitem": lambda z, x: z.__setitem__(slice(None), x),
    "out": lambda z, x: torch.mul(x, 2, out=z),
    "foreach": lambda z, x: torch._foreach_copy_([z], [x]),
}


@pytest.mark.parametrize("into", INTO)
@pytest.mark.parametrize("alias", ALIASES)
def test_of_an_alias(alias: str, into: str) -> None:
    def program(s: Tensor, x: Tensor) -> Tensor:
        z = zeros(2)
        v = z[1:]
        INTO[into](ALIASES[alias](z), x)
        return (s * z).sum() + (s[1:] * v).sum() + x.sum()

    if into in ("copy_", "out") or alias == "parameter":  # all that was there is gone, or was seen to be there
        check(program)
    else:
        refused(program, "made out of sight|changed out of sight")


@pytest.mark.parametrize("declared", [1, 2])
@pytest.mark.parametrize("part", [slice(None), slice(1, 3)])
def test_of_what_numpy_has_made(part: slice, declared: int) -> None:
    def program(s: Tensor, x: Tensor) -> Tensor:
        array = np.zeros(4)
        z = mc.mark_varying(torch.from_numpy(array), ())
        y = torch.from_numpy(array[part])
        if declared == 2:
            mc.mark_varying(y, ())
        y[:2].copy_(x)
        return (s * z[1:3]).sum() + x.sum()

    check(program)


def test_what_others_have_is_forgotten() -> None:
    gc.collect()
    before = len(foreign_memory.lent)
    z = torch.zeros(2)
    foreign_memory.lend(z)
    assert len(foreign_memory.lent) == before + 1
    del z
    gc.collect()
    assert len(foreign_memory.lent) == before


def test_a_storage_is_copied_into() -> None:
    def program(s: Tensor, x: Tensor) -> Tensor:
        z = zeros(2)
        v = z[:]
        z.untyped_storage().copy_(x.clone().untyped_storage())
        return (s * v).sum() + x.sum()

    refused(program, "UntypedStorage.copy_ at test_vma_unseen.py:.* wrote")


# ------------------------------------------------------------------------------------- where nobody is expected to look


def test_parameters_are_updated_between_checks() -> None:
    """And in backward passes, and where a check is off: what is declared holds for the object."""

    def train(rank: int | None) -> list[Tensor]:
        total: Callable[[Tensor], Tensor] = lambda y: y if rank is None else mc.all_reduce(y, "dp")  # noqa: E731
        weight = nn.Parameter(torch.ones(2, dtype=F64))
        buffer = torch.ones(2, dtype=F64)
        mc.mark_varying([weight, buffer], ())
        rows = data().detach().view(2, 2)
        x = rows if rank is None else mc.mark_varying(rows[rank : rank + 1].clone(), "dp")
        optimizer = torch.optim.SGD([weight], lr=0.01)
        losses = []
        weight.register_post_accumulate_grad_hook(lambda p: scripted_copy(p.detach(), p.detach() * 0.9))
        for number in range(4):
            with mc.check_vma(rank is not None):
                loss = total((x * weight * buffer).square().sum())
                loss.backward()
                losses.append(loss.detach())
                with mc.check_vma(False):
                    weight.data.sub_(0.1)
                    if number == 2:
                        optimizer.step()
            optimizer.step()
            buffer.mul_(0.5)
            optimizer.zero_grad(set_to_none=number % 2 == 0)
        return [*losses, weight.detach()]

    def on_rank() -> list[Tensor]:
        with mc.use_mesh(mc.make_mesh(LINE)) as mesh:
            return train(mesh.rank)

    right = train(None)
    for mine in mc.launch(on_rank, ranks=2):
        assert_close(mine, right)


def test_gradients_that_add_up() -> None:
    def on_rank() -> list[float]:
        with mc.use_mesh(mc.make_mesh(LINE)) as mesh:
            weight = mc.mark_varying(nn.Parameter(torch.ones(2, dtype=F64)), ())
            x = mc.mark_varying(torch.full((2,), mesh.rank + 1.0, dtype=F64), "dp")
            norms = []
            with mc.check_vma():
                for _ in range(3):
                    mc.all_reduce((x * weight).sum(), "dp").backward()
                    assert weight.grad is not None
                    norms.append((weight.detach() * weight.grad).sum().item())
        return norms

    assert mc.launch(on_rank, ranks=2) == [[6.0, 12.0, 18.0]] * 2


# ------------------------------------------------------------------------------------------------ again and again


@pytest.fixture
def nothing_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test before has left memory that numpy or another library has too, or made a number that varies: then nothing
    is remembered.
    """
    for module in (at_once, in_place):
        monkeypatch.setattr(module, "lent", {})
    monkeypatch.setattr(at_once.made, "any", False)


def written_again(kind: str | tuple[str, ...], *, leaf: bool) -> Tensor:
    """What was written into so often that it is known."""
    x = mc.mark_varying(torch.ones(4, requires_grad=leaf), kind)
    by = mc.mark_varying(torch.ones(4), kind)
    with torch.no_grad():
        for _ in range(3):
            x.mul_(by)
    known = getattr(x, AGAIN, None)
    assert known is not None
    assert getattr(x.untyped_storage(), AGAIN) is known
    return x


@pytest.mark.usefixtures("nothing_lent")
def test_what_is_written_again_and_under_another_name_too() -> None:
    with mc.use_mesh(mc.make_mesh({"x": 1})), mc.check_vma(), torch.no_grad():
        x = written_again((), leaf=True)
        with torch._C.DisableTorchFunction():
            other = mc.mark_varying(x.data, ())  # a write into it does not count as a change of x
        other.copy_(mc.mark_varying(torch.ones(4), "x"))
        with pytest.raises(mc.VaryingError, match=r"a write into f32\[4\].*through other tensors"):
            x.mul_(2.0)


@pytest.mark.usefixtures("nothing_lent")
def test_what_is_written_again_and_has_other_memory_meanwhile() -> None:
    with mc.use_mesh(mc.make_mesh({"x": 1})), mc.check_vma(), torch.no_grad():
        x = written_again("x", leaf=False)
        y = mc.mark_varying(torch.ones(4), ())
        with torch._C.DisableTorchFunction():
            x.data = y
        x.mul_(mc.mark_varying(torch.ones(4), "x"))
        with pytest.raises(mc.VaryingError, match="item.*makes a Python value of a tensor that varies along 'x'"):
            y[0].item()


@pytest.mark.usefixtures("nothing_lent")
def test_what_is_written_again_and_under_a_name_with_a_count_of_its_own() -> None:
    """What was seen of that is not forgotten when the first one is written again."""
    with mc.use_mesh(mc.make_mesh({"x": 1})), mc.check_vma(), torch.no_grad():
        x, one = written_again((), leaf=False), mc.mark_varying(torch.ones(4), ())
        y = x.data
        for _ in range(4):
            torch.add(y, one, out=y)
        v = y[0:2]
        for _ in range(2):
            torch.add(y, one, out=y)
        x.add_(one)
        assert [(each * 1.0)[0].item() for each in (x, y, v)] == [8.0] * 3


def test_the_mode_is_found_in_its_own_class() -> None:
    """torch looks it up in one class after the other, at each operation."""
    assert "__torch_function__" in vars(Checker)
    assert kind_of(nn.functional.softmax).way
    assert not kind_of(nn.functional.rrelu).way  # it may write in place
