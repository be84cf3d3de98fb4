"""Graphs that outlive the function of a shard_map, and leaves that were made in it: checkpoints, hooks and custom functions
whose backward comes later, forces, physics-informed losses, and pullbacks that are called when their transform has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import meshcomm as mc
from meshcomm.runtime.transports.threads import eras

F64 = torch.float64
Body = Callable[..., Any]
Sum = Callable[[Tensor], Tensor]


def drawn(*shape: int, grad: bool = True, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed)).requires_grad_(grad)


def over_dp(x: Tensor) -> Tensor:
    return mc.all_reduce(x, "dp")


def alone(x: Tensor) -> Tensor:
    return x


def close(found: Any, expected: Any) -> None:
    assert_close(found, expected, rtol=1e-9, atol=1e-9)


# ---------------------------------------------------------------------------------- code that backward calls again


class Cube(Function):
    """Its backward makes a collective that only knows the name of the axis."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, total: Sum) -> Tensor:
        ctx.save_for_backward(x)
        ctx.total = total
        return total(x**3)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        same = mc.all_reduce(g, "dp", "mean") if ctx.total is over_dp else g.repeat(2, 1)
        return 3 * x**2 * same, None


def recomputed(total: Sum, pv: Sum, reentrant: bool) -> Body:
    def body(x: Tensor, w: Tensor) -> Tensor:
        def inner(x: Tensor, w: Tensor) -> Tensor:
            return total((x @ pv(w)).sin().square()).cos()

        found: Tensor = checkpoint(inner, x, w, use_reentrant=reentrant)
        return found.sum()

    return body


def nested(total: Sum, pv: Sum, reentrant: bool) -> Body:
    def body(x: Tensor, w: Tensor) -> Tensor:
        def inner(y: Tensor, w: Tensor) -> Tensor:
            return total((y @ pv(w)).sin()).cos()

        def outer(x: Tensor, w: Tensor) -> Tensor:
            y: Tensor = checkpoint(inner, x.sin(), w, use_reentrant=reentrant)
            return (y @ w).sin()

        found: Tensor = checkpoint(outer, x, w, use_reentrant=reentrant)
        return found.sum()

    return body


def hooked(total: Sum, pv: Sum, reentrant: bool) -> Body:
    """A hook that makes a mean over the ranks of a gradient that is the same on all of them."""

    def body(x: Tensor, w: Tensor) -> Tensor:
        y = total((x @ pv(w)).sin())
        y.register_hook(lambda g: total(g) / total(torch.ones_like(g)))
        return y.square().sum()

    return body


def by_custom_function(total: Sum, pv: Sum, reentrant: bool) -> Body:
    def body(x: Tensor, w: Tensor) -> Tensor:
        found: Tensor = Cube.apply((x @ pv(w)).sin(), total)
        return found.sum()

    return body


AGAIN = {make.__name__: make for make in (recomputed, nested, hooked, by_custom_function)}


def gradients(name: str, check: bool, reentrant: bool) -> list[Tensor]:
    """With backward outside of the body, of two meshes in turn."""
    found = []
    bodies = []
    for axes in ({"dp": 2}, {"tp": 1, "dp": 2}):
        make = AGAIN[name](over_dp, alone if check else (lambda w: mc.pvary(w, "dp")), reentrant)
        fn = mc.shard_map(make, mesh=mc.make_mesh(axes), in_specs=("(dp b) d", "d e"), out_specs="", check_vma=check)
        given = drawn(4, 2), drawn(2, 2, seed=1)
        bodies.append((fn(*given), given))
    for loss, given in bodies:  # when both meshes are no longer the current one
        loss.backward()
        found += [x.grad for x in given if x.grad is not None]
    return found


def expected_gradients(name: str, reentrant: bool) -> list[Tensor]:
    def total(x: Tensor) -> Tensor:
        return x.unflatten(0, (2, 2)).sum(0) if x.shape[0] == 4 else x

    given = drawn(4, 2), drawn(2, 2, seed=1)
    AGAIN[name](total, alone, reentrant)(*given).backward()
    return 2 * [x.grad for x in given if x.grad is not None]


