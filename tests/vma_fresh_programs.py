"""More programs for which what the checker remembers must make no difference: what is written into fresh memory, in a
graph, and by functions of lists; any number of operands; steps of optimizers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vma_short_programs import Own, of, weight

import meshcomm as mc


def tried(*runs: Callable[[], Any]) -> list[Any]:
    """What each gives, or says."""
    found: list[Any] = []
    for run in runs:
        try:
            given = run()
            found += [*given] if isinstance(given, (list, tuple)) else [given]
        except (mc.VaryingError, RuntimeError) as error:
            found.append(str(error).split(" at ")[0])
    return found


def written_first() -> list[Any]:
    """What lies in the same memory is written, too, whatever was known of it."""
    x, y, n, w, found = of("dp"), of("tp"), of(()), weight(), []
    makes: tuple[Callable[[], Tensor], ...] = (
        lambda: x * 2.0, lambda: n * 2.0, lambda: x * n, lambda: x * w, lambda: w * 2.0, lambda: x.clone(),
        lambda: torch.zeros_like(x), lambda: torch.zeros(4), lambda: mc.pvary(n, "dp"), lambda: mc.all_reduce(x, "dp"),
    )  # fmt: skip
    writes: tuple[Callable[[Tensor], object], ...] = (
        lambda z: z.add_(x), lambda z: z.mul_(n), lambda z: z.mul_(0.5), lambda z: z.add_(w), lambda z: z.relu_(),
        lambda z: z.mul_(y), lambda z: z[:2].add_(x[:2]), lambda z: z.view(2, 2).mul_(0.5), lambda z: z.detach().add_(x),
        lambda z: z.data.mul_(x), lambda z: z.copy_(x), lambda z: z.zero_(), lambda z: z.__setitem__(0, 1.0),
        lambda z: z.add_(z), lambda z: z.requires_grad_(False).add_(x),
    )  # fmt: skip
    for make in makes:
        for write in writes:
            for _ in range(3):
                n = of(())  # for what is written goes into this, too, where pvary shares it
                z = make()
                beside, part = z.detach(), z[1:]
                found += tried(lambda: write(z), lambda: write(z), lambda: (z * 1.0, beside * 1.0, part * 1.0))
    for wide in (x, y, n):
        for _ in range(3):
            z = x * 2.0
            data = z.data
            data.mul_(wide)
            z.mul_(x)
            found += tried(lambda: z * 1.0, lambda: data * 1.0)
    return found


def written_in_a_graph() -> list[Any]:
    x, n, v, found = of("dp"), of(()), of("dp").requires_grad_(), []
    for _ in range(3):
        w = weight()
        for make in (lambda: w * x, lambda: w * 2.0, lambda: v * x, lambda: (w * x).view(2, 2).t().reshape(4)):
            for write in (
                lambda z: z.mul_(x), lambda z: z.mul_(n), lambda z: z.add_(v), lambda z: z.add_(w), lambda z: z.sigmoid_(),
                lambda z: z.view(4).mul_(x), lambda z: z[1:].mul_(v[1:]), lambda z: F.relu(z, inplace=True),
                lambda z: F.elu(z, 1.0, True), lambda z: torch._foreach_mul_([z, z], 2.0),
            ):  # fmt: skip
                for beside in ("", "written", "declared"):

                    def run() -> Any:
                        z: Tensor = make()
                        if beside == "written":
                            z[:2].mul_(x[:2])
                        elif beside:  # a view that varies where z does not
                            mc.mark_varying(z[:2], "dp")
                        write(z)
                        write(z)
                        return [z * 1.0, *torch.autograd.grad((z * z).sum(), (w, v), allow_unused=True)]

                    found += tried(run)
        with torch.no_grad():
            for _ in range(3):
                found += tried(
                    lambda: w.add_(n).clone(), lambda: w.add_(x), lambda: (w * x).add_(w), lambda: v.add_(v) * 1
                )
        found += tried(lambda: w.add_(1.0), lambda: F.relu(w, inplace=True))
    return found


def told_to_write() -> list[Any]:
    x, n, w, found = of("dp"), of(()), weight(), []
    for each in (F.relu, F.silu, F.elu, F.hardtanh, F.leaky_relu, F.relu6, F.hardswish):
        for _ in range(4):
            for z in (x, n, x * w, x[:2], (w * 2.0)[:2], x.as_subclass(Own) * 1.0):
                found += tried(lambda: each(z - 2.0, inplace=True), lambda: each(z, inplace=True) * 1, lambda: each(z))
        found += tried(lambda: each(x.data, inplace=True), lambda: x * 1.0, lambda: each(w.detach(), inplace=True))
    found += tried(lambda: F.dropout(x * 1.0, 0.0, inplace=True), lambda: F.dropout(x * 1.0, 0.5, inplace=True))
    return found


def functions_of_lists() -> list[Any]:
    x, y, n, w, v, found = of("dp"), of("tp"), of(()), weight(), of("dp").requires_grad_(), []
    plain: tuple[Callable[[list[Tensor], list[Tensor]], Any], ...] = (
        lambda a, b: torch._foreach_add(a, b), lambda a, b: torch._foreach_mul(a, 2.0), lambda a, b: torch._foreach_sqrt(a),
        lambda a, b: torch._foreach_norm(a), lambda a, b: torch._foreach_add(a, b[0]),
        lambda a, b: torch._foreach_addcmul(a, b, b, value=0.5), lambda a, b: torch._foreach_div(a, [2.0] * len(a)),
    )  # fmt: skip
    into: tuple[Callable[[list[Tensor], list[Tensor]], Any], ...] = (
        lambda a, b: torch._foreach_add_(a, b), lambda a, b: torch._foreach_mul_(a, 0.5),
        lambda a, b: torch._foreach_lerp_(a, b, 0.5), lambda a, b: torch._foreach_addcmul_(a, b, b, value=0.5),
        lambda a, b: torch._foreach_mul_(a, b[0]), lambda a, b: torch._foreach_div_(a, [2.0] * len(a)),
        lambda a, b: torch._foreach_zero_(a), lambda a, b: torch._foreach_copy_(a, b),
        lambda a, b: torch._foreach_add_([*a, *a], [*b, *b]),
        lambda a, b: torch._foreach_mul_([part for each in a for part in each.chunk(2)], 0.5),
        lambda a, b: torch._foreach_add_([each.view(4) for each in a], b),
    )  # fmt: skip
    pairs = (
        [[x, x], [x, x]], [[n, n], [n, n]], [[x, n], [n, n]], [[n, x], [x, n]], [[w, w], [n, n]], [[x, w], [x, x]],
        [[v, v], [x, x]], [[x], [y]], [[w, n], [x, x]], [[x * w, x * w], [x, n]],
    )  # fmt: skip
    for a, b in pairs:
        for _ in range(3):
            for run in plain:
                found += tried(lambda: run(a, b))
            for run in into:
                c = [each * 1.0 for each in a]
                beside = [each.detach() for each in c]
                found += tried(lambda: run(c, b), lambda: run(c, b), lambda: [each * 1.0 for each in (*c, *beside)])
    with torch.no_grad():
        for a, b in pairs[:-1]:
            for _ in range(3):
                for run in into:
                    found += tried(lambda: run(a, b), lambda: [each * 1.0 for each in a])
    for _ in range(3):
        w = weight()
        z = w * 2.0
        for _ in range(2):
            torch._foreach_mul_([z], 2.0)
        mc.mark_varying(z[:2], "dp")
        found += tried(
            lambda: torch._foreach_mul_([z], [w * 2.0]), lambda: z * 1.0, lambda: torch.autograd.grad(z.sum(), w)
        )
    with torch._C.DisableTorchFunction():
        n.detach().add_(1.0)
    return found + tried(lambda: torch._foreach_mul_([n], [n]), lambda: torch._foreach_sqrt([n]), lambda: n * 1.0)


def statistics() -> list[Any]:
    x, n, w, b, found = of("dp", 3, 4), of((), 3, 4), weight(), weight(), []
    for given in (n, x, n, x * 1.0):
        mean, var = of(()), of(())
        for _ in range(4):
            for training in (False, True, False):
                found += tried(
                    lambda: F.batch_norm(given, mean, var, w, b, training=training),
                    lambda: F.batch_norm(given, mean, var, None, b, training),
                    lambda: F.batch_norm(given, mean, var, training=training),
                    lambda: F.batch_norm(given, None, None, bias=b, training=True),
                    lambda: (mean * 1.0, var.detach() * 1.0),
                )
        found += tried(lambda: F.batch_norm(given, w, var, training=True), lambda: w * 1.0)
        kept = mc.mark_varying(torch.ones(4), ())
        view = kept.view(2, 2)
        found += tried(
            lambda: F.batch_norm(given, kept, var, training=True), lambda: view * 1.0, lambda: kept.sum().item()
        )
    return found


def any_number() -> list[Any]:
    x, y, n, w, b, v, found = of("dp"), of("tp"), of(()), weight(), weight(), of("dp").requires_grad_(), []
    a = of(())
    for _ in range(4):
        begun = len(found)
        for rows in (
            [x, x, x],
            [x, w, b],
            [w, x, n],
            [n, w, b, x],
            [x, y, w, n, b],
            (v, w),
            [v, v, w],
            [n, n, n, n],
            [w],
            [n, n, n, a],
        ):
            found += [torch.cat(rows), torch.stack(rows), torch.cat(rows, 0), torch.stack(rows, dim=-1)]
        two = x.view(1, 4)
        found += [
            F.group_norm(two, 2, weight=w, bias=b), F.group_norm(two, 2, w, b), F.layer_norm(x, (4,), bias=b, weight=w),
            F.layer_norm(n, (4,), w, b), F.layer_norm(v, [4], x, b), F.linear(two, w.view(1, 4), b[:1]),
            F.linear(two, w.view(1, 4)), F.linear(two, two, w[:1]), torch.where(x > 2, w, b), torch.where(n > 2, x, w),
            torch.where(n > 2, w, 0.0), torch.where(x > 2, 1.0, w), torch.addcmul(w, b, x), torch.addcmul(x, w, b, value=2),
            torch.lerp(w, x, 0.5), torch.lerp(x, y, w), torch.add(x, w, alpha=2.0), torch.einsum("i,i->i", x, w),
            torch.einsum("i,j,i->j", w, x, b), F.cross_entropy(two, n[:1].long() % 4, weight=n, label_smoothing=0.1),
            x.view_as(w), w.type_as(x), w.expand_as(x), x.to(y), torch.clamp(x, w, b), torch.clamp(w, min=x),
            torch.baddbmm(w.view(1, 2, 2), x.view(1, 2, 2), b.view(1, 2, 2)), x.as_strided((2,), (2,)), w.as_strided((2,), (1,)),
        ]  # fmt: skip
        total = sum((each * each).sum() for each in found[begun:] if each.requires_grad)
        found += torch.autograd.grad(total, (w, b, v))
        with torch.no_grad():
            found += [torch.cat([x, w, b]), F.linear(two, w.view(1, 4), b[:1]), torch.where(x > 2, w, b), x + w]
            w.mul_(1.5)
    x.data.add_(y)
    a.data.add_(y)
    return found + tried(
        lambda: torch.cat([n, n, n, a]),
        lambda: torch.cat([n, x, n, n]),
        lambda: F.layer_norm(n, (4,), w, x),
        lambda: torch.cat([n] * 5),
    )


def attention() -> list[Any]:
    x, mask, found = of("dp", 2, 3, 4), mc.mark_varying(torch.zeros(3, 3), ()), []
    torch.manual_seed(0)
    with mc.check_vma(False):
        modules = [nn.MultiheadAttention(4, 2, drop, batch_first=True) for drop in (0.0, 0.5)]
        modules.append(nn.MultiheadAttention(4, 2, add_bias_kv=True, kdim=4, vdim=4, batch_first=True))
        modules[1].eval()
    for module in modules:
        mc.mark_varying(module, ())
        leaves = [*module.parameters()]
        for _ in range(4):
            for q, k in ((x, x), (x, mask.new_ones(2, 3, 4)), (mask.new_ones(2, 3, 4), x)):
                y, weights = module(q, k, k, attn_mask=mask)
                z, _ = module(q, k, k, need_weights=False)
                found += [y, weights, z, *torch.autograd.grad((y * y + z).sum(), leaves)]
    modules[1].train()
    return found + tried(lambda: modules[1](x, x, x))


def many_leaves() -> list[Any]:
    """More than those of which a pvary is remembered."""
    x, leaves, found = of("dp"), [weight() for _ in range(70)], []
    for order in (range(70), range(69, -1, -1), [i // 2 for i in range(140)], range(0, 70, 7)):
        total = sum((x * leaves[i] + leaves[0]).sum() for i in order)
        total = total + sum((x * leaves[i]).sum() for i in order)
        found += [each for each in torch.autograd.grad(total, leaves, allow_unused=True) if each is not None]
    return found


def steps() -> list[Any]:
    """As programs train: all ranks have the same parameters after each."""
    found = []
    for make, foreach in (
        (lambda p, **how: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, **how), True),
        (lambda p, **how: torch.optim.AdamW(p, lr=0.1, **how), True),
        (lambda p, **how: torch.optim.AdamW(p, lr=0.1, amsgrad=True, **how), False),
    ):
        torch.manual_seed(0)
        with mc.check_vma(False):
            model = nn.Sequential(
                nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.GELU()
            )
        mc.mark_varying(model, ())
        optimizer = make([*model.parameters()], foreach=foreach)
        for _ in range(4):
            y: Tensor = model(of("dp", 3, 4))
            y += 1.0
            mc.all_reduce(y.square().mean(), "dp").backward()
            found.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            found += [each * 1.0 for each in model.parameters()]
            found += tried(lambda: [each * 1.0 for each in model.buffers()])
            optimizer.zero_grad()
    return found


def flipped() -> list[Any]:
    """What requires grad no more, or from now on."""
    x, n, found = of("dp"), of(()), []
    for _ in range(4):
        w, z = weight(), x * 2.0
        for _ in range(3):
            found += [w * x, z.mul_(x) * 1.0]
        w.requires_grad_(False)
        found += [w.add_(n) * 1.0, w.mul_(2.0) * x, w.requires_grad_() * x]
        with torch._C.DisableTorchFunction():
            w.requires_grad_(False)
        found += tried(lambda: w.add_(n) * 1.0, lambda: torch._foreach_add_([w], [n]), lambda: w * x)
        with torch._C.DisableTorchFunction():
            w.requires_grad_()
            z.requires_grad_()
        found += tried(lambda: w * x, lambda: z * 1.0, lambda: z.add_(x), lambda: w.add_(n))
        with torch.no_grad():
            found += tried(lambda: z.add_(x) * 1.0, lambda: w.add_(n) * 1.0, lambda: torch._foreach_mul_([w, z], 2.0))
        found += tried(lambda: torch.autograd.grad((w * x + z).sum(), (w, z)))
    return found


def with_and_without_a_graph() -> list[Any]:
    """The same write: in a graph a pvary is due, or what is written into comes into that."""
    x, n, w, v, found = of("dp"), of(()), weight(), of("dp").requires_grad_(), []
    made = x * n
    for into, by in ((made * 1.0, v), (made.detach().requires_grad_(), w), (made.detach().requires_grad_(), v)):
        for _ in range(3):
            with torch.no_grad():
                for _ in range(4):
                    found.append(into.add_(by) * 1.0)
            for z in (into * 1.0, into * v, into):
                found += tried(lambda: z.add_(by), lambda: torch.autograd.grad((z * z).sum(), by), lambda: z * 1.0)
                into = into.detach().requires_grad_(into.requires_grad and into.is_leaf)
    return found


def asked_of_values() -> list[Any]:
    x, n, w, found = of("dp"), of(()), weight(), []
    for _ in range(4):
        found += tried(
            lambda: n[0].item(), lambda: x[0].item(), lambda: bool((n > 0).all()), lambda: bool((x > 0).all())
        )
        found += tried(lambda: torch.equal(n, n), lambda: torch.equal(n, x), lambda: n.tolist(), lambda: float(n[0]))
        (w * x).sum().backward()
        found += tried(lambda: w.grad, lambda: w.grad.item(), lambda: w.grad.sum().item(), lambda: w.grad.mul_(x))  # type: ignore[union-attr]
        assert (w.is_sparse, w.is_nested, w.is_quantized) == (False, False, False)
        w.grad = None
        assert w.grad is None
    n.data.add_(x)
    return found + tried(lambda: n[0].item(), lambda: n.sum().item())


def transformed() -> list[Any]:
    x, n, w, found = of("dp", 2, 4), of(()), weight(), []

    def fresh(row: Tensor) -> Tensor:
        z = row * 2.0
        z.add_(row)
        z.relu_()
        return torch.cat([z, row, z]).sum()

    for _ in range(4):
        found += tried(
            lambda: torch.vmap(fresh)(x), lambda: torch.func.grad(fresh)(n), lambda: torch.func.grad(fresh)(x[0]),
            lambda: torch._foreach_add([x], [x]), lambda: torch.func.jvp(fresh, (n,), (n,)), lambda: fresh(x[0] * w),
            lambda: torch.vmap(lambda row: torch._foreach_mul([row, row], 2.0)[1])(x),
            lambda: torch.vmap(lambda row: F.layer_norm(row, (4,), weight=w.detach(), bias=n))(x),
        )  # fmt: skip
        with torch.inference_mode():
            z = x * 2.0
            found += tried(lambda: z.add_(x) * 1, lambda: torch._foreach_mul_([z], [z]), lambda: torch.cat([z, z, z]))
    return [each.clone() if isinstance(each, Tensor) else each for each in found]


FRESH_PROGRAMS: dict[str, Callable[[], list[Any]]] = {
    each.__name__.replace("_", " "): each
    for each in (
        written_first, written_in_a_graph, told_to_write, functions_of_lists, statistics, any_number, attention, many_leaves, steps,
        flipped, with_and_without_a_graph, asked_of_values, transformed,
    )
}  # fmt: skip
