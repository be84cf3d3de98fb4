"""Programs whose operations come again and again, in which something changes between two: what the checker remembers of
operations must make no difference to them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import meshcomm as mc


def of(axes: str | tuple[str, ...], *shape: int) -> Tensor:
    """Other numbers on each rank along these axes."""
    axes = (axes,) if isinstance(axes, str) else axes
    numbers = torch.arange(1.0, 1 + torch.Size(shape or (4,)).numel()).reshape(shape or (4,))
    for i, axis in enumerate(axes):
        numbers = numbers + 0.5 * 10**i * mc.axis_index(axis)
    return mc.mark_varying(numbers, axes)


def weight(*shape: int) -> Tensor:
    return of((), *shape).requires_grad_()


Program = Callable[[], list[Any]]


def written_between() -> list[Any]:
    x, w, found = of("dp"), weight(), []
    for _ in range(4):
        for _ in range(3):
            y = x * w
        found += [y, *torch.autograd.grad(y.sum(), w)]
        with torch.no_grad():
            w.mul_(0.5)
    return found


def another_place() -> list[Any]:
    """``w.data = ...`` counts no change, and nobody sees it."""
    x, w, found = of("dp", 2, 2), weight(2, 2), []
    for change in (lambda: torch.ones(2, 2), lambda: w.data.t(), lambda: 2 * w.data, lambda: w.data[:]):
        for _ in range(3):
            y = x * w
        found.append(y)
        with torch._C.DisableTorchFunction():
            w.data = change()
        y = x * w
        found += [y, *torch.autograd.grad(y.sum(), w)]
    return found


def another_dtype() -> list[Any]:
    """The same bytes, read otherwise, and as before."""
    x, w, found = of("dp").half(), of(()).half().detach().requires_grad_(), []
    for dtype in (torch.float16, torch.bfloat16, torch.float16):
        w.data = w.data.view(dtype)
        for _ in range(3):
            y = x * w
        found.append(y)
    assert [y.dtype for y in found] == [torch.float16, torch.float32, torch.float16]
    return [*found, *torch.autograd.grad(y.sum(), w)]


def by_another_thread() -> list[Any]:
    x, w = of("dp"), weight()
    for _ in range(3):
        y = x * w

    def change() -> None:
        w.data = torch.full((4,), 7.0)

    thread = threading.Thread(target=change)
    thread.start()
    thread.join()
    after = x * w
    return [y, after, *torch.autograd.grad(y.sum() + after.sum(), w)]


def after_backward() -> list[Any]:
    x, w = of("dp"), weight()
    for _ in range(3):
        for _ in range(3):
            y = x * w
        y.sum().backward()
    return [w.grad]


def several_axes() -> list[Any]:
    w, found = weight(), []
    each = [of("dp"), of("tp"), of(("dp", "tp"))]
    for _ in range(4):
        total = sum(((x * w).sum() for x in each), start=torch.zeros(()))
        found += torch.autograd.grad(total, w)
    return found


def partly_varied() -> list[Any]:
    """What varies along one axis meets what varies along two, and along another one alone."""
    x, v = of(("dp", "tp")), of("dp").requires_grad_()
    u = of("tp").requires_grad_()
    found: list[Any] = []
    for _ in range(4):
        y = x * v + u * v
        found += [y, *torch.autograd.grad(y.sum(), [u, v])]
    return found


def freed() -> list[Any]:
    """Others of the same id."""
    x, found = of("dp"), []
    for i in range(20):
        w = (of(()) * i).requires_grad_()
        for _ in range(3):
            y = x * w
        found += [y, *torch.autograd.grad(y.sum(), w)]
        del w, y
    return found


def another_leaf() -> list[Any]:
    """It is one no more, and one again."""
    x, w = of("dp"), weight()
    for _ in range(3):
        one = x * w
    w.requires_grad_(False)
    two = x * w
    w.requires_grad_()
    three = x * w
    return [one, two, three, *torch.autograd.grad(one.sum() + three.sum(), w)]


def without_grad() -> list[Any]:
    x, w = of("dp"), weight()
    with torch.no_grad():
        first = [x * w for _ in range(3)][-1]
    for _ in range(3):
        y = x * w
    with torch.no_grad():
        last = x * w
    return [first, y, last, *torch.autograd.grad(y.sum(), w)]


def lists() -> list[Any]:
    x, w = of("dp"), weight()
    u, v = of("dp").requires_grad_(), of("tp").requires_grad_()
    found: list[Any] = []
    for _ in range(4):
        y, z = torch.cat([x, w]), torch.cat((u, v))
        found += [y, z, *torch.autograd.grad(y.square().sum() + z.square().sum(), [w, u, v])]
    return found


def three_operands() -> list[Any]:
    x, w, b = of("dp", 3, 4), weight(2, 4), weight(2)
    found: list[Any] = []
    for _ in range(4):
        y = F.linear(x * 1.0, w, b)
        z = torch.addcmul(x, of(("tp",), 4), w[0])
        found += [y, z, *torch.autograd.grad(y.square().sum() + z.square().sum(), [w, b])]
    return found


def more_arguments() -> list[Any]:
    """The same function of two tensors, and of a number after them, or a tensor there."""
    x, w, i = of("dp") * 1.0, weight(), torch.tensor([1, 0])
    found: list[Any] = []
    for _ in range(4):
        y = torch.dist(x, w) + torch.dist(x, w, 1.0) + x.transpose(0, 0).view(2, 2).sum(0, True).sum()
        z = w.index_select(0, i).sum() + x.index_select(0, i).sum() + torch.clamp(x, None, w).sum()
        found += [y, z, *torch.autograd.grad(y + z, w)]
    return found


def keywords() -> list[Any]:
    x, w = of("dp"), weight()
    found: list[Any] = []
    for _ in range(4):
        y = torch.add(x, w, alpha=2.0)
        z = torch.full_like(x, 2.0, requires_grad=True)
        found += [y, z, (x * z), torch.add(x, other=w), *torch.autograd.grad(y.sum(), w)]
    return found


def in_place_again() -> list[Any]:
    x, y, w, n = of("dp"), of("dp"), weight(), of(())
    found: list[Any] = []
    for _ in range(4):
        x.mul_(y).add_(y, alpha=0.5).addcmul_(y, y, value=-0.5).mul_(0.5).clamp_(0.0, 9.0).copy_(y)
        n.mul_(n).add_(1.0)
        with torch.no_grad():
            w.add_(n, alpha=-0.1).mul_(0.5)
        found += [x.clone(), n.clone(), w.detach()]
    x.copy_(n)
    found += [x, x * y]
    y.requires_grad_()
    x.mul_(y)
    return [*found, x]


def parts_written() -> list[Any]:
    """What was written through another name is looked for, wherever something wider was written."""
    x, y, n = of("dp"), of(()), of(())
    found: list[Any] = []
    for _ in range(4):
        found += [x * 2.0, y * n, x * y, y.view(2, 2), n.add_(y).clone()]
    y.data.copy_(x)
    return [*found, y * n, x * y, y.view(2, 2), n.add_(y), n]


def a_leaf_out_of_sight() -> list[Any]:
    x, w = of("dp"), of(())
    for _ in range(3):
        y = x * w
    with torch._C.DisableTorchFunction():
        w.requires_grad_()
    z = x * w
    return [y, z, *torch.autograd.grad(z.sum(), w)]


def changed_out_of_sight() -> list[Any]:
    """Of the first operand, and of the second one."""
    x, w, found = of("dp") * 1.0, weight(), []
    v = of("dp") * 1.0
    for _ in range(3):
        found.append(x * w)
        found.append(w * v)
    for operation, changed in ((lambda: x * w, x), (lambda: w * v, v)):
        with torch._C.DisableTorchFunction():
            changed.add_(1.0)
        with pytest.raises(mc.VaryingError, match="changed out of sight"):
            operation()
    return found


def slices() -> list[Any]:
    x = of("dp").requires_grad_()
    found: list[Any] = []
    for _ in range(4):
        y = x * 1.0
        found += [y[:2], y[1:3][0], y[0], y[::2], y[..., None], y.view(2, 2)[1:].t(), y.view(2, 2).T, y.detach()[1:]]
    return found


def parameters_elsewhere() -> list[Any]:
    """Two that take turns, changed out of sight in each way that counts no change, and in those that do."""
    x = of("dp", 2, 2)
    w, v = parameter(2, 2), parameter(2, 2)
    big = torch.arange(16.0)

    def resize() -> None:
        w.untyped_storage().resize_(64)
        w.data = w.data.new_zeros(0).set_(w.data.untyped_storage(), 1, (2, 2), (2, 1)).fill_(3.0)

    changes: list[Callable[[], object]] = [
        lambda: setattr(w, "data", big[1:5].view(2, 2)),
        lambda: setattr(w, "data", big[5:9].view(2, 2)),  # of the same storage, at another place in it
        lambda: setattr(w, "data", w.data.t()),
        lambda: setattr(w, "data", w.data.expand(2, 2)[:, :1].expand(2, 2)),
        lambda: setattr(w, "data", torch.full((2, 2), 5.0)),
        resize,
        lambda: setattr(w, "data", w.data.double()),
        lambda: setattr(w, "data", w.data.view(torch.complex64) if w.is_complex() else w.data),
        lambda: w.requires_grad_(False),
        lambda: w.requires_grad_(),
    ]
    found: list[Any] = []
    for change in changes:
        for _ in range(3):
            y, z = x * w, v * x
        found += [y, z]
        with torch._C.DisableTorchFunction():
            change()
        for _ in range(3):
            y, z = x * w, v * x
        leaves = [each for each in (w, v) if each.requires_grad]
        found += [y, z, *torch.autograd.grad(y.sum() + z.sum(), leaves)]
        with torch.no_grad():
            found += [x * w, v * x]
    return found


def read_otherwise() -> list[Any]:
    """The same bytes as another dtype, of two that take turns."""
    x, found = of("dp").double(), []
    w, v = (mc.mark_varying(torch.nn.Parameter(of(()).double() * i), ()) for i in (1, 2))
    for dtype in (torch.float64, torch.complex64, torch.float64):
        with torch._C.DisableTorchFunction():
            w.data = w.data.view(dtype)
        for _ in range(3):
            y, z = x * w, v * x
        assert y.is_complex() == (dtype is torch.complex64)
        found += [y, z]
    return found


def set_in_place() -> list[Any]:
    """What changes where a leaf lies and counts that: nobody knows what it is then."""
    found: list[Any] = []
    with torch.no_grad():
        other = torch.arange(8.0)
    for change in (
        lambda w: w.set_(other[2:6]),
        lambda w: w.t_(),
        lambda w: w.squeeze_(0),
        lambda w: w.as_strided_((4,), (0,)),
        lambda w: w.mul_(2.0),
    ):
        x, w = of("dp"), parameter(1, 4)
        for _ in range(6):
            y = x * w
        found.append(y)
        with torch.no_grad(), torch._C.DisableTorchFunction():
            change(w)
        try:
            found.append(x * w)
        except mc.VaryingError as error:
            found.append(str(error).split(" at ")[0])
    return found


def parameter(*shape: int) -> Tensor:
    """Its pvarys are remembered for all of a check."""
    return mc.mark_varying(torch.nn.Parameter(of((), *shape)), ())


def several_at_once() -> list[Any]:
    """Of one leaf, along one axis and along the other one, first and second, with and without a keyword; in a list and
    behind a third argument; a part of it; and each changed in between.
    """
    x, y, z, w = of("dp"), of("tp"), of(("dp", "tp")), parameter()
    met = x * of(())
    found: list[Any] = []
    for each in (x, y, z, met):
        for _ in range(6):
            one, two = each * w, w * each
            cat, added = torch.cat([each, w]), torch.add(each, w, alpha=2.0)
            far, part = torch.dist(each, w, 1.0), w[:2] * each[2:]
        total = sum((out * out).sum() for out in (one, two, cat, added, far, part))
        found += [one * 2.0, two, cat, added, far, part, *torch.autograd.grad(total, w)]
    for _ in range(4):
        for each in (x, y, z, met):
            found += [each * w, w * each]
        found += torch.autograd.grad(sum((out * out).sum() for out in found[-8:]), w)
        with torch.no_grad():
            w.mul_(0.5)
    return found


def in_the_image() -> list[Any]:
    """What takes no more than a shape, a dtype or a memory; what is a leaf is each rank's own."""
    x, y, w, p = of("dp"), of(("dp", "tp")), weight(), parameter(4)
    found: list[Any] = []
    for each in (x, y, w, p, x * w):
        for _ in range(4):
            z = torch.zeros_like(each)
            made = [
                z,
                z * each,
                each.new_zeros(2),
                each.new_ones((2, 2)),
                torch.full_like(each, 2.0),
                torch.empty_like(each),
            ]
            leaf = torch.zeros_like(each).requires_grad_()
            other = torch.zeros_like(each, requires_grad=True)
            found += [z, made[1], *[part.zero_() for part in made[2:]], leaf, leaf * 2.0, other, other * x]
            found += [torch.full_like(each, x[0].detach()), each.new_tensor([1.0]), torch.nn.Parameter(z) * 1.0]
    for _ in range(4):
        for each in (x, w, p):
            found += [each.detach() * x, each.data * y, each.detach(), each.data, each.contiguous(), each.float()]
            found += [
                each.double(),
                each.to(y),
                each.to(torch.float64),
                each.to("cpu"),
                each.type_as(y),
                each.view_as(y),
            ]
            found += [y.expand_as(each), each.reshape_as(x), x.type_as(of("tp").double()), each.long()]
    return found


