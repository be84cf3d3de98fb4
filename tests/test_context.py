"""context_attention against attention of the whole sequence by hand: values, lse, first and second derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import meshcomm as mc
from meshcomm import _torch, parallel

Run = Callable[..., list[Any]]
F64 = torch.float64
B, S, E = 2, 16, 4
DOCUMENTS = torch.tensor([0] * 5 + [1] + [2] * 10)
"""One of a single token among them."""


def window(i: Tensor, j: Tensor) -> Tensor:
    """And nobody sees anything in row 3."""
    return (i - j < 6) & (i != 3)


def drawn(h: int, k: int, s: int = S, t: int | None = None, wide: int = E) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, h, s, E), (B, k, t or s, E), (B, k, t or s, wide))
    return [torch.randn(shape, dtype=F64, generator=generator) for shape in shapes]


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    documents: Tensor | None = None,
    mask: Any = None,
    scale: float = E**-0.5,
) -> tuple[Tensor, Tensor]:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None]
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    seen = seen & (i >= j) if causal else seen
    seen = seen & mask(i, j) if mask else seen
    if documents is not None:
        same = documents[..., :, None] == documents[..., None, :]
        seen = seen & (same if same.dim() == 2 else same[:, None])
    z = (q @ k.mT * scale).masked_fill(~seen, -torch.inf)
    some = seen.any(-1).expand(z.shape[:-1])
    p = torch.softmax(torch.where(some[..., None], z, 0.0), -1) * some[..., None]
    return p @ v, torch.where(some, torch.where(some[..., None], z, 0.0).logsumexp(-1), -torch.inf)


def finite(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse.isinf(), 0)


def derivatives(
    fn: Callable[..., tuple[Tensor, Tensor]], given: list[Tensor], weights: Tensor, with_lse: bool
) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in given]
    y, lse = fn(*leaves)
    loss = (y * y * weights[..., None]).sum() + ((finite(lse) ** 2 * weights).sum() if with_lse else 0)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)  # by the ring
    again = torch.autograd.grad(loss, leaves, create_graph=True)  # by mathematics
    second = torch.autograd.grad(sum((g**2).sum() for g in again), leaves)
    return [y.detach(), finite(lse.detach()), *first, *again, *second]


WAYS: dict[str, tuple[Any, Any]] = {
    "ring": ("a", None),
    "ulysses": (None, "a"),
    "both": ("a", "b"),
    "a ring over two axes": (("b", "a"), None),
    "heads over two axes": (None, ("a", "b")),
    "one rank": ("one", None),
    "nowhere": (None, None),
}
MASKS = {"all": (None, None), "documents": (DOCUMENTS, None), "window": (None, window), "both": (DOCUMENTS, window)}
ORDERS = {"zigzag": (True, None), "contiguous": (True, "contiguous"), "not causal": (False, None)}


def cut_by(mesh: mc.Mesh, axis: Any, heads: Any, order: Tensor) -> Callable[[Tensor, int], Tensor]:
    names = tuple(name for each in (axis, heads) if each for name in ((each,) if isinstance(each, str) else each))
    n = mesh.size_of(names, "test") if names else 1
    index = mesh.axis(names, "test").index if names else 0
    return lambda x, dim: x.index_select(dim, order).chunk(n, dim)[index]


def equals_the_whole(way: str, kind: str, h: int, k: int, regather: bool) -> None:
    mesh = mc.make_mesh({"a": 2, "b": 2, "one": 1})
    axis, heads = WAYS[way]
    causal, order = ORDERS[kind]
    place = torch.arange(S)
    if axis is not None:
        place = parallel.context_order(S, axis, order or ("zigzag" if causal else "contiguous"), mesh=mesh)
    cut = cut_by(mesh, axis, heads, place)
    given = drawn(h, k)
    weights = torch.arange(1, B * h * S + 1, dtype=F64).view(B, h, S).cos()
    for documents, mask in MASKS.values():

        def ours(q: Tensor, k: Tensor, v: Tensor, documents: Any = documents, mask: Any = mask) -> Any:
            own = None if documents is None else cut(documents, 0)
            if documents is not None and h == 2:
                own = own.expand(B, -1)
            return parallel.context_attention(
                q, k, v, axis=axis, heads_axis=heads, causal=causal, order=order, documents=own, mask=mask,
                regather=regather, return_lse=True, mesh=mesh,
            )  # fmt: skip

        for with_lse in (False, True):
            mine = derivatives(ours, [cut(x, 2) for x in given], cut(weights, 2), with_lse)
            whole = derivatives(
                lambda q, k, v, d=documents, m=mask: dense(q, k, v, causal, d, m), given, weights, with_lse
            )
            for got, all_ in zip(mine, whole, strict=True):
                assert_close(got, cut(all_, 2), rtol=1e-10, atol=1e-10)


@pytest.mark.pairs
@pytest.mark.one_in(9)
@pytest.mark.parametrize(("h", "k", "regather"), [(4, 4, True), (4, 2, False), (4, 1, True)])
@pytest.mark.parametrize("kind", ORDERS)
@pytest.mark.parametrize("way", WAYS)
def test_equals_attention_of_the_whole(run4: Run, way: str, kind: str, h: int, k: int, regather: bool) -> None:
    run4(equals_the_whole, way, kind, h, k, regather)


def more_heads_than_fit() -> None:
    """Six heads over two ranks, and two and three of keys; four ranks and kv heads that do not divide them."""
    mesh = mc.make_mesh({"a": 4})
    for h, k in ((12, 6), (8, 2), (12, 3)):
        given, cut = drawn(h, k), cut_by(mesh, None, "a", torch.arange(S))
        weights = torch.ones(B, h, S, dtype=F64)

        def ours(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return parallel.context_attention(q, k, v, heads_axis="a", return_lse=True, mesh=mesh)

        mine = derivatives(ours, [cut(x, 2) for x in given], cut(weights, 2), True)
        whole = derivatives(lambda q, k, v: dense(q, k, v, True), given, weights, True)
        for got, all_ in zip(mine, whole, strict=True):
            assert_close(got, cut(all_, 2), rtol=1e-10, atol=1e-10)


def test_heads_of_keys_that_the_axis_does_not_divide(run4: Run) -> None:
    run4(more_heads_than_fit)


def odd_shapes() -> None:
    """Cross attention, values of another width, a scale, an empty batch, strided inputs; inputs stay as they are."""
    mesh = mc.make_mesh({"a": 4})
    q, k, v = drawn(4, 2, 8, 12, 3)
    cut = lambda x: x.chunk(4, 2)[mesh.rank]  # noqa: E731
    y, lse = parallel.context_attention(
        cut(q), cut(k), cut(v), axis="a", causal=False, scale=0.3, return_lse=True, mesh=mesh
    )
    assert_close((y, lse), tuple(map(cut, dense(q, k, v, False, scale=0.3))), rtol=1e-12, atol=1e-12)
    q, k, v = drawn(4, 4)
    mine = [cut(x) for x in (q, k, v)]
    before = [x.clone() for x in mine]
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in mine]
    first, second = (parallel.context_attention(*xs, axis="a", order="contiguous", mesh=mesh) for xs in (mine, strided))
    assert torch.equal(first, second)
    assert all(map(torch.equal, mine, before))
    empty = [x[:0] for x in mine]
    assert parallel.context_attention(*empty, axis="a", mesh=mesh).shape == (0, 4, 4, E)


def test_odd_shapes(run4: Run) -> None:
    run4(odd_shapes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_is_put_together_in_float32(dtype: torch.dtype) -> None:
    """As far from float64 as torch's own attention of the whole."""

    def main() -> list[tuple[float, float]]:
        mesh = mc.make_mesh({"a": 4})
        cut = cut_by(mesh, "a", None, parallel.context_order(S, "a", mesh=mesh))
        exact = drawn(4, 2)
        narrow = [x.to(dtype) for x in exact]
        weights = torch.ones(B, 4, S)

        def torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        def gradients(fn: Any, given: list[Tensor]) -> list[Tensor]:
            leaves = [x.clone().requires_grad_() for x in given]
            y = fn(*leaves)
            return [y.detach(), *torch.autograd.grad((y.to(weights.dtype) ** 2).sum(), leaves)]

        ours = gradients(lambda *xs: parallel.context_attention(*xs, axis="a", mesh=mesh), [cut(x, 2) for x in narrow])
        assert {y.dtype for y in ours} == {dtype}
        peer, right = gradients(torchs, narrow), gradients(torchs, exact)
        return [
            ((mine - cut(y, 2)).abs().max().item(), (other.double() - y).abs().max().item())
            for mine, other, y in zip(ours, peer, right, strict=True)
        ]

    for ranks in zip(*mc.launch(main, ranks=4), strict=True):
        assert max(ours for ours, _ in ranks) <= 2 * max(torchs for _, torchs in ranks)