CHECKED = [(name, True) for name in AGAIN if name not in ("hooked", "by_custom_function")]
"""The checker refuses to hand functions to a custom one, and types of gradients in hooks are not followed."""


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("name", "check"), [*CHECKED, *((name, False) for name in AGAIN)])
def test_backward_outside_of_the_body_finds_the_mesh(name: str, check: bool, reentrant: bool) -> None:
    expected = expected_gradients(name, reentrant)
    for found in mc.launch(gradients, ranks=2, args=(name, check, reentrant)):
        close(found, expected)


def test_on_processes(pool4: Any) -> None:
    pool4.run(on_two_of_four)


def on_two_of_four() -> None:
    """Each pair of ranks by itself."""
    first = [0, 1] if mc.rank() < 2 else [2, 3]
    mesh = mc.make_mesh({"dp": 2}, ranks=first)
    fn = mc.shard_map(
        recomputed(over_dp, alone, False), mesh=mesh, in_specs=("(dp b) d", "d e"), out_specs="", check_vma=True
    )
    given = drawn(4, 2), drawn(2, 2, seed=1)
    fn(*given).backward()
    close([x.grad for x in given], expected_gradients("recomputed", False)[:2])


def test_on_another_thread() -> None:
    """As autograd does for the nodes of an accelerator."""
    mesh = mc.make_mesh({"dp": 1})
    given = drawn(2, 2), drawn(2, 2, seed=1)
    with mc.use_mesh(mesh):
        loss = recomputed(over_dp, alone, False)(*given)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    other = [x.detach().clone().requires_grad_() for x in given]
    recomputed(alone, alone, False)(*other).backward()
    close([x.grad for x in given], [x.grad for x in other])


def test_without_a_backward_there_is_still_no_mesh() -> None:
    with mc.use_mesh(mc.make_mesh({"dp": 1})):
        assert mc.current_mesh() is not None
    assert mc.current_mesh() is None
    with pytest.raises(mc.MeshError, match="there is no mesh"):
        mc.all_reduce(torch.ones(2), "dp")


def test_of_graphs_without_a_mesh_there_is_none() -> None:
    seen: list[Any] = []
    made: list[Tensor] = []

    def in_a_thread() -> None:  # whose numbers begin anew
        x = torch.ones(2, requires_grad=True)
        y = x * 2
        y.register_hook(lambda g: seen.append(mc.current_mesh()))
        y.sum().backward()
        made.append(y)

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert made
    assert seen == [None]


def test_two_threads_with_other_meshes_are_not_mixed_up() -> None:
    """Numbers of nodes are a thread's own: where they do not tell, there is no mesh, rather than a wrong one."""
    meshes = [mc.make_mesh({"dp": 1}), mc.make_mesh({"dp": 1})]
    losses: list[Tensor] = []
    seen: list[Any] = []
    go, ready = threading.Event(), threading.Barrier(3)

    def program(mesh: mc.Mesh) -> None:
        x = torch.ones(2, requires_grad=True)
        with mc.use_mesh(mesh):
            y = x * 2
            y.register_hook(lambda g: seen.append(mc.current_mesh()))
            losses.append(y.sum())
        ready.wait()
        go.wait()

    threads = [threading.Thread(target=program, args=(mesh,)) for mesh in meshes]
    for thread in threads:
        thread.start()
    ready.wait()
    losses[0].backward()
    go.set()
    for thread in threads:
        thread.join()
    assert seen == [None]


def test_a_graph_keeps_its_mesh_within_another_one() -> None:
    """On every device: on an accelerator's thread nobody sees which mesh is current where backward was called."""
    first, second = mc.make_mesh({"dp": 1}), mc.make_mesh({"dp": 1})
    seen: list[Any] = []

    def look(g: Tensor) -> None:
        seen.append(mc.current_mesh())
        with mc.use_mesh(second):
            seen.append(mc.current_mesh())
        seen.append(mc.current_mesh())

    x = torch.ones(2, requires_grad=True)
    with mc.use_mesh(first):
        y = x * 2
        y.register_hook(look)
    with mc.use_mesh(second):
        y.sum().backward()
        assert mc.current_mesh() is second
    assert [mesh is first for mesh in seen] == [True, False, True]


