"""shard_map against the same function of the global tensors, from outside of ranks and on the ranks of both runtimes."""

from __future__ import annotations

import functools
import threading
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call
from torch.nn.functional import dropout, layer_norm
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import meshcomm as mc

F64 = torch.float64
AXES = {"dp": 2, "tp": 2}
Run = Callable[..., list[Any]]


def rand(*shape: int, seed: int = 0, grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 31 * len(shape) + sum(shape))
    return torch.randn(shape, dtype=F64, generator=generator, requires_grad=grad)


def grid() -> mc.Mesh:
    return mc.make_mesh(AXES)


@pytest.fixture(params=["outside", "in-process", "processes"])
def everywhere(request: pytest.FixtureRequest) -> Callable[[Callable[[], Any]], None]:
    """Runs a check of global values in a plain process and on each of four ranks."""
    if request.param == "outside":
        return lambda check: check()
    if request.param == "in-process":
        return lambda check: [None for _ in mc.launch(check, ranks=4)]
    return request.getfixturevalue("pool4").run


# ------------------------------------------------------------------------------------------------------- the programs


def mlp_sharded(mesh: mc.Mesh) -> Callable[..., Tensor]:
    @mc.shard_map(mesh=mesh, in_specs=("(dp b) d", "d (tp f)", "(tp f) d"), out_specs="(dp b) d")
    def mlp(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        w1, w2 = mc.pvary((w1, w2), "dp")
        return mc.all_reduce(torch.tanh(mc.pvary(x, "tp") @ w1) @ w2, "tp")

    return mlp


def mlp_whole(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    return torch.tanh(x @ w1) @ w2


def mlp_inputs() -> tuple[Tensor, ...]:
    return rand(4, 3), rand(3, 6), rand(6, 3, seed=1)


def loss_sharded(mesh: mc.Mesh) -> Callable[..., Tensor]:
    """Data parallel over both axes."""

    @mc.shard_map(mesh=mesh, in_specs=({"w": "...", "b": "d"}, "(dp tp n) d"), out_specs="")
    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        both = ("dp", "tp")
        params = mc.pvary(params, both)
        return mc.all_reduce(torch.tanh(x @ params["w"] + params["b"]).square().mean(), both, op="mean")

    return loss


def loss_whole(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.tanh(x @ params["w"] + params["b"]).square().mean()


HEADS, WIDTH = 4, 8
BLOCK = {
    "norm": rand(WIDTH), "qkv": rand(3, HEADS, WIDTH, WIDTH // HEADS), "out": rand(HEADS, WIDTH // HEADS, WIDTH),
    "up": rand(WIDTH, 12), "down": rand(12, WIDTH),
}  # fmt: skip


def block_whole(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return _block(p, x, lambda x: x, lambda x: x)


def _block(
    p: dict[str, Tensor], x: Tensor, split: Callable[[Tensor], Tensor], join: Callable[[Tensor], Tensor]
) -> Tensor:
    y = split(layer_norm(x, (WIDTH,), p["norm"]))
    q, k, v = torch.einsum("bsd,nhde->nbhse", y, p["qkv"])
    seen = torch.softmax(q @ k.mT, -1) @ v
    x = x + join(torch.einsum("bhse,hed->bsd", seen, p["out"]))
    return x + join(torch.tanh(split(layer_norm(x, (WIDTH,))) @ p["up"]) @ p["down"])


def block_sharded(mesh: mc.Mesh) -> Callable[..., Tensor]:
    specs = {"norm": "d", "qkv": "n (tp h) d e", "out": "(tp h) e d", "up": "d (tp f)", "down": "(tp f) d"}

    @mc.shard_map(mesh=mesh, in_specs=(specs, "(dp b) s d"), out_specs="(dp b) s d")
    def block(p: dict[str, Tensor], x: Tensor) -> Tensor:
        p = mc.pvary(p, "dp")
        return _block(p, x, lambda x: mc.pvary(x, "tp"), lambda x: mc.all_reduce(x, "tp"))

    return block


PROGRAMS: dict[
    str, tuple[Callable[[mc.Mesh], Callable[..., Tensor]], Callable[..., Tensor], Callable[[], tuple[Any, ...]]]
] = {
    "mlp": (mlp_sharded, mlp_whole, mlp_inputs),
    "loss": (loss_sharded, loss_whole, lambda: ({"w": rand(3, 5), "b": rand(5)}, rand(8, 3, seed=2))),
    "block": (block_sharded, block_whole, lambda: (BLOCK, rand(2, 3, WIDTH))),
}


def leaves(tree: Any) -> list[Tensor]:
    found: list[Tensor] = torch.utils._pytree.tree_leaves(tree)
    return found


def check_derivatives(name: str) -> None:
    """Values, gradients, and the gradients of a function of these, with respect to all inputs."""
    sharded, whole, inputs = PROGRAMS[name]
    args = inputs()
    given = leaves(args)
    mine, right = sharded(grid())(*args), whole(*args)
    assert_close(mine, right)
    weights = rand(*right.shape, seed=5)
    first = [torch.autograd.grad((y * weights).sum(), given, create_graph=True) for y in (mine, right)]
    assert_close(*first)
    second = [torch.autograd.grad(sum(g.square().sum() for g in gs), [*given, weights]) for gs in first]
    assert_close(*second)


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_derivatives_are_those_of_the_whole(everywhere: Any, name: str) -> None:
    everywhere(functools.partial(check_derivatives, name))


def test_complex_against_finite_differences() -> None:
    z, w = (torch.complex(rand(2, 1, seed=i), rand(2, 1, seed=i + 1)).detach().requires_grad_() for i in (1, 3))
    mapped = mc.shard_map(
        lambda z, w: mc.all_reduce((z * mc.pvary(w, "dp")).exp() / 4, "dp"),
        mesh=grid(),
        in_specs=("(dp b) d", "b d"),
        out_specs="b d",
    )
    assert torch.autograd.gradcheck(mapped, (z, w[:1].detach().requires_grad_()))
    assert torch.autograd.gradgradcheck(mapped, (z, w[:1].detach().requires_grad_()))


def check_func(name: str) -> None:
    """torch.func's grad and a second derivative of it."""
    sharded, whole, inputs = PROGRAMS[name]
    args = torch.utils._pytree.tree_map(lambda x: x.detach(), inputs())
    mine, right = sharded(grid()), whole

    def slope(fn: Callable[..., Tensor]) -> Any:
        return torch.func.grad(lambda *args: fn(*args).square().sum(), argnums=(0, 1))

    assert_close(slope(mine)(*args), slope(right)(*args))

    def curve(fn: Callable[..., Tensor]) -> Any:
        return torch.func.grad(
            lambda x: slope(fn)(*args[:-1], x)[1].sum() if len(args) == 2 else slope(fn)(args[0], x, args[2])[0].sum()
        )

    at = args[1]
    assert_close(curve(mine)(at), curve(right)(at))


@pytest.mark.parametrize("name", ["mlp", "loss"])
def test_torch_func_grad(everywhere: Any, name: str) -> None:
    everywhere(functools.partial(check_func, name))


def test_vmap_runs_once_per_element() -> None:
    x, w1, w2 = (x.detach() for x in mlp_inputs())
    mine, right = mlp_sharded(grid()), mlp_whole
    many = torch.stack([w1, 2 * w1, w1 - 1], 1)
    assert_close(torch.vmap(mine, (None, 1, None))(x, many, w2), torch.vmap(right, (None, 1, None))(x, many, w2))
    assert_close(torch.func.jacrev(mine, 1)(x, w1, w2), torch.func.jacrev(right, 1)(x, w1, w2))

    def slopes(fn: Callable[..., Tensor]) -> Any:
        return torch.vmap(torch.func.grad(lambda *args: fn(*args).square().sum(), (0, 1)), (None, 1, None))(x, many, w2)

    assert_close(slopes(mine), slopes(right))
    factors, over = rand(3, seed=3, grad=False), rand(4, 2, grad=False)

    def scaled(factor: Tensor) -> Tensor:
        return mc.shard_map(lambda x: x * factor, mesh=grid(), in_specs="(dp b) d", out_specs="(dp b) d")(over)

    assert_close(torch.vmap(scaled)(factors), factors.view(3, 1, 1) * over)


def test_vmap_asks_about_randomness() -> None:
    noisy = mc.shard_map(lambda x: x + torch.rand(2), mesh=grid(), in_specs="(dp tp b) d", out_specs="(dp tp b) d")
    xs = torch.zeros(3, 4, 2)
    same = torch.vmap(noisy, randomness="same")(xs)
    assert_close(same[0], same[1])
    different = torch.vmap(noisy, randomness="different")(xs)
    assert not torch.equal(different[0], different[1])


def test_forward_mode_is_refused_outside_of_ranks() -> None:
    x = rand(4, 2, grad=False)
    double = mc.shard_map(lambda x: 2 * x, mesh=grid(), in_specs="(dp b) d", out_specs="(dp b) d")
    with pytest.raises(mc.MeshError, match="forward mode works on ranks only"):
        torch.func.jvp(double, (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(mc.MeshError, match="forward mode works on ranks only"):
            mc.shard_map(lambda x: x + dual, mesh=grid(), in_specs="b d", out_specs="b d")(x)


def check_jvp_on_ranks() -> None:
    args = tuple(x.detach() for x in mlp_inputs())
    assert_close(torch.func.jvp(mlp_sharded(grid()), args, args), torch.func.jvp(mlp_whole, args, args))


def test_forward_mode_on_ranks(run4: Run) -> None:
    run4(check_jvp_on_ranks)


# ---------------------------------------------------------------------------------------------------- what is closed over

BOTH = ("dp", "tp")
ROWS = "(dp tp b) d"


def varied(module: nn.Module) -> dict[str, Tensor]:
    return mc.pvary(dict(module.named_parameters()), BOTH)


def rows(
    fn: Callable[[Tensor], Tensor], mesh: mc.Mesh | None = None, check_vma: bool = True
) -> Callable[[Tensor], Tensor]:
    return mc.shard_map(fn, mesh=mesh or grid(), in_specs=ROWS, out_specs=ROWS, check_vma=check_vma)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).to(F64)


def gradients(module: nn.Module) -> list[Tensor | None]:
    found = [p.grad for p in module.parameters()]
    module.zero_grad()
    return found


def check_module_gradients() -> None:
    """weight.grad, summed over two backward passes, and the second derivative."""
    model, x = net(), rand(8, 3)
    mine = rows(lambda x: functional_call(model, varied(model), (x,)))
    found = []
    for fn in (mine, model):
        for scale in (1, 2):
            fn(scale * x).square().sum().backward()
        found.append([x.grad, *gradients(model)])
        x.grad = None
    assert_close(*found)
    both = [
        torch.autograd.grad(fn(x).square().sum(), [x, *model.parameters()], create_graph=True) for fn in (mine, model)
    ]
    assert_close(*both)
    second = [torch.autograd.grad(sum(g.square().sum() for g in gs), [x, *list(model.parameters())[:3]]) for gs in both]
    assert_close(*second)


def test_module_parameters(everywhere: Any) -> None:
    everywhere(check_module_gradients)


class Parallel(nn.Module):
    """Tensor parallel, with a collective in the midst."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Parameter(rand(3, 4).detach()), nn.Parameter(rand(4, 3).detach())
        self.frozen = nn.Parameter(rand(4, seed=1).detach(), requires_grad=False)

    def forward(self, x: Tensor, parts: Any = None) -> Tensor:
        reduce = (lambda y: mc.all_reduce(y, "tp")) if parts else (lambda y: y)
        vary = (lambda y: mc.pvary(y, "tp")) if parts else (lambda y: y)
        for _ in range(2):
            x = reduce((torch.tanh(vary(x) @ self.up) * self.frozen) @ self.down)
        return x


def check_change_over_inside_functional_call() -> None:
    """Each rank has other tensors in the one module, and the ranks take turns while it runs."""
    model, x = Parallel(), rand(4, 3)
    before = dict(model.named_parameters())

    def fn(x: Tensor) -> Tensor:
        params = mc.pvary(dict(model.named_parameters()), "dp")
        shards = {name: mc.shard(p, "tp", 1 if name == "up" else 0) for name, p in params.items()}
        return functional_call(model, shards, (x, True))

    mine = mc.shard_map(fn, mesh=grid(), in_specs="(dp b) d", out_specs="(dp b) d")
    found = [(y := f(x), *torch.autograd.grad(y.square().sum(), (x, model.up, model.down))) for f in (mine, model)]
    assert_close(*found)
    assert all(p is before[name] for name, p in model.named_parameters())


def test_change_over_inside_functional_call(everywhere: Any) -> None:
    everywhere(check_change_over_inside_functional_call)


def check_functional_call() -> None:
    """torch.func.grad of a module that has a shard_map within."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, x: Tensor) -> Tensor:
            return rows(lambda x: functional_call(self.inner, varied(self.inner), (x,)))(x)

    outer, x = Outer(), rand(4, 3, grad=False)
    params = {name: 2 * p.detach() for name, p in outer.named_parameters()}
    mine = torch.func.grad(lambda p: functional_call(outer, p, (x,)).square().sum())(params)
    right = torch.func.grad(lambda p: functional_call(outer.inner, p, (x,)).square().sum())(
        {name.removeprefix("inner."): p for name, p in params.items()}
    )
    assert_close({name.removeprefix("inner."): g for name, g in mine.items()}, right)
    assert all(isinstance(p, nn.Parameter) for p in outer.parameters())


def test_functional_call_around_a_shard_map(everywhere: Any) -> None:
    everywhere(check_functional_call)


SCALE = rand(3)


class Scaled:
    def __init__(self) -> None:
        self.scale = {"list": [rand(3)]}

    def __call__(self, x: Tensor) -> Tensor:
        return x * mc.pvary(self.scale["list"][0], BOTH)

    def method(self, x: Tensor) -> Tensor:
        return self(x)


Pair = namedtuple("Pair", "first second")


def ways() -> dict[str, tuple[Tensor, Callable[[Tensor], Tensor]]]:
    """Functions that multiply by a tensor that they come by in different ways."""
    w = rand(3)

    def times(x: Tensor, w: Tensor) -> Tensor:
        return x * mc.pvary(w, BOTH)

    def by_default(x: Tensor, w: Tensor = w) -> Tensor:
        return times(x, w)

    def by_keyword_default(x: Tensor, *, w: Tensor = w) -> Tensor:
        return times(x, w)

    def inner(x: Tensor) -> Tensor:
        return times(x, w)

    def by_other(x: Tensor) -> Tensor:
        return checkpoint(inner, x, use_reentrant=False)

    def by_global(x: Tensor) -> Tensor:
        return times(x, SCALE)

    def deeper(x: Tensor) -> Tensor:
        return torch.stack([times(x, SCALE) for _ in range(2)]).mean(0)

    scaled, pair, product = Scaled(), Pair(1.0, (None, w)), w * 2
    parameter = nn.Parameter(w.detach().clone())
    return {
        "closure": (w, inner), "default": (w, by_default), "keyword default": (w, by_keyword_default), "function": (w, by_other),
        "checkpoint": (w, by_other), "global": (SCALE, by_global), "comprehension": (SCALE, deeper),
        "partial": (w, functools.partial(times, w=w)), "positional partial": (w, functools.partial(lambda w, x: times(x, w), w)),
        "object": (scaled.scale["list"][0], scaled), "method": (scaled.scale["list"][0], scaled.method),
        "named tuple": (w, lambda x: times(x, pair.second[1])), "result": (product, lambda x: times(x, product)),
        "result, all the way": (w, lambda x: times(x, product) / 2), "parameter": (parameter, lambda x: times(x, parameter)),
        "used twice": (w, lambda x: (times(x, w) + inner(x)) / 2),
    }  # fmt: skip


@pytest.mark.parametrize("name", ways())
def test_every_way_to_a_tensor(name: str) -> None:
    w, fn = ways()[name]
    x = rand(4, 3)
    for order in (1, 2):
        y = rows(fn)(x)
        right = x * w
        assert_close(y, right)
        keep = {"retain_graph": True, "create_graph": order == 2}
        mine, expected = (torch.autograd.grad(z.pow(3).sum(), (x, w), **keep) for z in (y, right))
        assert_close(mine, expected)
        if order == 2:
            assert_close(*(torch.autograd.grad(g[1].pow(2).sum(), (x, w), retain_graph=True) for g in (mine, expected)))
    assert not w.is_leaf or w.grad is None


def test_what_is_closed_over_stands_where_it_stood() -> None:
    holder = Scaled()
    items = holder.scale["list"]
    before, place = items[0], id(items[0])

    def fails(x: Tensor) -> Tensor:
        assert id(holder.scale["list"][0]) != place
        assert holder.scale["list"][0].requires_grad
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        rows(fails)(rand(4, 3))
    assert holder.scale["list"] is items
    assert items[0] is before


def test_a_hook_sees_the_gradient_once() -> None:
    w, x = rand(3), rand(4, 3)
    w.register_hook(lambda g: 10 * g)
    rows(lambda x: x * mc.pvary(w, BOTH))(x).sum().backward()
    assert_close(w.grad, 10 * x.detach().sum(0))


def test_tied_and_unused_parameters() -> None:
    model = net()
    model[0] = nn.Linear(3, 5, dtype=F64)
    model[2] = nn.Linear(5, 3, dtype=F64)
    model.append(nn.Linear(3, 5, bias=False, dtype=F64)).append(nn.Linear(5, 3, bias=False, dtype=F64))
    model[3].weight = model[0].weight
    spare = nn.Linear(2, 2).to(F64)

    def fn(x: Tensor) -> Tensor:
        spare(torch.zeros(1, 2, dtype=F64))
        return functional_call(model, varied(model), (x,))

    x = rand(4, 3)
    rows(fn)(x).square().sum().backward()
    mine = gradients(model)
    model(x).square().sum().backward()
    assert_close(mine, gradients(model))
    assert gradients(spare) == [None, None]


def test_what_is_in_reach_and_not_used_stays_out_of_the_graph() -> None:
    old, w, x = rand(3), rand(3), rand(4, 3)
    state = {"last": (old * 2).exp(), "now": w}
    state["last"].sum().backward()  # its graph is gone
    y = rows(lambda x: x * mc.pvary(state["now"], BOTH) + state["last"].detach())(x)
    assert_close(y, x * w + state["last"].detach())
    (slope,) = torch.autograd.grad(y.square().sum(), w, create_graph=True)
    slope.sum().backward()
    assert x.grad is not None


def check_lstm() -> None:
    """Its forward keeps the tensors that functional_call has put there, and the next call finds them."""
    torch.manual_seed(0)
    model, x = nn.LSTM(3, 3, 2, dtype=F64), rand(2, 4, 3)

    def slopes(y: Tensor) -> Any:
        return y, torch.autograd.grad(y.square().sum(), [x, *model.parameters()])

    batch = {"mesh": grid(), "in_specs": "s (dp tp b) d", "out_specs": "s (dp tp b) d"}
    right = slopes(model(x)[0])
    for _ in range(2):
        assert_close(slopes(mc.shard_map(lambda x: functional_call(model, varied(model), (x,))[0], **batch)(x)), right)
    invariant = mc.shard_map(lambda x: model(x)[0], mesh=grid(), in_specs="...", out_specs="...")
    assert_close(slopes(invariant(x)), right)


def test_lstm(everywhere: Any) -> None:
    everywhere(check_lstm)


class Hidden:
    """Holds a tensor where nobody looks."""

    __slots__ = ("tensor",)


def test_a_tensor_that_is_not_found_is_refused() -> None:
    hidden = Hidden()
    times = rows(lambda x: x * mc.pvary(hidden.tensor, BOTH), check_vma=False)
    w = rand(3)
    lost = r"that requires grad and that was not found to be an input.\n  got: f64\[3\]"
    for tensor in (w, w * 2):
        hidden.tensor = tensor
        for x in (rand(4, 3), rand(4, 3, grad=False)):
            with pytest.raises(mc.MeshError, match=lost):
                times(x)
            with torch.no_grad():
                assert_close(times(x), x * tensor)

    def of_hidden(w: Tensor) -> Tensor:
        hidden.tensor = w
        return times(x).sum()

    w = w.detach()
    wrapped = pytest.raises(mc.MeshError, match=r"a tensor that a transform has wrapped and .*\n  got: f64\[3\]")
    for fn in (lambda x: x * hidden.tensor, lambda x: x * mc.pvary(hidden.tensor, BOTH)):
        times = rows(fn, check_vma=False)
        with wrapped:
            torch.func.grad(of_hidden)(w)
        with wrapped:
            torch.func.jvp(of_hidden, (w,), (w,))
        with wrapped:
            torch.vmap(of_hidden)(torch.stack([w, w]))
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(w, w)
            with pytest.raises(mc.MeshError, match="that has a tangent and that was not found"):
                of_hidden(dual)
    made_inside = rows(lambda x: x * torch.ones(3, dtype=F64, requires_grad=True))  # found, for it is the body's own
    assert_close(made_inside(x), x)


def test_an_output_that_is_what_is_closed_over() -> None:
    w = rand(3)
    first, second = mc.shard_map(lambda x: (w, x), mesh=grid(), in_specs=ROWS, out_specs=("d", ROWS))(rand(4, 3))
    (first * 3 + second.sum()).sum().backward()
    assert_close(w.grad, torch.full((3,), 3.0, dtype=F64))


def test_backward_inside_of_the_function() -> None:
    w = rand(3)

    def fn(x: Tensor) -> Tensor:
        (x * w).sum().backward()
        return x.detach()

    with pytest.raises(mc.MeshError, match=r"backward\(\) ran inside the function"):
        rows(fn)(rand(4, 3))
    assert w.grad is None
    slope = mc.shard_map(lambda x: torch.autograd.grad((x**3).sum(), x)[0], mesh=grid(), in_specs=ROWS, out_specs=ROWS)
    x = rand(4, 3)
    assert_close(slope(x), 3 * x.detach() ** 2)
    assert not slope(x).requires_grad


# --------------------------------------------------------------------------------------------------------- what surrounds


def test_backward_draws_the_same_random_numbers() -> None:
    x = torch.ones(4, 50, dtype=F64, requires_grad=True)
    drop = rows(lambda x: dropout(x, 0.5) * (1 + torch.rand(())))
    torch.manual_seed(3)
    y = drop(x)
    torch.rand(7)
    (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    assert_close(slope, 2 * (y / x) ** 2 * x)
    (curve,) = torch.autograd.grad(slope.sum(), x)
    assert_close(curve, 2 * (y / x).detach() ** 2)
    masks = (y != 0).unbind()
    assert len({tuple(mask.tolist()) for mask in masks}) == 4, "ranks draw the same"
    assert not torch.equal(drop(x), y), "the next call draws the same"
    torch.manual_seed(3)
    assert_close(drop(x), y)


def test_backward_happens_in_the_modes_of_the_call() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    w = torch.randn(3, 3, requires_grad=True)
    seen = []

    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = x @ mc.pvary(w, BOTH)  # of the current mesh
        seen.append((y.dtype, mc.current_mesh().shape))
        return y.float()

    with torch.autocast("cpu", torch.bfloat16):
        y = mc.shard_map(fn, mesh=grid(), in_specs=(ROWS, "d e"), out_specs=ROWS)(x, w)
        right = (x @ w).float()
    mine, expected = (torch.autograd.grad(z.sum(), (x, w)) for z in (y, right))
    assert_close(mine[0], expected[0])
    assert_close(mine[1], expected[1], rtol=2e-2, atol=2e-2)
    assert seen == [(torch.bfloat16, AXES)] * 8


def test_without_grad_mode_there_is_no_graph() -> None:
    x = rand(4, 3)
    seen = []
    with torch.no_grad():
        assert not rows(lambda x: seen.append(torch.is_grad_enabled()) or x * 2)(x).requires_grad
    with torch.inference_mode():
        assert rows(lambda x: x * 2)(x).is_inference()
    assert not rows(lambda x: seen.append(torch.is_grad_enabled()) or x * 2)(x.detach()).requires_grad
    assert seen == [False] * 4 + [True] * 4


def test_inputs_are_never_modified() -> None:
    x, w = rand(4, 3), rand(3)
    before = x.detach().clone(), w.detach().clone()

    def fn(x: Tensor, w: Tensor) -> Tensor:
        x.mul_(2)
        w.add_(1)
        return x * mc.pvary(w, BOTH)

    y = mc.shard_map(fn, mesh=grid(), in_specs=(ROWS, "d"), out_specs=ROWS)(x, w)
    assert_close((x.detach(), w.detach()), before)
    right = 2 * x * (w + 1)
    assert_close(y, right)
    assert_close(*(torch.autograd.grad(z.square().sum(), (x, w)) for z in (y, right)))


def test_an_input_changed_before_backward_is_an_error() -> None:
    w, x = rand(3), rand(4, 3)
    y = rows(lambda x: x * mc.pvary(w, BOTH))(x)
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_closure_that_changes_before_backward() -> None:
    """The backward is of the function as it was called."""
    x, ys = rand(4, 3), []
    scales = [rand(3, seed=i) for i in range(3)]
    for scale in scales:
        ys.append(rows(lambda x: x * mc.pvary(scale, BOTH))(x))
    total = torch.stack(ys).square().sum()
    right = torch.stack([x * scale for scale in scales]).square().sum()
    assert_close(*(torch.autograd.grad(z, (x, *scales)) for z in (total, right)))


def test_the_results_are_new_storage() -> None:
    x = rand(4, 3)
    y = mc.shard_map(lambda x: x, mesh=grid(), in_specs="b d", out_specs="b d")(x)
    assert y.data_ptr() != x.data_ptr()
    (slope,) = torch.autograd.grad((y * y).sum(), x)
    assert_close(slope, 2 * x.detach())


# ------------------------------------------------------------------------------------------------------ specs and layouts


def check_layouts() -> None:
    """Each part is where its layout says, and comes back."""
    mesh = mc.make_mesh({"a": 2, "b": 1, "c": 2})
    x = torch.arange(4 * 6 * 8).view(4, 6, 8)
    for layout, own in {
        "(a i) j k": lambda a, c: x[2 * a : 2 * a + 2],
        "i j (c a k)": lambda a, c: x[..., 4 * c + 2 * a :][..., :2],
        "(c i) (b j) (a k)": lambda a, c: x[2 * c : 2 * c + 2, :, 4 * a : 4 * a + 4],
        "... (a b c k)": lambda a, c: x[..., 4 * a + 2 * c :][..., :2],
        "(a i) ...": lambda a, c: x[2 * a : 2 * a + 2],
        "...": lambda a, c: x,
    }.items():

        def fn(part: Tensor) -> Tensor:
            assert torch.equal(part, own(mesh.coordinate["a"], mesh.coordinate["c"])), layout
            return part

        assert torch.equal(mc.shard_map(fn, mesh=mesh, in_specs=(layout,), out_specs=layout, check_vma=False)(x), x)
    assert mc.shard_map(lambda: torch.tensor(3), mesh=mesh, in_specs=(), out_specs="")().item() == 3
    empty = mc.shard_map(lambda x: x, mesh=mesh, in_specs="(a n) d", out_specs="(a n) d")(torch.empty(0, 3))
    assert empty.shape == (0, 3)


def test_layouts(everywhere: Any) -> None:
    everywhere(check_layouts)


def check_trees() -> None:
    mesh = grid()
    tree = {"w": rand(4, 2), "rest": [rand(2), (None, 3, "text")]}

    def fn(tree: Any, scale: Any, *more: Tensor, flag: bool, **others: Tensor) -> Any:
        w, (v, (nothing, three, text)) = tree["w"], tree["rest"]
        assert (w.shape, v.shape, nothing, three, text, flag) == ((2, 2), (2,), None, 3, "text", True)
        assert [x.shape for x in (*more, *others.values())] == [(1,), (2,), (3,), (3,)]
        return {"w": w * scale, "v": Pair(v + 1, None), "three": three, "k": sum(x.sum() for x in others.values())}

    specs = ({"w": "(dp a) b", "rest": ["b", None]}, None, "(dp tp n)", "(tp n)", None, "n")
    out = {"w": "(dp a) b", "v": "b", "three": None, "k": ""}
    mapped = mc.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=out)
    args = rand(4), rand(4)
    y = mapped(tree, 2.0, *args, flag=True, p=rand(3), q=rand(3))
    assert y["v"].second is None
    assert y["three"] == 3
    assert_close((y["w"], y["v"].first, y["k"]), (tree["w"] * 2, tree["rest"][0] + 1, 2 * rand(3).sum()))
    reordered = {"rest": tree["rest"], "w": tree["w"]}
    assert_close(mapped(reordered, 2.0, *args, flag=True, p=rand(3), q=rand(3))["w"], tree["w"] * 2)


def test_trees(everywhere: Any) -> None:
    everywhere(check_trees)


def check_calls() -> None:
    """Every way to pass and to name arguments."""
    mesh, x, w = grid(), rand(4, 2), rand(2)

    def fn(x: Tensor, w: Tensor, scale: Tensor | None = None, *, shift: float = 0.0) -> Tensor:
        assert (x.shape, w.shape) == ((2, 2), (1,) if shift else (2,))
        return x * (1 if scale is None else scale) + shift

    short = mc.shard_map(fn, mesh=mesh, in_specs=("(dp b) d", "d"), out_specs="(dp b) d")
    assert_close([short(x, w), short(x, w=w), short(w=w, x=x)], [x, x, x])
    full = mc.shard_map(fn, mesh=mesh, in_specs=["(dp b) d", "(tp d)", "", None], out_specs="(dp b) d")
    factor = rand()
    assert_close([full(x, w, factor, shift=1.0), full(shift=1.0, scale=factor, x=x, w=w)], [x * factor + 1] * 2)
    assert_close(full(x, w, shift=1.0), x + 1)
    named = mc.shard_map(fn, mesh=mesh, in_specs={"w": "(tp d)", "x": "(dp b) d", "shift": None}, out_specs="(dp b) d")
    assert_close(named(x, w, shift=2.0), x + 2)

    def loose(*xs: Tensor, **others: Tensor) -> Tensor:
        return xs[0] + sum(y.sum() for y in others.values())

    for specs in (
        ("(dp b) d", "(tp d)", "d"), ("(dp b) d", "d", {"u": "d", "v": "..."}), {"xs[0]": "(dp b) d", "xs[1]": "d", "u": "d", "v": "d"},
        {"xs[0]": "(dp b) d", "xs[1]": "...", "others": {"u": "d", "v": "..."}},
    ):  # fmt: skip
        mapped = mc.shard_map(loose, mesh=mesh, in_specs=specs, out_specs="(dp b) d")
        assert_close(mapped(x, w, u=w, v=w), x + 2 * w.sum())
    everything = mc.shard_map(loose, mesh=mesh, in_specs={"xs": "...", "others": "d"}, out_specs="b d")
    assert_close([everything(x, w), everything(x, u=w)], [x, x + w.sum()])
    with mc.use_mesh(mesh):
        assert_close(mc.shard_map(torch.neg, in_specs="(dp b) d", out_specs="(dp b) d")(x), -x)
    torch.manual_seed(0)
    model = nn.Linear(2, 3).to(F64).requires_grad_(False)
    assert_close(mc.shard_map(model, mesh=mesh, in_specs=("(dp b) d",), out_specs="(dp b) d")(input=x), model(x))
    passed = mc.shard_map(lambda m, x: m(x), mesh=mesh, in_specs=(None, "(dp b) d"), out_specs="(dp b) d")
    assert_close(passed(model, x), model(x))

    @mc.shard_map(mesh=mesh, in_specs="b d", out_specs="b d", check_vma=False)
    def documented(x: Tensor) -> Tensor:
        """What it does."""
        return x

    assert (documented.__name__, documented.__doc__) == ("documented", "What it does.")


def test_calls(everywhere: Any) -> None:
    everywhere(check_calls)


def test_a_module_that_is_an_argument_has_gradients() -> None:
    model, x = net(), rand(4, 3)
    mine = mc.shard_map(
        lambda m, x: functional_call(m, varied(m), (x,)), mesh=grid(), in_specs=(None, ROWS), out_specs=ROWS
    )
    mine(model, x).square().sum().backward()
    found = gradients(model)
    model(x).square().sum().backward()
    assert_close(found, gradients(model))


def test_outputs_without_gradient() -> None:
    x = rand(4, 3)
    y, index, frozen = mc.shard_map(
        lambda x: (2 * x, x.argmax(1), x.detach()), mesh=grid(), in_specs=ROWS, out_specs=(ROWS, "(dp tp b)", ROWS)
    )(x)
    assert (y.requires_grad, index.requires_grad, frozen.requires_grad) == (True, False, False)
    assert_close((index, frozen), (x.argmax(1), x.detach()))
    y.sum().backward()
    assert_close(x.grad, torch.full_like(x, 2))


def test_outputs_that_are_no_tensors() -> None:
    x = rand(4, 3)
    seen = mc.shard_map(lambda x: {"count": len(x), "nothing": None}, mesh=grid(), in_specs=ROWS, out_specs=None)(x)
    assert seen == {"count": 1, "nothing": None}
    assert mc.shard_map(lambda: None, mesh=grid(), in_specs=(), out_specs=None)() is None
    flat, none = mc.shard_map(lambda x: (torch.zeros(2), None), mesh=grid(), in_specs=ROWS, out_specs="n")(x)
    assert (flat.tolist(), none) == ([0, 0], None)


def test_a_mesh_of_some_ranks_and_a_mesh_of_one() -> None:
    x = rand(4, 3)
    some = mc.make_mesh({"tp": 2}, ranks=[3, 1])
    y = mc.shard_map(lambda x: mc.shift(x, "tp") * 2, mesh=some, in_specs="(tp b) d", out_specs="(tp b) d")(x)
    assert_close(y, 2 * x.roll(2, 0))
    one = mc.make_mesh({"tp": 1})
    z = mc.shard_map(
        lambda x, w: mc.all_reduce(x @ w, "tp"), mesh=one, in_specs=("b (tp d)", "(tp d) e"), out_specs="b e"
    )(x, x.mT)
    assert_close(z, x @ x.mT)


# ----------------------------------------------------------------------------------------------------------------- errors


def check_errors() -> None:
    mesh, x = grid(), rand(4, 3)

    def refused(
        match: str,
        specs: Any,
        out: Any,
        *args: Any,
        fn: Callable[..., Any] = lambda *args: args[0],
        kind: Any = mc.MeshError,
        **kwargs: Any,
    ) -> None:
        with pytest.raises(kind, match=match):
            mc.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=out)(*args, **kwargs)

    two = lambda x, w: x  # noqa: E731
    refused("in_specs has 1 specs for 2 arguments", ("b d",), "b d", x, x, fn=two)
    refused("in_specs has 3 specs for 2 arguments", ("b d",) * 3, "b d", x, x, fn=two)
    refused("in_specs has no spec for 'w'", {"x": "b d"}, "b d", x, x, fn=two)
    refused("in_specs names 'v', which are no parameters", {"x": "b d", "w": "b d", "v": ""}, "b d", x, x, fn=two)
    refused("missing a required argument", ("b d", "b d"), "b d", x, fn=two, kind=TypeError)
    refused(r"the spec of args\[0\]\['a'\] is not a prefix of args\[0\]\['a'\]", ({"a": ["b"]},), "b", {"a": x})
    refused("keys", ({"a": "b d"},), "b d", {"b": x})
    refused(r"out_specs\[1\] is not a prefix of output\[1\]", "b d", ("b d", {"a": "b d"}), x, fn=lambda x: (x, x))
    refused("out_specs is not a prefix of output", "b d", ("b d", "b d"), x)
    refused(r"in_specs\[0\]\['a'\] is neither a layout nor None but int", ({"a": 3},), "b d", {"a": x})
    refused("'z' is not an axis of the mesh", "(z b) d", "b d", x)
    refused(r"args\[0\]: 'b d e' has 3 dims, the tensor 2", "b d e", "b d", x)
    refused(r"output\[0\]: 'b' has 1 dim, the tensor 2", "b d", ("b",), x, fn=lambda x: (x,))
    refused("dim 'd' of length 3 is not divisible by tp=2", "b (tp d)", "b d", x)
    refused(r"args\[0\]\[1\] is no tensor but float, and its spec is 'b d'", "b d", "b d", (x, 2.0))
    refused(r"the spec of args\[0\] is None, but it is a tensor", None, "b d", x)
    refused(r"the spec of output is None, but it is a tensor", "b d", None, x)
    refused(r"output\[1\] is no tensor but int", "b d", "b d", x, fn=lambda x: (x, 3))
    refused(
        "called inside the function of another shard_map",
        "b d",
        "b d",
        x,
        fn=mc.shard_map(torch.neg, mesh=mesh, in_specs="b d", out_specs="b d"),
    )
    with pytest.raises(mc.MeshError, match="check_vma='yes'"):
        mc.shard_map(two, mesh=mesh, in_specs="", out_specs="", check_vma="yes")
    with pytest.raises(mc.MeshError, match="fn is not callable but int"):
        mc.shard_map(3, mesh=mesh, in_specs="", out_specs="")  # type: ignore[call-overload]
    with pytest.raises(mc.MeshError, match="there is no mesh"):
        mc.shard_map(two, in_specs="", out_specs="")(x, x)
    with pytest.raises(mc.MeshError, match="mesh= is a dict"):
        mc.shard_map(two, mesh=AXES, in_specs="", out_specs="")  # type: ignore[call-overload]
    y = mc.shard_map(torch.neg, mesh=mesh, in_specs="(dp b) d", out_specs="(dp b) d")(x)
    assert_close(y, -x)  # all goes on


def test_errors(everywhere: Any) -> None:
    everywhere(check_errors)


def test_what_a_rank_raises_is_seen_with_its_rank() -> None:
    def fn(x: Tensor) -> Tensor:
        if mc.current_mesh().rank == 2:
            raise KeyError("mine")
        return mc.all_reduce(x, BOTH)

    with pytest.raises(KeyError, match="mine") as caught:
        rows(fn, check_vma=False)(rand(4, 3))
    assert any("rank 2 of 4" in note for note in getattr(caught.value, "__notes__", ["rank 2 of 4"]))


def test_a_mesh_of_another_world() -> None:
    mesh = grid()
    fn = mc.shard_map(torch.neg, mesh=mesh, in_specs="b d", out_specs="b d")

    def inside() -> None:
        with pytest.raises(mc.MeshError, match="a mesh made for 4 ranks is used among 2"):
            fn(rand(4, 3))

    mc.launch(inside, ranks=2)


def test_ranks_that_return_different_things() -> None:
    def odd(make: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        return lambda x: make(x) if mc.current_mesh().rank == 3 else x

    for make, spec in ((lambda x: x[:, :2], "b d"), (lambda x: x.float(), "b d"), (lambda x: x[0], "...")):
        with pytest.raises(mc.MeshError, match="the ranks return different things"):
            mc.shard_map(odd(make), mesh=grid(), in_specs="b d", out_specs=spec, check_vma=False)(rand(4, 3))


def test_copies_that_differ() -> None:
    """Nobody has checked the types, and the values show it."""
    x, w = rand(4, 3), rand(3)
    unchecked = functools.partial(mc.shard_map, mesh=grid(), check_vma=False)
    with pytest.raises(mc.VaryingError, match=r"output differs along 'tp', which its spec '\(dp b\) d' does not name"):
        unchecked(lambda x: x * (1 + mc.axis_index("tp")), in_specs="(dp b) d", out_specs="(dp b) d")(x)
    for fn, args, specs in ((lambda x: x * w, (x,), ROWS), (lambda x, w: x * w, (x, w), (ROWS, "d"))):
        y = unchecked(fn, in_specs=specs, out_specs=ROWS)(*args)
        with pytest.raises(
            mc.VaryingError, match="the gradient of w differs along 'tp', along which its value is invariant"
        ):
            y.square().sum().backward()
    nan = unchecked(lambda x: x * float("nan"), in_specs="b d", out_specs="b d")(x)
    assert nan.isnan().all()


def test_a_value_that_may_differ_is_refused_though_it_does_not() -> None:
    with pytest.raises(mc.VaryingError, match=r"output varies along 'dp', which its spec 'd' does not name"):
        mc.shard_map(lambda x: (x * 0).sum(0), mesh=grid(), in_specs="(dp b) d", out_specs="d")(rand(4, 3))


def test_an_invariant_value_that_is_moved_has_the_gradients_of_all_ranks() -> None:
    x, w = rand(4, 3), rand(3)
    moved = mc.shard_map(
        lambda x, w: x * mc.shift(w, "dp"), mesh=grid(), in_specs=("(dp b) d", "d"), out_specs="(dp b) d"
    )
    assert_close(torch.autograd.grad(moved(x, w).sum(), w), torch.autograd.grad((x * w).sum(), w))


def test_backward_on_a_rank_of_what_was_computed_outside() -> None:
    y, mesh = rows(lambda x: x * 2)(rand(4, 3)), mc.make_mesh({"a": 2})

    def inside() -> None:
        if mesh.rank == 0:  # two would train one leaf
            with pytest.raises(mc.MeshError, match="computed outside of ranks is differentiated inside of one"):
                y.sum().backward(retain_graph=True)

    mc.launch(inside, ranks=2)


def test_a_launch_at_the_same_time() -> None:
    found: list[BaseException] = []

    def other() -> None:
        try:
            rows(lambda x: x)(rand(4, 3))
        except mc.MeshError as error:
            found.append(error)

    def fn(x: Tensor) -> Tensor:
        if mc.current_mesh().rank == 0:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
        return x

    rows(fn, check_vma=False)(rand(4, 3))
    assert "another launch is running" in str(found)


# --------------------------------------------------------------------------------------------------------------- DTensors


def check_dtensors() -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor  # noqa: PLC0415

    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mesh = mc.Mesh.from_device_mesh(device_mesh)
    inputs = [x.detach() for x in mlp_inputs()]
    plain = [x.clone().requires_grad_() for x in inputs]
    for placements in (
        [(Shard(0), Replicate()), (Replicate(), Shard(1)), (Replicate(), Shard(0))],
        [(Replicate(), Replicate())] * 3,
    ):
        given = [distribute_tensor(x, device_mesh, p).requires_grad_() for x, p in zip(inputs, placements, strict=True)]
        y = mlp_sharded(mesh)(*given)
        assert isinstance(y, DTensor)
        assert y.placements == (Shard(0), Replicate())
        right = mlp_whole(*plain)
        assert_close(y.full_tensor(), right)
        mine = torch.autograd.grad(y.square().sum(), given)
        assert_close([g.full_tensor() for g in mine], list(torch.autograd.grad(right.square().sum(), plain)))
    mixed = mlp_sharded(mesh)(given[0], *plain[1:])
    assert_close(mixed.full_tensor(), right)


def test_dtensors_in_give_dtensors_out(pool4: Any) -> None:
    pool4.run(check_dtensors)


def test_what_is_the_same_on_all_ranks_may_be_a_part_of_the_result() -> None:
    """Its gradient is the sum over the parts."""
    w, c = torch.ones(3, requires_grad=True), torch.arange(6.0)
    twice = mc.shard_map(lambda w: 2 * w, mesh=mc.make_mesh({"dp": 2}), in_specs="d", out_specs="(dp d)")
    (twice(w) * c).sum().backward()
    assert w.grad is not None
    assert w.grad.tolist() == [6.0, 10.0, 14.0]


@pytest.mark.parametrize(
    ("specs", "args", "first"),
    [
        (("(a d)", "(a d)", "(a d)"), (torch.ones(2), torch.ones(3), torch.ones(5)), "xs[1]: dim 'd' of length 3"),
        (("(a d)", "(a d)"), (torch.ones(2, 1), torch.ones(3)), "xs[0]: '(a d)' has 1 dim"),
        (("(a d)", "(a d)"), ("x", torch.ones(3)), "xs[0] is no tensor"),
        (("(a d)", "(a d)"), (torch.ones(3), "x"), "xs[0]: dim 'd' of length 3"),
        (({"z": "(a d)", "b": "(a d)"},), ({"z": torch.ones(3), "b": torch.ones(5)},), "xs[0]['z']: dim 'd'"),
    ],
)
def test_of_several_wrong_inputs_the_first_one_is_named(specs: Any, args: Any, first: str) -> None:
    mesh = mc.make_mesh({"a": 2})

    def part(*xs: Any) -> Any:
        return xs[0]

    with pytest.raises(mc.MeshError) as caught:
        mc.shard_map(part, mesh=mesh, in_specs=specs, out_specs="(a d)")(*args)
    assert first in str(caught.value).split("\n")[0]


@pytest.mark.parametrize("spec", ["(dp n) c h w", "(dp tp n) c h w", "n (tp dp c) h w", "(dp n) (tp c) h w", "n c h w"])
def test_outputs_lie_dense_in_order_whatever_the_parts_do(spec: str) -> None:
    mesh = mc.make_mesh({"dp": 2, "tp": 2})
    x = torch.arange(8 * 4 * 2 * 2).reshape(8, 4, 2, 2)

    def local(x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last) + 1

    y = mc.shard_map(local, mesh=mesh, in_specs=(spec,), out_specs=spec)(x)
    assert y.is_contiguous()
    assert torch.equal(y, x + 1)