# ------------------------------------------------------------------------------------------------ transforms, checker


def transformed() -> None:
    mesh = mc.make_mesh({"a": 4})
    place = parallel.context_order(S, "a", mesh=mesh)
    cut = cut_by(mesh, "a", None, place)
    given = drawn(4, 2)
    mine = [cut(x, 2) for x in given]

    def ours(*xs: Tensor) -> Tensor:
        return parallel.context_attention(*xs, axis="a", mesh=mesh)

    def whole(*xs: Tensor) -> Tensor:
        return dense(*xs, True)[0]

    def curve(fn: Any) -> Any:
        return torch.func.grad(
            lambda *xs: (torch.func.grad(lambda *xs: (fn(*xs) ** 2).sum())(*xs) ** 2).sum(), (0, 1, 2)
        )

    for got, all_ in zip(curve(ours)(*mine), curve(whole)(*given), strict=True):
        assert_close(got, cut(all_, 2), rtol=1e-10, atol=1e-10)
    got, all_ = (torch.func.jvp(fn, tuple(xs), tuple(xs))[1] for fn, xs in ((ours, mine), (whole, given)))
    assert_close(got, cut(all_, 2), rtol=1e-10, atol=1e-10)
    twice = torch.func.vmap(ours)(*(torch.stack([x, 2 * x]) for x in mine))
    assert_close(twice[1], ours(*(2 * x for x in mine)), rtol=1e-10, atol=1e-10)