def written_past_a_leaf() -> list[Any]:
    """Through ``.data`` and ``detach()``, made for the tenth time: what varies is refused there, as at the first time."""
    found: list[Any] = []
    for name in ("data", "detach"):
        x, w = of("dp"), weight()
        for _ in range(4):
            other = w.data if name == "data" else w.detach()
            found.append(other.mul_(0.5))
        with pytest.raises(mc.VaryingError, match="the ranks would differ"):
            other.add_(x)
        found.append(w * 1.0)
    return found


def narrower_written() -> list[Any]:
    """What varies along fewer axes, written into what varies along more, and the other way round."""
    x, y, n, w = of("dp"), of(("dp", "tp")), of(()), weight()
    z, ended = y * 1.0, mc.all_reduce(of("tp"), "tp")
    found: list[Any] = []
    for _ in range(6):
        with torch.no_grad():
            z.add_(x).mul_(n).sub_(w).addcmul_(x, n).add_(ended).div_(2.0)
            y.add_(n).lerp_(x, 0.5)
            z[:2] = n[2:]
            z[:] = x
        found += [z.clone(), y.clone(), z * w, y * n]
    z.copy_(n)
    n.add_(x)
    return [*found, z, z * 2.0, n, n * w, x.copy_(n), x]


def narrower_with_a_gradient() -> list[Any]:
    x, w, found = of("dp") * 1.0, weight(), []
    for _ in range(4):
        with torch.no_grad():
            x.mul_(w)
    for _ in range(3):
        y = x * 1.0
        y.mul_(w)
        found += [y, *torch.autograd.grad(y.sum(), w)]
    return found


