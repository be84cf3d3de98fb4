"""Every parallelism of the design's table, written with the collectives alone, against the unsharded model.

Output and gradients agree to 1e-9 in float64. Shape letters: B batch, S sequence, D width, H heads, F hidden width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

import meshcomm as mc

F64 = torch.float64
Run = Callable[..., list[Any]]


def close(actual: Tensor | None, expected: Tensor | None, what: str) -> None:
    assert actual is not None
    assert expected is not None
    assert_close(actual, expected, rtol=1e-9, atol=1e-9, msg=lambda text: f"{what}: {text}")


def random(*shape: int, seed: int) -> Tensor:
    """Equal on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def part(x: Tensor, mesh: mc.Mesh, axis: str, dim: int) -> Tensor:
    """A leaf of this rank's own: its slice."""
    return leaf(x.chunk(mesh.shape[axis], dim)[mesh.coordinate[axis]])


def close_parts(found: Tensor, whole: Tensor, mesh: mc.Mesh, axis: str, dim: int, what: str) -> None:
    close(found.grad, whole.grad.chunk(mesh.shape[axis], dim)[mesh.coordinate[axis]], f"gradient of {what}")  # type: ignore[union-attr]


# -------------------------------------------------------------------------------------------------- tensor parallel


def tensor_parallel(sequence: bool) -> None:
    """Data and tensor parallel MLP; with ``sequence`` the activations between are cut along S."""
    mesh = mc.make_mesh({"dp": 2, "tp": 2})
    x, up, bias, down, scale = (
        random(*shape, seed=i) for i, shape in enumerate([(4, 6, 8), (8, 12), (12,), (12, 8), (8,)])
    )
    target = random(4, 6, 8, seed=9)
    whole = [leaf(each) for each in (x, up, bias, down, scale)]
    hidden = F.gelu(F.layer_norm(whole[0], (8,)) * whole[4] @ whole[1] + whole[2])
    expected = F.mse_loss(hidden @ whole[3] + whole[0], target)
    expected.backward()

    with mc.use_mesh(mesh):
        rows = part(x, mesh, "dp", 0)
        w1, b1, w2 = part(up, mesh, "tp", 1), part(bias, mesh, "tp", 0), part(down, mesh, "tp", 0)
        s = leaf(scale)
        v1, b, v2 = (mc.pvary(w, "dp") for w in (w1, b1, w2))
        aim = target.chunk(2, 0)[mesh.coordinate["dp"]]
        if sequence:
            piece = mc.shard(rows, "tp", 1)
            whole_rows = mc.all_gather(F.layer_norm(piece, (8,)) * mc.pvary(s, ("dp", "tp")), "tp", 1)
            y = mc.reduce_scatter(F.gelu(whole_rows @ v1 + b) @ v2, "tp", 1) + piece
            error = (y - mc.shard(aim, "tp", 1)).square().sum()
            loss = mc.all_reduce(error, ("dp", "tp")) / target.numel()
        else:
            normed = mc.pvary(F.layer_norm(rows, (8,)) * mc.pvary(s, "dp"), "tp")
            y = mc.all_reduce(F.gelu(normed @ v1 + b) @ v2, "tp") + rows
            loss = mc.all_reduce(F.mse_loss(y, aim), "dp", "mean")
        loss.backward()
    close(loss, expected, "loss")
    close_parts(rows, whole[0], mesh, "dp", 0, "x")
    for found, original, dim, what in ((w1, whole[1], 1, "up"), (b1, whole[2], 0, "bias"), (w2, whole[3], 0, "down")):
        close_parts(found, original, mesh, "tp", dim, what)
    close(s.grad, whole[4].grad, "gradient of scale")


@pytest.mark.parametrize("sequence", [False, True], ids=["replicated", "sequence parallel"])
def test_tensor_parallel_mlp(run4: Run, sequence: bool) -> None:
    run4(tensor_parallel, sequence)


# ------------------------------------------------------------------------------------------------------ FSDP, HSDP

SHAPES = [(6, 10), (10,), (10, 3), (3,)]