def test_few_changes_are_kept() -> None:
    meshes = [mc.make_mesh({"dp": 1}), mc.make_mesh({"dp": 1})]
    x = torch.ones(1, requires_grad=True)
    for i in range(eras._MOST + 10):
        with mc.use_mesh(meshes[i % 2]):
            x * 2
    assert len(eras.of_thread.eras.starts) <= eras._MOST


# -------------------------------------------------------------------------------------------- leaves made in the body

NET = nn.Sequential(nn.Linear(2, 3, dtype=F64), nn.Tanh(), nn.Linear(3, 1, dtype=F64))


def physics(total: Sum) -> Body:
    """Two derivatives of a network by its inputs, and a gradient of that by its parameters."""

    def body(x: Tensor, w: Tensor) -> Any:
        p = x.detach().clone().requires_grad_()
        u = NET(p)
        (du,) = torch.autograd.grad(total(u.sum()), p, create_graph=True)
        (ddu,) = torch.autograd.grad(total((du * w[0]).sum()), p, create_graph=True)
        return total(ddu.square().sum() + u.square().sum())

    return body


def forces(total: Sum) -> Body:
    def body(x: Tensor, w: Tensor) -> Any:
        y = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(total((y @ w).pow(3).sum()), y, create_graph=True)
        return total(force.square().sum()), total((x @ w).sum())

    return body


def asked_for_in_place(total: Sum) -> Body:
    def body(x: Tensor, w: Tensor) -> Any:
        y = x.detach()
        y.requires_grad = True
        (force,) = torch.autograd.grad(total((y @ w).pow(3).sum()), [y], create_graph=True)
        return total(force.square().sum())

    return body


def kept_by_a_cycle(total: Sum) -> Body:
    def body(x: Tensor, w: Tensor) -> Any:
        y = x.detach().requires_grad_()

        def energy(n: int) -> Tensor:
            return total((y @ w).pow(3).sum()) if n == 0 else energy(n - 1)

        return total(torch.autograd.grad(energy(1), y, create_graph=True)[0].square().sum())

    return body


def one_inner_step(total: Sum) -> Body:
    def body(x: Tensor, w: Tensor) -> Any:
        fast = w.detach().clone().requires_grad_()
        loss = total((x @ fast @ w).square().sum())
        (g,) = torch.autograd.grad(loss, fast, create_graph=True)
        return total((x @ (w - 0.1 * g)).square().sum())

    return body


def points_made_inside(total: Sum) -> Body:
    def body(x: Tensor, w: Tensor) -> Any:
        t = torch.linspace(0, 1, 2, dtype=F64, requires_grad=True)
        u = total((x * t @ w).pow(3).sum())
        (g,) = torch.autograd.grad(u, t, create_graph=True)
        return g.square().sum() + u

    return body


def a_leaf_is_returned(total: Sum) -> Body:
    def body(x: Tensor, w: Tensor) -> Any:
        t = torch.ones((), dtype=F64, requires_grad=True)
        return t, total((x @ w * t).square().sum())

    return body


LEAVES = {
    make.__name__: make
    for make in (
        physics, forces, asked_for_in_place, kept_by_a_cycle, one_inner_step, points_made_inside, a_leaf_is_returned
    )
}  # fmt: skip
PAIRS = ("forces", "a_leaf_is_returned")


def derivatives(fn: Body, x: Tensor, w: Tensor) -> list[Tensor]:
    """Values, gradients, and gradients of a function of these."""
    outputs = fn(x, w)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    given = [p for p in (x, w, *NET.parameters()) if p.requires_grad]

    def of(y: Tensor, graph: bool) -> list[Tensor]:
        found = torch.autograd.grad(y, given, create_graph=graph, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(given, found, strict=True)]

    first = of(torch.stack([y for y in outputs if y.requires_grad]).sum(), True)
    live = [g.square().sum() for g in first if g.requires_grad]
    return [*outputs, *first, *(of(torch.stack(live).sum(), False) if live else [])]


def mapped(name: str, check: Any, grad: bool) -> list[Tensor]:
    fn = mc.shard_map(
        LEAVES[name](over_dp), mesh=mc.make_mesh({"dp": 2}), in_specs=("(dp b) d", "d e"),
        out_specs=("", "") if name in PAIRS else "", check_vma=check,
    )  # fmt: skip
    return derivatives(fn, drawn(4, 2, grad=grad), drawn(2, 2, seed=1))