def views_written() -> list[Any]:
    x, y, n = of("dp", 2, 4), of("dp", 2, 4), of((), 2, 4)
    v, found = x.view(8), []
    for _ in range(6):
        x.view(8).add_(y.view(8))
        x[0].mul_(y[1])
        x.t().copy_(y.t())
        x[:, 1:].add_(1.0)
        v.sub_(y.flatten())
        n[1].add_(n[0])
        n[0].zero_()
        found += [x.clone(), v * 2.0, x * n, n[0] * 1.0, v.view(2, 4) + y]
    u = mc.mark_varying(x.view(8)[:4], ())
    for _ in range(4):
        x[1].add_(u)
        found += [u, u * 1.0, (mc.varying_axes(u), x[1])[1]]
    x[0].zero_()
    n[0].copy_(of("tp"))
    found += [x, x[0], v * 1.0, n, n[1] * 1.0, n.view(8) * x.view(8)]
    n.view(8).add_(1.0)
    return [*found, n]


def views_of_what_is_declared_otherwise() -> list[Any]:
    x, y = of("dp") * 1.0, of("dp")
    v = x.view(2, 2)
    for _ in range(4):
        v.add_(y.view(2, 2))
    mc.mark_varying(x, ())
    v.add_(y.view(2, 2))
    found = [x, x * 2.0, v]
    with torch._C.DisableTorchFunction():
        v.add_(1.0)
    with torch.no_grad():
        v.add_(1.0)
    return [*found, x, v]