def test_transforms(run4: Run) -> None:
    run4(transformed)


def test_under_a_checker() -> None:
    """It varies along the axes of all that it takes, and each is pvaried where it has to be."""
    mesh = mc.make_mesh({"dp": 2, "cp": 2})
    order = parallel.context_order(S, "cp", mesh=mesh)
    q, k, _ = drawn(2, 2)
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=F64)

    def body(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
        y, lse = parallel.context_attention(q * w, k, q, axis="cp", return_lse=True)
        assert mc.varying_axes(y) == mc.varying_axes(lse) == {"dp", "cp"}
        return mc.all_reduce((y**2).sum() + (lse**3).sum(), ("dp", "cp"))

    def whole(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
        y, lse = dense(q * w, k, q, True)
        return (y**2).sum() + (lse**3).sum()

    specs = ("(dp b) h (cp s) e", "b h (cp s) e", "e")
    ours = mc.shard_map(body, mesh=mesh, in_specs=specs, out_specs="")
    found = []
    for fn, place in ((ours, order), (whole, torch.arange(S))):
        back = place.argsort()
        leaves = [x.clone().requires_grad_() for x in (q[:, :, place], k[:1, :, place], weight)]
        first = torch.autograd.grad(fn(*leaves), leaves, create_graph=True)
        second = torch.autograd.grad(sum((g**2).sum() for g in first), leaves)
        found.append([g[:, :, back] if g.dim() == 4 else g for g in (*first, *second)])
    assert_close(*found, rtol=1e-10, atol=1e-10)
    strict = mc.shard_map(body, mesh=mesh, in_specs=specs, out_specs="", check_vma="error")
    with pytest.raises(mc.VaryingError, match=r"a pvary is missing"):
        strict(q, k[:1], weight.requires_grad_())


@pytest.mark.parametrize("name", ["square", "sigmoid", "exp", "norm", "root"])
def test_no_gradient_where_nothing_is_seen(name: str) -> None:
    """Whatever becomes of -inf and 0 later."""
    losses: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "square": lambda y, lse: (lse**2).masked_fill(lse.isinf(), 0).sum(),
        "sigmoid": lambda y, lse: lse.sigmoid().sum(),
        "exp": lambda y, lse: (-lse).exp().masked_fill(lse.isinf(), 0).sum() + y.sum(),
        "norm": lambda y, lse: y.norm(dim=-1).sum(),
        "root": lambda y, lse: (y**2).sum(-1).sqrt().masked_fill(lse.isinf(), 0).sum(),
    }

    def main() -> list[Tensor]:
        mesh = mc.make_mesh({"a": 2})
        mine = [x.chunk(2, 2)[mesh.rank].clone().requires_grad_() for x in drawn(4, 2)]
        y, lse = parallel.context_attention(
            *mine, axis="a", order="contiguous", mask=window, return_lse=True, mesh=mesh
        )
        return list(torch.autograd.grad(losses[name](y, lse), mine))

    found = [torch.cat(parts, 2) for parts in zip(*mc.launch(main, ranks=2), strict=True)]
    leaves = [x.requires_grad_() for x in drawn(4, 2)]
    y, lse = dense(*leaves, True, mask=window)
    row = torch.arange(S) != 3
    expected = torch.autograd.grad(losses[name](y[:, :, row], lse[:, :, row]), leaves, materialize_grads=True)
    assert_close(found, list(expected), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("axes", [{"axis": "a"}, {"heads_axis": "b"}, {"axis": "a", "heads_axis": "b"}], ids=str)
def test_what_some_ranks_need(axes: dict[str, str]) -> None:
    """Each rank uses another one of the results, and wants the gradients of others of its tensors."""

    def loss_of(rank: int, y: Tensor, lse: Tensor) -> Tensor:
        return (lse**2).sum() if rank % 2 else y.sin().sum()

    def main() -> list[Tensor]:
        mesh = mc.make_mesh(dict.fromkeys(axes.values(), 2))
        parts = [x.chunk(mesh.size, 2)[mesh.rank].clone() for x in drawn(4, 4)]
        leaves = [x.requires_grad_() for x in (parts if mesh.rank else parts[:1])]
        y, lse = parallel.context_attention(*parts, **axes, causal=False, return_lse=True, mesh=mesh)
        return [*torch.autograd.grad(loss_of(mesh.rank, y, lse), leaves)]

    n = 2 ** len(axes)
    leaves = [x.requires_grad_() for x in drawn(4, 4)]
    y, lse = dense(*leaves, False)
    total = sum(loss_of(rank, *both) for rank, both in enumerate(zip(y.chunk(n, 2), lse.chunk(n, 2), strict=True)))
    whole = torch.autograd.grad(total, leaves)
    for rank, found in enumerate(mc.launch(main, ranks=n)):
        for g, of in zip(found, whole, strict=False):
            assert_close(g, of.chunk(n, 2)[rank], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("axes", [{"axis": "a"}, {"heads_axis": "a"}], ids=str)
@pytest.mark.parametrize("who", [0, 1])
def test_gradients_on_some_ranks_only_are_refused(axes: dict[str, str], who: int) -> None:
    """At the call: in backward the others would not be there, or a rank whose loss needs no gradient would send none."""

    def main() -> None:
        mesh = mc.make_mesh({"a": 2})
        mine = [x.chunk(2, 2)[mesh.rank].requires_grad_(mesh.rank == who) for x in drawn(4, 4)]
        parallel.context_attention(*mine, **axes, mesh=mesh)

    with pytest.raises(mc.CommError, match="different calls(?s:.)* that needs a gradient"):
        mc.launch(main, ranks=2)


def test_checkpoints_and_autocast() -> None:
    def main() -> None:
        mesh = mc.make_mesh({"a": 2})
        mine = [x.chunk(2, 2)[mesh.rank].clone().requires_grad_() for x in drawn(4, 4)]

        def fn(*xs: Tensor) -> Tensor:
            return parallel.context_attention(*xs, axis="a", mesh=mesh)

        plain = torch.autograd.grad(fn(*mine).sin().sum(), mine)
        for reentrant in (False, True):
            y = torch.utils.checkpoint.checkpoint(fn, *mine, use_reentrant=reentrant)
            leaves = torch.autograd.grad(y.sin().sum(), mine) if not reentrant else None
            if reentrant:
                y.sin().sum().backward()
                leaves = tuple(x.grad for x in mine)
            assert all(map(torch.equal, plain, leaves))
        narrow = [x.detach().float() for x in mine]
        with torch.autocast("cpu", torch.bfloat16):
            assert fn(narrow[0], narrow[1].bfloat16(), narrow[2]).dtype == torch.bfloat16
            assert torch.equal(fn(*mine), fn(*mine).double()), "float64 stays, as in torch's own"

    mc.launch(main, ranks=2)


def compiled() -> None:
    mesh = mc.make_mesh({"a": 2, "b": 2})
    cut = cut_by(mesh, "a", "b", parallel.context_order(S, "a", mesh=mesh))
    mine = [cut(x, 2) for x in drawn(4, 2)]

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return parallel.context_attention(q.sin(), k, v, axis="a", heads_axis="b", mask=window, mesh=mesh).cos()

    fast = torch.compile(fn, fullgraph=True, backend="aot_eager")
    found = []
    for run in (fast, fn):
        leaves = [x.clone().requires_grad_() for x in mine]
        y = run(*leaves)
        found.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    assert_close(*found, rtol=1e-11, atol=1e-11)


@pytest.mark.thorough
def test_compiled(pool4: Any) -> None:
    pool4.run(compiled)


# ------------------------------------------------------------------------------------------------------ what is sent


@pytest.mark.parametrize("regather", [True, False])
@pytest.mark.parametrize("kind", ["zigzag", "not causal"])
def test_what_is_sent(regather: bool, kind: str) -> None:
    """n-1 keys and values forward; backward 2n-1, or n-1 where they were kept. Whatever is computed."""
    n = 4
    kv = 2 * B * 2 * S // n * E

    def main(dtype: torch.dtype) -> list[Any]:
        mesh = mc.make_mesh({"a": n})
        q, k, v = (x.chunk(n, 2)[mesh.rank].to(dtype).clone().requires_grad_() for x in drawn(4, 2))
        with mc.trace() as trace:
            y = parallel.context_attention(q, k, v, axis="a", causal=ORDERS[kind][0], regather=regather, mesh=mesh)
            forward = len(trace.events)
            y.sum().backward()
        assert {event.operation for event in trace.events} == {"shift"}
        return [sorted(event.wire for event in part) for part in (trace.events[:forward], trace.events[forward:])]

    back = 2 * n - 1 if regather else n - 1
    assert mc.launch(main, ranks=n, args=(F64,)) == [[[kv * 8] * (n - 1), [kv * 8] * back]] * n
    narrow = [kv * 2] * n if regather else []  # what is complete is, too
    assert mc.launch(main, ranks=n, args=(torch.bfloat16,)) == [[[kv * 2] * (n - 1), narrow + [kv * 4] * (n - 1)]] * n


def test_what_it_costs_over_heads() -> None:
    def main() -> list[str]:
        mesh = mc.make_mesh({"a": 2})
        q, k, v = (x.chunk(2, 2)[mesh.rank] for x in drawn(4, 4))
        with mc.trace() as trace:
            parallel.context_attention(q, k, v, heads_axis="a", mesh=mesh)
        return [event.operation for event in trace.events]

    assert mc.launch(main, ranks=2) == [["all_to_all", "all_to_all"]] * 2


# --------------------------------------------------------------------------------------------------------- kernels


def test_without_a_kernel_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def main() -> list[Tensor]:
        mesh = mc.make_mesh({"a": 2})
        mine = [x.chunk(2, 2)[mesh.rank].clone().requires_grad_() for x in drawn(4, 2)]
        own = DOCUMENTS.chunk(2)[mesh.rank]
        y = parallel.context_attention(*mine, axis="a", documents=own, mask=window, mesh=mesh)
        return [y.detach(), *torch.autograd.grad(y.sin().sum(), mine)]

    fast = mc.launch(main, ranks=2)
    monkeypatch.setattr(_torch.kernels._KERNELS["on_cpu"], "ahead", None)
    assert_close(fast, mc.launch(main, ranks=2), rtol=1e-12, atol=1e-12)


def test_orders() -> None:
    mesh = mc.make_mesh({"a": 2, "b": 3})
    assert parallel.context_order(12, "b", mesh=mesh).tolist() == [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]
    assert parallel.context_order(6, "b", "contiguous", mesh=mesh).tolist() == list(range(6))
    assert parallel.context_order(24, ("a", "b"), mesh=mesh).argsort()[-1] == 3
    assert parallel.context_order(5, "one", mesh=mc.make_mesh({"one": 1})).tolist() == list(range(5))
    assert parallel.context_order(0, "b", mesh=mesh).numel() == 0