@pytest.mark.parametrize("on_ranks", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", LEAVES)
def test_a_leaf_made_in_the_body(name: str, grad: bool, on_ranks: bool) -> None:
    expected = derivatives(LEAVES[name](alone), drawn(4, 2, grad=grad), drawn(2, 2, seed=1))
    runs = mc.launch(mapped, ranks=2, args=(name, True, grad)) if on_ranks else [mapped(name, True, grad)]
    for found in runs:
        close(found, expected)


def test_one_that_somebody_else_has_is_refused_where_it_was_not_found() -> None:
    """Its gradient would be lost: this is no constant."""
    hidden = iter([torch.ones((), dtype=F64, requires_grad=True)] * 9)
    kept = next(hidden)
    fn = mc.shard_map(
        lambda x: over_dp((next(hidden) * x).sum()), mesh=mc.make_mesh({"dp": 2}), in_specs="(dp n)", out_specs="",
        check_vma=False,
    )  # fmt: skip
    with pytest.raises(mc.MeshError, match="was not found to be an input"):
        fn(drawn(4))
    assert kept.grad is None


# -------------------------------------------------------------------------------------- pullbacks called afterwards


def cubes(x: Tensor, w: Tensor) -> Tensor:
    return over_dp((x**3 @ w).square().sum())


def cubes_whole(x: Tensor, w: Tensor) -> Tensor:
    return (x**3 @ w).square().sum()


G = torch.tensor(1.5, dtype=F64)
AFTERWARDS: dict[str, Callable[[Body, Tensor, Tensor], Any]] = {
    "vjp": lambda f, x, w: torch.func.vjp(f, x, w)[1](G),
    "vjp, twice called": lambda f, x, w: [pull(G) for pull in [torch.func.vjp(f, x, w)[1]] * 2],
    "vjp with a closure": lambda f, x, w: torch.func.vjp(lambda x: f(x, w), x)[1](G),
    "vjp of vjp": lambda f, x, w: torch.func.vjp(lambda x: torch.func.vjp(f, x, w)[1](G)[1], x)[1](w),
    "grad of vjp": lambda f, x, w: torch.func.grad(lambda w: torch.func.vjp(f, x, w)[1](G)[0].square().sum())(w),
    "vjp of grad": lambda f, x, w: torch.func.vjp(torch.func.grad(f), x, w)[1](x),
    "jacrev": lambda f, x, w: torch.func.jacrev(f, argnums=(0, 1))(x, w),
    "jacrev of jacrev": lambda f, x, w: torch.func.jacrev(torch.func.jacrev(f, argnums=1), argnums=1)(x, w),
    "vmap of the pullback": lambda f, x, w: torch.func.vmap(torch.func.vjp(f, x, w)[1])(torch.stack([G, 2 * G])),
    "autograd of the pullback": lambda f, x, w: torch.autograd.grad(
        torch.func.vjp(f, x, w.requires_grad_())[1](G)[0].square().sum(), w
    ),
}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("name", AFTERWARDS)
def test_what_a_transform_gives_is_used_when_it_has_ended(name: str, check: bool) -> None:
    body = cubes if check else lambda x, w: cubes(x, mc.pvary(w, "dp"))
    fn = mc.shard_map(body, mesh=mc.make_mesh({"dp": 2}), in_specs=("(dp b) d", "d e"), out_specs="", check_vma=check)
    x, w = drawn(4, 2, grad=False), drawn(2, 2, seed=1, grad=False)
    close(AFTERWARDS[name](fn, x.clone(), w.clone()), AFTERWARDS[name](cubes_whole, x.clone(), w.clone()))


def test_forward_mode_outside_of_ranks_is_refused_with_the_way_out() -> None:
    fn = mc.shard_map(cubes, mesh=mc.make_mesh({"dp": 2}), in_specs=("(dp b) d", "d e"), out_specs="")
    x, w = drawn(4, 2, grad=False), drawn(2, 2, seed=1, grad=False)
    for ask in (lambda: torch.func.jvp(fn, (x, w), (x, w)), lambda: torch.func.linearize(fn, x, w)):
        with pytest.raises(mc.MeshError, match=r"forward mode works on ranks only(.|\n)*torch\.func\.vjp"):
            ask()