def views_of_leaves_written() -> list[Any]:
    """A graph is asked for its pvary again; what varies is refused in a leaf that is invariant."""
    x, w, found = of("dp", 2, 2), weight(2, 2), []
    for _ in range(4):
        with torch.no_grad():
            w.view(4).mul_(0.5)
            w[0].add_(w[1])
        y = x * w
        found += [y, *torch.autograd.grad(y.sum(), w)]
    with torch.no_grad():
        w[0].add_(x[0])
    with pytest.raises(mc.VaryingError, match="the ranks would differ"):
        w.mul(1.0)
    return found


def views_in_other_memory() -> list[Any]:
    x, y, n = of("dp") * 1.0, of("dp"), of(())
    v = x.view(2, 2)
    for _ in range(4):
        v.add_(y.view(2, 2))
    with torch._C.DisableTorchFunction():
        v.data = n.data.view(2, 2)
    v.add_(y.view(2, 2))
    return [x, v, n, n * 1.0]


def asked_to_write() -> list[Any]:
    x, w, t = of("dp"), weight(), torch.tensor([0, 1])
    e, found = of((), 4, 2), []
    for _ in range(4):
        z = x * 1.0
        found += [F.relu(z), F.relu(z, False), F.silu(z, inplace=False), F.dropout(z, 0.0), F.dropout(z, 0.3, False)]
        found += [F.relu(w * x), F.hardtanh(w), F.embedding(t, e), F.pad(z, (1, 1)), F.layer_norm(z, (4,))]
    counts = []
    for write in (
        lambda z: F.relu(z, True), lambda z: F.silu(z, inplace=True), lambda z: F.dropout(z, 0.0, True, True),
        lambda z: F.leaky_relu(z, 0.1, True),
    ):  # fmt: skip
        z = x * 1.0
        found += [write(z), z, z * w]
        counts.append(z._version)
    found += [F.embedding(t, e, None, 0.5), F.embedding(t, e, max_norm=0.1), e, e * 1.0]
    assert min(counts[:2]) > 0
    return found