def model(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    return torch.tanh(x @ w1 + b1) @ w2 + b2


def flat_parameters() -> Tensor:
    return torch.cat([random(math.prod(shape), seed=20 + i) for i, shape in enumerate(SHAPES)])


def unflatten(flat: Tensor) -> list[Tensor]:
    pieces = flat.split([math.prod(shape) for shape in SHAPES])
    return [piece.view(shape) for piece, shape in zip(pieces, SHAPES, strict=True)]


def three_steps(flat: Tensor, loss_of: Callable[[Tensor, int], Tensor], update: Callable[..., Any]) -> list[Tensor]:
    parameter = leaf(flat)
    optimizer = update([parameter])
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(parameter, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, parameter.detach()]


def adam(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


def fully_sharded(axes: dict[str, int], replica: str | None, uneven: bool) -> None:
    """One flat parameter in shards, gathered for each step; three steps of AdamW on the shards."""
    mesh = mc.make_mesh(axes)
    flat = flat_parameters()
    x, target = random(8, 6, seed=1), random(8, 3, seed=2)
    *losses, final = three_steps(flat, lambda p, step: F.mse_loss(model(x + step, *unflatten(p)), target), adam)

    n, place = mesh.shape["fsdp"], mesh.coordinate["fsdp"]
    sizes = [flat.numel() - 7 * (n - 1)] + [7] * (n - 1) if uneven else None
    padded = flat if uneven else F.pad(flat, (0, -flat.numel() % n))
    mine = padded.split(sizes if sizes else padded.numel() // n)[place]
    data = mesh.axis_names

    def loss_of(shard: Tensor, step: int) -> Tensor:
        everywhere = shard if replica is None else mc.pvary(shard, replica, mesh=mesh)
        gathered = mc.all_gather(everywhere, "fsdp", sizes=sizes, mesh=mesh)[: flat.numel()]
        rows, aim = (t.chunk(mesh.size)[mesh.rank] for t in (x + step, target))
        return mc.all_reduce(F.mse_loss(model(rows, *unflatten(gathered)), aim), data, "mean", mesh=mesh)

    *found, shard = three_steps(mine, loss_of, adam)
    for step, (loss, expected) in enumerate(zip(found, losses, strict=True)):
        close(loss, expected, f"loss of step {step}")
    final = final if uneven else F.pad(final, (0, padded.numel() - flat.numel()))
    close(shard, final.split(sizes if sizes else final.numel() // n)[place], "parameters after three steps")


@pytest.mark.parametrize(
    ("axes", "replica", "uneven"),
    [
        ({"fsdp": 4}, None, False),
        ({"fsdp": 4}, None, True),
        ({"replica": 2, "fsdp": 2}, "replica", False),
        ({"fsdp": 2, "replica": 2}, "replica", True),
        ({"replica": 4, "fsdp": 1}, "replica", False),
    ],
    ids=["FSDP", "FSDP of uneven shards", "HSDP", "HSDP of uneven shards", "DDP"],
)
def test_fsdp_and_hsdp(run4: Run, axes: dict[str, int], replica: str | None, uneven: bool) -> None:
    run4(fully_sharded, axes, replica, uneven)


def data_parallel() -> None:
    """A dict of parameters through one pvary, three steps of momentum."""
    mesh = mc.make_mesh({"dp": 4})
    params = unflatten(flat_parameters())
    x, target = random(8, 6, seed=1), random(8, 3, seed=2)

    def train(loss_of: Callable[[list[Tensor]], Tensor]) -> list[Tensor]:
        leaves = [leaf(p) for p in params]
        optimizer = torch.optim.SGD(leaves, lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(leaves).backward()
            optimizer.step()
        return leaves

    def local(leaves: list[Tensor]) -> Tensor:
        rows, aim = (t.chunk(4)[mesh.rank] for t in (x, target))
        varied = mc.pvary(dict(zip("abcd", leaves, strict=True)), "dp", mesh=mesh)
        return mc.all_reduce(F.mse_loss(model(rows, *varied.values()), aim), "dp", "mean", mesh=mesh)

    expected = train(lambda leaves: F.mse_loss(model(x, *leaves), target))
    for found, whole in zip(train(local), expected, strict=True):
        close(found, whole, "parameter after three steps")


def test_data_parallel(run4: Run) -> None:
    run4(data_parallel)


# -------------------------------------------------------------------------------------------------- context parallel


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal; ``[B, H, S, D]``."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    past = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return scores.masked_fill(~past, -math.inf).softmax(-1) @ v


def ring_attention(mesh: mc.Mesh, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Keys and values go round; the softmax is kept as (numerator, log of the denominator)."""
    n, length = mesh.shape["cp"], q.shape[-2]
    rows = torch.arange(length)
    here = mc.axis_index("cp", mesh=mesh)
    best = torch.full((*q.shape[:-1], 1), -1e30, dtype=q.dtype)
    total, weighted = torch.zeros_like(best), torch.zeros_like(q)
    for step in range(n):
        source = (here - step) % n
        visible = (here * length + rows)[:, None] >= (source * length + rows)[None, :]
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~visible, -1e30)
        top = torch.maximum(best, scores.amax(-1, keepdim=True)).detach()
        weights = (scores - top).exp() * visible
        total = total * (best - top).exp() + weights.sum(-1, keepdim=True)
        weighted = weighted * (best - top).exp() + weights @ v
        best = top
        k, v = mc.shift((k, v), "cp", mesh=mesh)
    return weighted / total


def ulysses(mesh: mc.Mesh, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Sequence shards to head shards and back."""
    q, k, v = mc.all_to_all((q, k, v), "cp", 1, 2, mesh=mesh)
    return mc.all_to_all(attention(q, k, v), "cp", 2, 1, mesh=mesh)


def context_parallel(kind: str) -> None:
    mesh = mc.make_mesh({"cp": 4})
    qkv, weight = [random(2, 4, 8, 3, seed=i) for i in range(3)], random(2, 4, 8, 3, seed=4)
    whole = [leaf(x) for x in qkv]
    expected = attention(*whole)
    (expected * weight).square().sum().backward()
    mine = [part(x, mesh, "cp", 2) for x in qkv]
    y = (ring_attention if kind == "ring" else ulysses)(mesh, *mine)
    mc.all_reduce((y * weight.chunk(4, 2)[mesh.rank]).square().sum(), "cp", mesh=mesh).backward()
    close(y, expected.chunk(4, 2)[mesh.rank], "output")
    for found, original, what in zip(mine, whole, "qkv", strict=True):
        close_parts(found, original, mesh, "cp", 2, what)


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_attention_over_a_cut_sequence(run4: Run, kind: str) -> None:
    run4(context_parallel, kind)


# --------------------------------------------------------------------------------------------------- expert parallel


def experts_unsharded(x: Tensor, router: Tensor, w: Tensor) -> Tensor:
    gate, choice = (x @ router).softmax(-1).max(-1)
    return gate[:, None] * torch.einsum("td,tdf->tf", x, w[choice]).tanh()


def expert_parallel() -> None:
    """Tokens go to the rank of their expert, however many choose it, and come back in their order. One expert gets none."""
    mesh = mc.make_mesh({"ep": 4})
    n, rank = 4, mesh.rank
    x, router, w = random(20, 5, seed=1), random(5, 4, seed=2), random(4, 5, 5, seed=3)
    x[:, 0] = x[:, 0].abs() + 1
    router[0, 2] = -50.0  # nobody chooses expert 2
    whole = [leaf(t) for t in (x, router, w)]
    expected = experts_unsharded(*whole)
    expected.square().sum().backward()

    mine, gates, expert = part(x, mesh, "ep", 0), leaf(router), leaf(w[rank])
    gate, choice = (mine @ mc.pvary(gates, "ep", mesh=mesh)).softmax(-1).max(-1)
    order = choice.argsort(stable=True)
    send = torch.bincount(choice, minlength=n)
    recv = mc.all_to_all(send, "ep", 0, 0, mesh=mesh)
    sizes = send.tolist(), recv.tolist()
    tokens = mc.all_to_all(mine[order], "ep", 0, 0, *sizes, mesh=mesh)
    assert tokens.shape[0] == int(recv.sum())
    assert (tokens.shape[0] == 0) == (rank == 2)
    back = mc.all_to_all((tokens @ expert).tanh(), "ep", 0, 0, *sizes[::-1], mesh=mesh)
    y = gate[:, None] * torch.zeros_like(back).index_copy(0, order, back)
    mc.all_reduce(y.square().sum(), "ep", mesh=mesh).backward()
    close(y, expected.chunk(4)[rank], "output")
    close_parts(mine, whole[0], mesh, "ep", 0, "x")
    close(gates.grad, whole[1].grad, "gradient of the router")
    close(expert.grad, whole[2].grad[rank], "gradient of the expert")  # type: ignore[index]


def test_mixture_of_experts(run4: Run) -> None:
    run4(expert_parallel)


# ---------------------------------------------------------------------------------------------------------- pipeline


def pipeline() -> None:
    """Four stages, three microbatches, one program: what a stage computes outside of its turn is masked out."""
    mesh = mc.make_mesh({"pp": 4})
    n, micro = 4, 3
    x, w, target = random(micro, 2, 5, seed=1), random(n, 5, 5, seed=2), random(micro, 2, 5, seed=3)
    whole = [leaf(x), leaf(w)]
    state = whole[0]
    for stage in range(n):
        state = (state @ whole[1][stage]).tanh()
    expected = F.mse_loss(state, target)
    expected.backward()

    first, stage_weight = leaf(x), leaf(w[mesh.rank])
    here = mc.axis_index("pp", mesh=mesh)
    feed = mc.pvary(first, "pp", mesh=mesh)
    carried, loss = torch.zeros(2, 5, dtype=F64), torch.zeros((), dtype=F64)
    for step in range(micro + n - 1):
        coming = torch.where(here == 0, feed[min(step, micro - 1)], carried)
        out = (coming @ stage_weight).tanh()
        done = step - (n - 1)
        if done >= 0:
            loss = loss + torch.where(here == n - 1, F.mse_loss(out, target[done]), 0)
        carried = mc.shift(out, "pp", wrap=False, mesh=mesh)
    total = mc.all_reduce(loss, "pp", mesh=mesh) / micro
    total.backward()
    close(total, expected, "loss")
    close(first.grad, whole[0].grad, "gradient of x")
    close(stage_weight.grad, whole[1].grad[mesh.rank], "gradient of the stage")  # type: ignore[index]


def test_pipeline(run4: Run) -> None:
    run4(pipeline)


# --------------------------------------------------------------------------------------------------- losses and norms


def vocabulary_parallel() -> None:
    """Cross entropy of logits that are cut along V, uneven, with rows cut along dp."""
    mesh = mc.make_mesh({"dp": 2, "tp": 2})
    x, w = random(6, 5, seed=1), random(5, 9, seed=2)
    ids = torch.randint(0, 9, (6,), generator=torch.Generator().manual_seed(3))
    whole = [leaf(x), leaf(w)]
    expected = F.cross_entropy(whole[0] @ whole[1], ids)
    expected.backward()

    sizes, place = [4, 5], mesh.coordinate["tp"]
    start = sum(sizes[:place])
    rows, columns = part(x, mesh, "dp", 0), leaf(w.split(sizes, 1)[place])
    aim = ids.chunk(2)[mesh.coordinate["dp"]]
    with mc.use_mesh(mesh):
        logits = mc.pvary(rows, "tp") @ mc.pvary(columns, "dp")
        top = mc.all_reduce(logits.detach().amax(-1), "tp", "max")
        total = mc.all_reduce((logits - mc.pvary(top, "tp")[:, None]).exp().sum(-1), "tp").log() + top
        inside = (aim >= start) & (aim < start + sizes[place])
        picked = logits.gather(1, (aim - start).clamp(0, sizes[place] - 1)[:, None])[:, 0]
        chosen = mc.all_reduce(torch.where(inside, picked, 0), "tp")
        loss = mc.all_reduce((total - chosen).mean(), "dp", "mean")
    loss.backward()
    close(loss, expected, "loss")
    close_parts(rows, whole[0], mesh, "dp", 0, "x")
    close(columns.grad, whole[1].grad.split(sizes, 1)[place], "gradient of the vocabulary")  # type: ignore[union-attr]


def test_vocabulary_parallel_cross_entropy(run4: Run) -> None:
    run4(vocabulary_parallel)


def sync_batch_norm() -> None:
    """Statistics over all ranks' rows, of which each has another number, and through their gradients."""
    mesh = mc.make_mesh({"dp": 4})
    x, scale, bias, weight = random(14, 3, seed=1), random(3, seed=2), random(3, seed=3), random(14, 3, seed=4)
    whole = [leaf(t) for t in (x, scale, bias)]
    expected = F.batch_norm(whole[0], None, None, whole[1], whole[2], training=True)
    (expected * weight).sin().sum().backward()

    counts = [5, 2, 4, 3]
    rows = leaf(x.split(counts)[mesh.rank])
    s, b = leaf(scale), leaf(bias)
    with mc.use_mesh(mesh):
        sums = mc.all_reduce(
            torch.cat([rows.sum(0), rows.square().sum(0), torch.tensor([float(len(rows))], dtype=F64)]), "dp"
        )
        count = sums[-1]
        mean = sums[:3] / count
        var = sums[3:6] / count - mean.square()
        mean, inverse, s_, b_ = mc.pvary((mean, (var + 1e-5).rsqrt(), s, b), "dp")
        y = (rows - mean) * inverse * s_ + b_
        mc.all_reduce((y * weight.split(counts)[mesh.rank]).sin().sum(), "dp").backward()
    close(y, expected.split(counts)[mesh.rank], "output")
    close(rows.grad, whole[0].grad.split(counts)[mesh.rank], "gradient of x")  # type: ignore[union-attr]
    close(s.grad, whole[1].grad, "gradient of scale")
    close(b.grad, whole[2].grad, "gradient of bias")


def test_sync_batch_norm(run4: Run) -> None:
    run4(sync_batch_norm)


def clipping() -> None:
    """The norm over a sharded and a replicated parameter: each element once; then the clipped gradients."""
    mesh = mc.make_mesh({"dp": 2, "tp": 2})
    x, w1, w2 = random(4, 6, seed=1), random(6, 8, seed=2), random(8, 3, seed=3)
    whole = [leaf(w1), leaf(w2)]
    (x @ whole[0]).tanh().matmul(whole[1]).square().sum().backward()
    expected = torch.nn.utils.clip_grad_norm_(whole, 0.5)

    up, down = part(w1, mesh, "tp", 1), leaf(w2)
    with mc.use_mesh(mesh):
        rows = x.chunk(2)[mesh.coordinate["dp"]]
        hidden = (rows @ mc.pvary(up, "dp")).tanh()  # rows are the same along tp and need no gradient
        y = mc.all_reduce(hidden @ mc.shard(mc.pvary(down, "dp"), "tp", 0), "tp")
        mc.all_reduce(y.square().sum(), "dp").backward()
        assert up.grad is not None
        assert down.grad is not None
        norm = (mc.all_reduce(up.grad.square().sum(), "tp") + down.grad.square().sum()).sqrt()
    for parameter in (up, down):
        parameter.grad *= (0.5 / (norm + 1e-6)).clamp(max=1)
    close(norm, expected, "norm")
    close_parts(up, whole[0], mesh, "tp", 1, "up")
    close(down.grad, whole[1].grad, "gradient of down")


def test_clipping_by_the_global_norm(run4: Run) -> None:
    run4(clipping)


# ------------------------------------------------------------------------------------------------------ all together


def transformer() -> None:
    """A causal block on 8 ranks with data, context and tensor axes at once: q, k and v by heads along tp, S along cp, B along dp."""
    mesh = mc.make_mesh({"dp": 2, "cp": 2, "tp": 2})
    b, s, d, h = 2, 6, 8, 4
    x, target = random(b, s, d, seed=1), random(b, s, d, seed=2)
    shapes = {"qkv": (d, 3, h, d // h), "out": (h, d // h, d), "up": (d, 16), "down": (16, d)}
    weights = {name: random(*shape, seed=3 + i) for i, (name, shape) in enumerate(shapes.items())}

    def heads(x: Tensor, w: Tensor) -> list[Tensor]:
        return list(torch.einsum("bsd,dkhe->kbhse", x, w).unbind())

    whole = {name: leaf(w) for name, w in weights.items()}
    y = x + torch.einsum("bhse,hed->bsd", attention(*heads(F.layer_norm(x, (d,)), whole["qkv"])), whole["out"])
    y = y + F.gelu(F.layer_norm(y, (d,)) @ whole["up"]) @ whole["down"]
    expected = F.mse_loss(y, target)
    expected.backward()

    dims = {"qkv": 2, "out": 0, "up": 1, "down": 0}
    mine = {name: part(w, mesh, "tp", dims[name]) for name, w in weights.items()}
    with mc.use_mesh(mesh):
        w = mc.pvary(mine, ("dp", "cp"))
        rows, aim = (t.chunk(2)[mesh.coordinate["dp"]].chunk(2, 1)[mesh.coordinate["cp"]] for t in (x, target))
        mixed = ring_attention(mesh, *heads(F.layer_norm(rows, (d,)), w["qkv"]))
        y = rows + mc.all_reduce(torch.einsum("bhse,hed->bsd", mixed, w["out"]), "tp")
        hidden = F.gelu(mc.pvary(F.layer_norm(y, (d,)), "tp") @ w["up"])
        y = y + mc.all_reduce(hidden @ w["down"], "tp")
        loss = mc.all_reduce(F.mse_loss(y, aim), ("cp", "dp"), "mean")
        loss.backward()
    close(loss, expected, "loss")
    for name, found in mine.items():
        close_parts(found, whole[name], mesh, "tp", dims[name], name)


def test_a_block_with_three_axes() -> None:
    mc.launch(transformer, ranks=8)