def masks_and_places() -> list[Any]:
    """An index and a mask have the same type: what a mask gives is of a size that depends on data."""
    x, w, i = of("dp"), weight(), torch.tensor([3, 0])
    m = torch.tensor([True, False, True, False])
    found: list[Any] = []
    for _ in range(4):
        found += [x[i], w[i], x.gather(0, i), x[1], x[None, 1:], torch.where(m, x, w), torch.where(m, w, 0.0)]
        found += [x[m], w[m], x.masked_fill(m, 0.0), torch.where(m)[0], x[i]]
    found += torch.autograd.grad(sum(part.sum() for part in found if part.requires_grad), w)
    n = x[of("dp") > 2.0]
    return [*found, n.shape[0] == n.shape[0], x[i], torch.where(m, x, w)]


def three_of_several_types() -> list[Any]:
    x, y, w, b = of("dp", 4, 4), of("tp", 4, 4), weight(4, 4), weight(4)
    c, found = of("dp", 4, 4) > 3.0, []
    for _ in range(4):
        found += [F.linear(x, w, b), F.linear(x, w), torch.where(c, x, w), torch.where(c, w, y), torch.where(c, 0.0, w)]
        found += [
            F.layer_norm(x, (4,), b, b),
            torch.addcmul(x, w, y),
            torch.addmm(b, x, w),
            torch.baddbmm(x[None], y[None], w[None]),
        ]
        found += [torch.lerp(x, w, y), torch.lerp(w, x, 0.5), x > w, torch.maximum(w, y), w @ x, x / w, w - y]
        found += [F.layer_norm(x, (4,), weight=b, bias=b), F.layer_norm(x, (4,), bias=b), F.rms_norm(x, (4,), weight=b)]
        found += [
            F.layer_norm(x, (4,), b, bias=w[0]),
            F.group_norm(x, 2, weight=b, bias=b),
            F.layer_norm(w, (4,), weight=b),
        ]
        found += [F.cross_entropy(x, w, weight=b.detach()), F.cross_entropy(w, y.softmax(1), weight=x[0])]
        total = sum(part.sum() for part in found[-24:] if part.requires_grad)
        found += torch.autograd.grad(total, (w, b))
    return found


def several_results() -> list[Any]:
    x, w, found = of("dp", 4, 2), weight(4, 2), []
    for _ in range(4):
        for each in (x, w, x * w):
            found += [*each.chunk(2), *each.split(2), *each.unbind(0), *each.sort(), *each.topk(1), *each.max(dim=0)]
            found += [*each.split([1, 3]), *torch.aminmax(each), *torch.var_mean(each, 0)]
            parts = (each.detach() * 1.0).chunk(2)
            parts[0].detach().add_(x[:2])
            found += [*parts, parts[1] * w[:2]]
    return found


def written_wider_elsewhere() -> list[Any]:
    """That something else was written that varies along more axes says nothing; that it was written here, does."""
    x, w, n, a, b = of("dp"), weight(), of(()), of(()), of((), 2, 2)
    found: list[Any] = []
    for wide in (None, of("dp"), of("tp"), of(("dp", "tp"))):
        if wide is not None:
            of(()).add_(wide)
        for _ in range(4):
            found += [x * w, w * x, x * n, n * 2.0, n + a, torch.cat([x, w]), torch.addcmul(x, n, a), a.view(4), b[0]]
            found += [torch.stack([n, a]), n.add_(a).clone(), F.linear(n, b.view(1, 4)), torch.where(n > 0, a, w)]
    for changed in (n, a, b, x):
        changed.data.view(-1)[:1].add_(of("tp")[0])
        found += [x * n, n * 2.0, n + a, a + n, torch.addcmul(x, n, a), a.view(4), b[0], n.add_(1.0).clone(), x * w]
        found += [torch.where(n > 0, a, n), b * 1.0, torch.cat([n, a])]
    return found


def lists_and_a_dim() -> list[Any]:
    x, y, w, v, n, found = of("dp", 2, 2), of("tp", 2, 2), weight(2, 2), weight(2, 2), of((), 2, 2), []
    for _ in range(4):
        for pair in ((x, w), [w, x], (w, v), (x, y), [n, w], [x, n], (y, w)):
            found += [
                torch.cat(pair, 1),
                torch.stack(pair, 0),
                torch.cat(pair),
                torch.cat((*pair, n)),
                torch.cat((*pair, pair[0])),
            ]
            found += [
                torch.cat(pair, dim=-1),
                torch.stack([*pair, pair[1]], 1),
                torch.cat([x, x, x], 1),
                torch.cat([*pair, w, n]),
            ]
        found += torch.autograd.grad(sum((y * y).sum() for y in found[-63:] if y.requires_grad), (w, v))
    x.data[0].add_(of("tp")[:2])
    return [*found, torch.cat([x, n], 1), torch.cat([n, n, x]), torch.stack((x, x, x))]


def drawn() -> list[Any]:
    """Along all axes, along some, along none; told to drop nothing; in place, and of sizes."""
    x, y, w, found = of("dp"), of(("dp", "tp")), weight(), []
    z = y * 1.0
    for how in (None, "dp", ("dp", "tp"), None):
        with contextlib.nullcontext() if how is None else mc.fork_rng(how):
            for _ in range(4):
                found += [
                    torch.rand(2),
                    torch.rand((2, 2)),
                    torch.randn(2, 1, 1, 1),
                    torch.randint(0, 9, (2,)),
                    torch.randperm(3),
                ]
                found += [
                    torch.rand_like(x),
                    torch.randn_like(w),
                    torch.rand_like(y, dtype=torch.float64),
                    torch.rand(4) * w,
                ]
                found += [
                    F.dropout(z, 0.5),
                    F.dropout(z),
                    F.dropout(y * w, 0.3),
                    F.dropout(x, 0.0),
                    F.dropout(w, 0.5, False),
                ]
                found += [
                    z.normal_(),
                    z.uniform_(1.0, 2.0) * w,
                    (z * 1.0).bernoulli_(0.5),
                    torch.rand(2, requires_grad=True),
                ]
                q = y.view(1, 1, 2, 2)
                found += [
                    F.scaled_dot_product_attention(q, q, q),
                    F.scaled_dot_product_attention(q, q, q, dropout_p=0.5),
                ]
                if how is not None:
                    found += [
                        F.dropout(x * 1.0, 0.5) if how == "dp" else x,
                        (x * 1.0).normal_(),
                        (x * w).detach().uniform_(),
                    ]
                found += [(of(()) * 1.0).normal_(), z.zero_(), z.add_(y)]
    for refused in (
        lambda: F.dropout(x, 0.5),
        lambda: F.dropout(w),
        lambda: w.detach().requires_grad_().data.normal_(),
    ):
        for _ in range(3):
            try:
                found.append(refused())
            except mc.VaryingError as error:
                found.append(str(error).split(" at ")[0])
    return found


def made_of_numbers() -> list[Any]:
    w, x, n, found = weight(), of("dp"), torch.tensor(3), []
    for _ in range(4):
        found += [
            torch.zeros(4),
            torch.ones((2, 2)),
            torch.full((4,), 2.0) * w,
            torch.arange(4) * x,
            torch.eye(2),
            torch.tensor(1.0),
        ]
        found += [torch.tensor([1.0, 2.0]), torch.tensor([[1], [2]]), torch.empty(2, 2, 2, 0), torch.linspace(0, 1, 3)]
        found += [
            torch.zeros(4, requires_grad=True) * x,
            torch.full((4,), x[0]),
            torch.tensor([x.sum().detach(), 1.0]),
            torch.arange(n),
        ]
        found += [
            torch.zeros(size=(2,)),
            torch.ones(2, 2, dtype=torch.int64),
            torch.tensor([True, False]),
            torch.zeros(4).add_(x),
        ]
    return found


def operators() -> list[Any]:
    x, y, w, found = of("dp", 2, 2), of("tp", 2, 2), weight(2, 2), []
    for _ in range(4):
        for each in (x, w, x * w):
            found += [
                each**2,
                2**each,
                1 - each,
                2 / each,
                each.detach() // 2,
                each % 2,
                each @ y,
                each == 0,
                each != y,
                each > w,
            ]
            found += [
                each.norm(),
                *each.split(1),
                *each.sort(),
                each.unflatten(0, (1, 2)),
                (each > 1) & (y > 1),
                ~(each > 1),
            ]
            found += [each**w, each.matmul(w), each @ w[0], each[0] @ w[0]]
            assert [each == None, each == "a", each != "a"] == [False, False, True]  # noqa: E711 -- as Python has it
        found += torch.autograd.grad(sum(part.sum() for part in found[-66:] if part.requires_grad), w)
    return found


def leaves_in_the_image() -> list[Any]:
    """One that is a leaf is each rank's own, where the others are the same on every rank."""
    x, found = of("dp"), []
    for make in (Tensor.new_zeros, Tensor.new_ones):
        for _ in range(3):
            found.append(make(x, 4))
        found.append(make(x, 4, requires_grad=True))
    found.append(x.new_full((4,), 2.0, requires_grad=True))
    return [*found, torch.zeros_like(x, requires_grad=True)]


def overwritten_after_a_sum() -> list[Any]:
    """What was summed makes a rank's own leaf invariant; what was written over that leaves it the rank's own, and may
    be summed again.
    """
    x, found = of("dp"), []
    for write in (Tensor.zero_, lambda t: t.fill_(2.0), lambda t: t.copy_(torch.ones(4)), lambda t: t.uniform_(1, 1)):
        total = mc.all_reduce(x, "dp")
        w = mc.mark_varying(torch.ones(4), "dp").requires_grad_()
        with mc.fork_rng(()), torch.no_grad():
            for _ in range(3):
                write(total)
            w.copy_(total)
        found += [w, mc.all_reduce(total, "dp")]
    return found


class Own(Tensor):
    """As people write them."""


def drawn_in_the_image_of_a_subclass() -> list[Any]:
    x, found = mc.mark_varying(of("dp").as_subclass(Own), "dp"), []
    for _ in range(4):
        torch.manual_seed(0)
        found += [torch.rand_like(x), torch.randint_like(x, 5)]
    return [each.as_subclass(Tensor) for each in found]


PROGRAMS: dict[str, Program] = {
    each.__name__.replace("_", " "): each
    for each in (
        written_between, another_place, another_dtype, by_another_thread, after_backward, several_axes, partly_varied, freed,
        another_leaf, without_grad, lists, three_operands, more_arguments, keywords, in_place_again, parts_written,
        slices, a_leaf_out_of_sight, changed_out_of_sight, parameters_elsewhere, read_otherwise, set_in_place,
        several_at_once, in_the_image, written_past_a_leaf, narrower_written, narrower_with_a_gradient, views_written,
        views_of_what_is_declared_otherwise, views_of_leaves_written, views_in_other_memory, asked_to_write,
        masks_and_places, three_of_several_types, several_results, written_wider_elsewhere, lists_and_a_dim,
        drawn, made_of_numbers, operators, leaves_in_the_image, drawn_in_the_image_of_a_subclass,
        overwritten_after_a_sum,
    )
}  # fmt: skip
