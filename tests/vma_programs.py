"""Parallel programs as an expert writes them, each beside the same function of whole tensors.

Every ``pvary`` goes through the parameter ``pv``, so that it can be left out. Shape letters: B batch, S sequence, D width,
H heads, E width of a head, F hidden width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import meshcomm as mc

__all__ = ["BY_NAME", "PROGRAMS", "Program", "Tree", "Vary", "draw"]

F64 = torch.float64
Tree = TypeVar("Tree")
Global = Callable[..., Any]


class Vary(Protocol):
    """``mc.pvary``, or what stands for it."""

    def __call__(self, x: Tree, axis: Any, /) -> Tree:
        """``x``, varying along ``axis`` too."""


@dataclass(frozen=True)
class Program:
    """One program, and what is known of it."""

    name: str
    axes: dict[str, int]
    make: Callable[[Vary, Any], Global]
    """``make(pv, check_vma)`` gives a function of global tensors."""
    whole: Global
    """The same function without a mesh."""
    inputs: Callable[[], tuple[Any, ...]]
    """New arguments: tensors, trees of them and modules; what requires grad shall be differentiated."""
    lacks: tuple[str, ...] = ()
    """Without ``pv``, the axes that operands lack where they first meet what varies; none where no ``pv`` is needed."""
    on_ranks: bool = False
    """It runs on ranks only, with ``backward()``: torch refuses ``torch.autograd.grad`` for what is in it."""
    once: bool = False
    """Torch has no second derivative of what is in it."""

    @property
    def needs_pvary(self) -> bool:
        """Whether the expert's version contains ``pv`` at all."""
        return bool(self.lacks)


PROGRAMS: list[Program] = []
Make = Callable[[Vary, Any], Global]


def program(
    axes: dict[str, int],
    whole: Global,
    inputs: Callable[[], tuple[Any, ...]],
    lacks: tuple[str, ...] | str = (),
    *,
    on_ranks: bool = False,
    once: bool = False,
) -> Callable[[Make], Make]:
    """Registers a ``make``."""

    def register(make: Make) -> Make:
        missing = (lacks,) if isinstance(lacks, str) else lacks
        PROGRAMS.append(Program(make.__name__, axes, make, whole, inputs, missing, on_ranks, once))
        return make

    return register


def mapped(axes: dict[str, int], in_specs: Any, out_specs: Any, check_vma: Any) -> Callable[[Global], Global]:
    decorate: Callable[[Global], Global] = mc.shard_map(
        mesh=mc.make_mesh(axes), in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
    )
    return decorate


def draw(*shape: int, seed: int = 0, grad: bool = True) -> Tensor:
    """Equal in every process; of the size that keeps activations about 1."""
    generator = torch.Generator().manual_seed(1000 * seed + 31 * len(shape) + sum(shape))
    x = torch.randn(shape, dtype=F64, generator=generator)
    if len(shape) > 1:
        x = x / math.sqrt(shape[-1])
    return x.requires_grad_(grad)


def integers(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


LINE, GRID, CUBE = {"tp": 4}, {"dp": 2, "tp": 2}, {"dp": 2, "cp": 2, "tp": 2}
ROWS = "(dp b) d"


def normed(x: Tensor, scale: Tensor | None = None) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], scale)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal; ``[B, H, S, E]``."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    past = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return scores.masked_fill(~past, -1e30).softmax(-1) @ v


# ---------------------------------------------------------------------------------------------------- tensor parallel


def mlp_whole(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor) -> Tensor:
    return F.gelu(x @ w1 + b1) @ w2


@program(GRID, mlp_whole, lambda: (draw(4, 6), draw(6, 8), draw(8), draw(8, 6)), ("dp", "tp"))
def column_and_row_parallel_mlp(pv: Vary, check_vma: Any) -> Global:
    @mapped(GRID, (ROWS, "d (tp f)", "(tp f)", "(tp f) d"), ROWS, check_vma)
    def mlp(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor) -> Tensor:
        w1, b1, w2 = pv((w1, b1, w2), "dp")
        return mc.all_reduce(F.gelu(pv(x, "tp") @ w1 + b1) @ w2, "tp")

    return mlp


def residual_whole(x: Tensor, w1: Tensor, w2: Tensor, bias: Tensor) -> Tensor:
    for _ in range(2):
        x = x + (torch.tanh(normed(x) @ w1) @ w2 + bias)
    return x


@program(GRID, residual_whole, lambda: (draw(4, 6), draw(6, 8), draw(8, 6), draw(6)), ("dp", "tp"))
def residual_stream_with_a_row_parallel_bias(pv: Vary, check_vma: Any) -> Global:
    """The bias is added once, after the sum over tp."""

    @mapped(GRID, (ROWS, "d (tp f)", "(tp f) d", "d"), ROWS, check_vma)
    def blocks(x: Tensor, w1: Tensor, w2: Tensor, bias: Tensor) -> Tensor:
        w1, w2, bias = pv((w1, w2, bias), "dp")
        for _ in range(2):
            hidden = torch.tanh(pv(normed(x), "tp") @ w1)
            x = x + (mc.all_reduce(hidden @ w2, "tp") + bias)
        return x

    return blocks


def sequence_whole(x: Tensor, scale: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    return F.gelu(normed(x, scale) @ w1) @ w2 + x


@program(LINE, sequence_whole, lambda: (draw(2, 8, 6), draw(6), draw(6, 8), draw(8, 6)), "tp")
def sequence_parallel_mlp(pv: Vary, check_vma: Any) -> Global:
    """The norm's weight is replicated and meets a cut sequence."""

    @mapped(LINE, ("b (tp s) d", "d", "d (tp f)", "(tp f) d"), "b (tp s) d", check_vma)
    def mlp(x: Tensor, scale: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        rows = mc.all_gather(normed(x, pv(scale, "tp")), "tp", 1)
        return mc.reduce_scatter(F.gelu(rows @ w1) @ w2, "tp", 1) + x

    return mlp


def gathered_whole(x: Tensor, w: Tensor, bias: Tensor, head: Tensor) -> Tensor:
    return torch.tanh(x @ w + bias) @ head


@program(LINE, gathered_whole, lambda: (draw(3, 6), draw(6, 8), draw(8), draw(8, 4)), "tp")
def column_parallel_with_gathered_output(pv: Vary, check_vma: Any) -> Global:
    """What is gathered is one value, which meets cut weights again."""

    @mapped(LINE, ("b d", "d (tp f)", "f", "f (tp v)"), "b (tp v)", check_vma)
    def two_layers(x: Tensor, w: Tensor, bias: Tensor, head: Tensor) -> Tensor:
        hidden = mc.all_gather_invariant(pv(x, "tp") @ w, "tp", 1)
        return pv(torch.tanh(hidden + bias), "tp") @ head

    return two_layers


def attention_whole(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor) -> Tensor:
    y = normed(x)
    q, k, v = (torch.einsum("bsd,dhe->bhse", y, w) for w in (wq, wk, wv))
    return x + torch.einsum("bhse,hed->bsd", attend(q, k, v), wo)


def attention_inputs() -> tuple[Tensor, ...]:
    return draw(4, 5, 8), *(draw(8, 4, 2, seed=i) for i in range(3)), draw(4, 2, 8)


@program(GRID, attention_whole, attention_inputs, ("dp", "tp"))
def attention_with_heads_over_tp(pv: Vary, check_vma: Any) -> Global:
    """q, k and v come from one activation, whose gradient is summed over tp once."""
    heads = "d (tp h) e"

    @mapped(GRID, ("(dp b) s d", heads, heads, heads, "(tp h) e d"), "(dp b) s d", check_vma)
    def attention(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor) -> Tensor:
        wq, wk, wv, wo = pv((wq, wk, wv, wo), "dp")
        y = pv(normed(x), "tp")
        q, k, v = (torch.einsum("bsd,dhe->bhse", y, w) for w in (wq, wk, wv))
        return x + mc.all_reduce(torch.einsum("bhse,hed->bsd", attend(q, k, v), wo), "tp")

    return attention


def grouped_whole(x: Tensor, wq: Tensor, wkv: Tensor, wo: Tensor) -> Tensor:
    q = torch.einsum("bsd,dhe->bhse", x, wq)
    k, v = torch.einsum("bsd,dnhe->nbhse", x, wkv)
    repeats = q.shape[1] // k.shape[1]
    seen = attend(q, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1))
    return torch.einsum("bhse,hed->bsd", seen, wo)


@program(GRID, grouped_whole, lambda: (draw(4, 3, 8), draw(8, 4, 2), draw(8, 2, 2, 2), draw(4, 2, 8)), ("dp", "tp"))
def grouped_query_attention(pv: Vary, check_vma: Any) -> Global:
    """Two groups of two heads: a group per rank of tp."""

    @mapped(GRID, ("(dp b) s d", "d (tp h) e", "d n (tp h) e", "(tp h) e d"), "(dp b) s d", check_vma)
    def attention(x: Tensor, wq: Tensor, wkv: Tensor, wo: Tensor) -> Tensor:
        wq, wkv, wo = pv((wq, wkv, wo), "dp")
        return mc.all_reduce(grouped_whole(pv(x, "tp"), wq, wkv, wo), "tp")

    return attention


@program(LINE, grouped_whole, lambda: (draw(2, 3, 8), draw(8, 4, 2), draw(8, 2, 1, 2), draw(4, 2, 8)), "tp")
def multi_query_attention(pv: Vary, check_vma: Any) -> Global:
    """The one head of k and v is computed by every rank, alike, and then meets each rank's own heads of q."""

    @mapped(LINE, ("b s d", "d (tp h) e", "d n h e", "(tp h) e d"), "b s d", check_vma)
    def attention(x: Tensor, wq: Tensor, wkv: Tensor, wo: Tensor) -> Tensor:
        q = torch.einsum("bsd,dhe->bhse", pv(x, "tp"), wq)
        k, v = torch.einsum("bsd,dnhe->nbhse", x, wkv)
        seen = attend(q, pv(k, "tp"), pv(v, "tp"))
        return mc.all_reduce(torch.einsum("bhse,hed->bsd", seen, wo), "tp")

    return attention


def recurrent_whole(xs: Tensor, w_in: Tensor, w_state: Tensor, w_out: Tensor) -> Tensor:
    states, state = [], torch.zeros(xs.shape[1], w_out.shape[1], dtype=F64)
    for x in xs:
        states.append(torch.tanh(x @ w_in + state @ w_state))
        state = states[-1] @ w_out
    return torch.stack(states)


@program(LINE, recurrent_whole, lambda: (draw(3, 2, 5), draw(5, 8), draw(6, 8), draw(8, 6)), "tp")
def writes_into_a_buffer(pv: Vary, check_vma: Any) -> Global:
    """A recurrent layer that writes its hidden states, which are cut over tp, into a buffer of zeros."""

    @mapped(LINE, ("s b d", "d (tp f)", "e (tp f)", "(tp f) e"), "s b (tp f)", check_vma)
    def layer(xs: Tensor, w_in: Tensor, w_state: Tensor, w_out: Tensor) -> Tensor:
        given = pv(xs, "tp") @ w_in
        states = torch.zeros(*xs.shape[:2], w_in.shape[1], dtype=F64)
        state = torch.zeros(xs.shape[1], w_out.shape[1], dtype=F64)
        for step in range(len(xs)):
            states[step] = given[step]
            states[step] += pv(state, "tp") @ w_state
            states[step] = torch.tanh(states[step])
            state = mc.all_reduce(states[step].clone() @ w_out, "tp")
        return states

    return layer


class Parallel(nn.Module):
    """A stack of column- and row-parallel layers that says ``pv`` itself."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.up, self.down = (
            nn.ParameterList(nn.Parameter(draw(*shape, seed=i).detach()) for i in range(depth))
            for shape in ((6, 8), (8, 6))
        )
        self.scale = nn.Parameter(draw(6).detach())

    def forward(self, x: Tensor, pv: Vary | None = None) -> Tensor:
        scale = self.scale if pv is None else pv(self.scale, "dp")
        for up, down in zip(self.up, self.down, strict=True):
            y = normed(x, scale)
            if pv is None:
                x = x + torch.tanh(y @ up) @ down
            else:
                up, down = mc.shard(pv(up, "dp"), "tp", 1), mc.shard(pv(down, "dp"), "tp", 0)
                x = x + mc.all_reduce(torch.tanh(pv(y, "tp") @ up) @ down, "tp")
        return x


@program(GRID, lambda model, x: model(x), lambda: (Parallel(), draw(4, 6)), ("dp", "tp"))
def module_closed_over(pv: Vary, check_vma: Any) -> Global:
    """Its parameters are reached through the closure, whole on every rank, and cut inside."""

    def run(model: Parallel, x: Tensor) -> Any:
        return mapped(GRID, ROWS, ROWS, check_vma)(lambda x: model(x, pv))(x)

    return run


# ---------------------------------------------------------------------------------------- data parallel, fully sharded


def loss_whole(params: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
    hidden = torch.tanh(x @ params["w1"] + params["b1"])
    return F.mse_loss(hidden @ params["w2"] + params["b2"], target)


def loss_inputs() -> tuple[Any, ...]:
    params = {"w1": draw(6, 8), "b1": draw(8), "w2": draw(8, 4), "b2": draw(4)}
    return params, draw(8, 6, grad=False), draw(8, 4, grad=False)


@program({"dp": 4}, loss_whole, loss_inputs, "dp")
def data_parallel(pv: Vary, check_vma: Any) -> Global:
    @mapped({"dp": 4}, ("...", ROWS, ROWS), "", check_vma)
    def loss(params: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
        return mc.all_reduce(loss_whole(pv(params, "dp"), x, target), "dp", op="mean")

    return loss


@program(GRID, loss_whole, loss_inputs, ("dp", "tp"))
def data_parallel_over_two_axes(pv: Vary, check_vma: Any) -> Global:
    rows = "(dp tp b) d"

    @mapped(GRID, ("...", rows, rows), "", check_vma)
    def loss(params: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
        return mc.all_reduce(loss_whole(pv(params, ("dp", "tp")), x, target), ("dp", "tp"), op="mean")

    return loss


@program({"dp": 2, "tp": 2}, loss_whole, loss_inputs, ("dp", "tp"))
def data_and_tensor_parallel(pv: Vary, check_vma: Any) -> Global:
    """A whole training loss: the last bias is added once."""
    specs = {"w1": "d (tp f)", "b1": "(tp f)", "w2": "(tp f) d", "b2": "d"}

    @mapped(GRID, (specs, ROWS, ROWS), "", check_vma)
    def loss(params: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
        p = pv(params, "dp")
        hidden = torch.tanh(pv(x, "tp") @ p["w1"] + p["b1"])
        y = mc.all_reduce(hidden @ p["w2"], "tp") + p["b2"]
        return mc.all_reduce(F.mse_loss(y, target), "dp", op="mean")

    return loss


FSDP = {"w1": "(fsdp d) f", "b1": "(fsdp f)", "w2": "(fsdp f) d", "b2": "(fsdp d)"}


@program({"fsdp": 4}, loss_whole, lambda: (with_wide_input(), draw(8, 8, grad=False), draw(8, 4, grad=False)))
def fully_sharded(pv: Vary, check_vma: Any) -> Global:
    """Shards and rows both vary along the axis: nothing is replicated."""
    rows = "(fsdp b) d"

    @mapped({"fsdp": 4}, (FSDP, rows, rows), "", check_vma)
    def loss(params: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
        return mc.all_reduce(loss_whole(mc.all_gather(params, "fsdp"), x, target), "fsdp", op="mean")

    return loss


def with_wide_input() -> dict[str, Tensor]:
    return {"w1": draw(8, 8), "b1": draw(8), "w2": draw(8, 4), "b2": draw(4)}


@program(
    {"replica": 2, "fsdp": 2}, loss_whole, lambda: (with_wide_input(), draw(8, 8, grad=False), draw(8, 4, grad=False)), "replica"
)  # fmt: skip
def hybrid_sharded(pv: Vary, check_vma: Any) -> Global:
    axes, rows = {"replica": 2, "fsdp": 2}, "(replica fsdp b) d"

    @mapped(axes, (FSDP, rows, rows), "", check_vma)
    def loss(params: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
        p = {name: mc.all_gather(shard, "fsdp") for name, shard in pv(params, "replica").items()}
        return mc.all_reduce(loss_whole(p, x, target), ("replica", "fsdp"), op="mean")

    return loss


def scaled_whole(x: Tensor, scale: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    y = normed(x, scale)
    return (y + torch.tanh(y @ w1) @ w2).square().mean()


@program({"fsdp": 2, "tp": 2}, scaled_whole, lambda: (draw(4, 6), draw(6), draw(6, 8), draw(8, 6)), "fsdp")
def fully_sharded_and_tensor_parallel(pv: Vary, check_vma: Any) -> Global:
    axes = {"fsdp": 2, "tp": 2}

    @mapped(axes, ("(fsdp b) d", "d", "(fsdp d) (tp f)", "(tp f) (fsdp d)"), "", check_vma)
    def loss(x: Tensor, scale: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        w1, w2 = mc.all_gather(w1, "fsdp"), mc.all_gather(w2, "fsdp", 1)
        y = normed(x, pv(scale, "fsdp"))
        y = y + mc.all_reduce(torch.tanh(pv(y, "tp") @ w1) @ w2, "tp")
        return mc.all_reduce(y.square().mean(), "fsdp", op="mean")

    return loss


def layers_whole(x: Tensor, weights: list[Tensor], scale: Tensor) -> Tensor:
    x = normed(x, scale)
    for w in weights:
        x = x + torch.tanh(x @ w)
    return x


@program({"fsdp": 4}, layers_whole, lambda: (draw(8, 8), [draw(8, 8, seed=i) for i in range(3)], draw(8)), "fsdp")
def fully_sharded_with_prefetch(pv: Vary, check_vma: Any) -> Global:
    """The next layer is under way while one is computed; the norm's weight is too small to be cut."""

    @mapped({"fsdp": 4}, ("(fsdp b) d", "(fsdp d) f", "d"), "(fsdp b) d", check_vma)
    def layers(x: Tensor, shards: list[Tensor], scale: Tensor) -> Tensor:
        x = normed(x, pv(scale, "fsdp"))
        coming = mc.all_gather(shards[0], "fsdp", async_op=True)
        for after in [*shards[1:], None]:
            w = coming.wait()
            if after is not None:
                coming = mc.all_gather(after, "fsdp", async_op=True)
            x = x + torch.tanh(x @ w)
        return x

    return layers


@program({"dp": 4}, lambda ws, x: x @ ws[0], lambda: (draw(4, 5, 3), draw(8, 5)), "dp")
def broadcast_of_a_parameter(pv: Vary, check_vma: Any) -> Global:
    """Every rank has drawn its own; that of the first is used."""

    @mapped({"dp": 4}, ("(dp n) d e", ROWS), "(dp b) e", check_vma)
    def layer(ws: Tensor, x: Tensor) -> Tensor:
        return x @ pv(mc.broadcast(ws[0], "dp"), "dp")

    return layer


def known(model: nn.Module) -> nn.Module:
    """The same in every process."""
    model.to(F64)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(draw(*p.shape, seed=i))
    return model


def called(model: nn.Module, x: Tensor) -> Any:
    return model(x)


def of_rows(pv: Vary, check_vma: Any) -> Global:
    """A module that knows nothing of meshes, on rows of a batch, which stand first."""

    def run(model: nn.Module, x: Tensor) -> Any:
        def forward(x: Tensor) -> Any:
            params: dict[str, Tensor] = pv(dict(model.named_parameters()), "dp")
            return functional_call(model, params, (x,))

        return mapped({"dp": 4}, "(dp b) ...", "(dp b) ...", check_vma)(forward)(x)

    return run


def perceptron() -> nn.Module:
    return known(nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4)))


@program({"dp": 4}, called, lambda: (perceptron(), draw(8, 6)), "dp")
def perceptron_through_functional_call(pv: Vary, check_vma: Any) -> Global:
    return of_rows(pv, check_vma)


def convolutions() -> nn.Module:
    layers = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 1)
    return known(nn.Sequential(*layers))


@program({"dp": 4}, called, lambda: (convolutions(), draw(4, 2, 4, 4)), "dp")
def convolutions_through_functional_call(pv: Vary, check_vma: Any) -> Global:
    """With an activation in place."""
    return of_rows(pv, check_vma)


class Recurrent(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y: Tensor = super().forward(x)[0]
        return y


@program({"dp": 4}, called, lambda: (known(Recurrent(3, 4, 2, batch_first=True)), draw(4, 3, 3)), "dp")
def lstm_through_functional_call(pv: Vary, check_vma: Any) -> Global:
    """One fused function with a list of parameters."""
    return of_rows(pv, check_vma)


def encoder() -> nn.Module:
    return known(nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True, norm_first=True))


@program({"dp": 4}, called, lambda: (encoder(), draw(4, 3, 8)), "dp", once=True)
def encoder_through_functional_call(pv: Vary, check_vma: Any) -> Global:
    """torch's own attention."""
    return of_rows(pv, check_vma)


def stacked_whole(x: Tensor, w: Tensor) -> Tensor:
    q, k, v = (x @ each for each in w.unbind())
    return attend(q, k, v)


@program({"dp": 4}, stacked_whole, lambda: (draw(4, 2, 3, 6), draw(3, 2, 6, 4)), "dp")
def weights_stacked_in_one(pv: Vary, check_vma: Any) -> Global:
    """pvary of the stack is one all_reduce; inserted where the weights are used, it is one for each of the three."""
    heads = "(dp b) h s d"

    @mapped({"dp": 4}, (heads, "..."), heads, check_vma)
    def attention(x: Tensor, w: Tensor) -> Tensor:
        return stacked_whole(x, pv(w, "dp"))

    return attention


# ---------------------------------------------------------------------------------------------------- context parallel


def ring(q: Tensor, k: Tensor, v: Tensor, axis: str) -> Tensor:
    """Causal attention with keys and values that go round, and a softmax in pieces."""
    n, length = mc.axis_size(axis), q.shape[-2]
    rows, here = torch.arange(length), mc.axis_index(axis)
    best = torch.full((*q.shape[:-1], 1), -1e30, dtype=F64)
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
        if step < n - 1:
            k, v = mc.shift((k, v), axis)
    return weighted / total


@program({"cp": 4}, attention_whole, lambda: (draw(2, 8, 8), *attention_inputs()[1:]), "cp")
def ring_attention(pv: Vary, check_vma: Any) -> Global:
    @mapped({"cp": 4}, ("b (cp s) d", "...", "...", "...", "..."), "b (cp s) d", check_vma)
    def attention(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor) -> Tensor:
        wq, wk, wv, wo = pv((wq, wk, wv, wo), "cp")
        q, k, v = (torch.einsum("bsd,dhe->bhse", normed(x), w) for w in (wq, wk, wv))
        return x + torch.einsum("bhse,hed->bsd", ring(q, k, v, "cp"), wo)

    return attention


@program({"cp": 4}, attention_whole, lambda: (draw(2, 8, 8), *attention_inputs()[1:]), "cp")
def ulysses_by_all_to_all(pv: Vary, check_vma: Any) -> Global:
    @mapped({"cp": 4}, ("b (cp s) d", "...", "...", "...", "..."), "b (cp s) d", check_vma)
    def attention(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor) -> Tensor:
        wq, wk, wv, wo = pv((wq, wk, wv, wo), "cp")
        q, k, v = mc.all_to_all([torch.einsum("bsd,dhe->bhse", normed(x), w) for w in (wq, wk, wv)], "cp", 1, 2)
        return x + torch.einsum("bhse,hed->bsd", mc.all_to_all(attend(q, k, v), "cp", 2, 1), wo)

    return attention


@program(GRID, attention_whole, lambda: (draw(2, 8, 8), *attention_inputs()[1:]), ("dp", "tp"))
def ulysses_by_reshard(pv: Vary, check_vma: Any) -> Global:
    """The same in notation, on a mesh with data parallelism: the sequence is cut over tp, then the heads."""

    @mapped(GRID, ("(dp b) (tp s) d", "...", "...", "...", "..."), "(dp b) (tp s) d", check_vma)
    def attention(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor) -> Tensor:
        wq, wk, wv, wo = pv((wq, wk, wv, wo), ("dp", "tp"))
        heads = (torch.einsum("bsd,dhe->bhse", normed(x), w) for w in (wq, wk, wv))
        q, k, v = (mc.reshard(y, "b h (tp s) e -> b (tp h) s e") for y in heads)
        seen = mc.reshard(attend(q, k, v), "b (tp h) s e -> b h (tp s) e")
        return x + torch.einsum("bhse,hed->bsd", seen, wo)

    return attention


def decoding_whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


@program({"cp": 4}, decoding_whole, lambda: (draw(2, 3, 1, 4), draw(2, 3, 8, 4), draw(2, 3, 8, 4, seed=1)), "cp")
def decoding_with_a_cut_cache(pv: Vary, check_vma: Any) -> Global:
    """One query, the same everywhere, against keys and values cut along the sequence."""

    @mapped({"cp": 4}, ("b h s e", "b h (cp s) e", "b h (cp s) e"), "b h s e", check_vma)
    def decode(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = pv(q, "cp") @ k.mT
        top = mc.all_reduce(scores.detach().amax(-1, keepdim=True), "cp", op="max")
        weights = (scores - pv(top, "cp")).exp()
        return mc.all_reduce(weights @ v, "cp") / mc.all_reduce(weights.sum(-1, keepdim=True), "cp")

    return decode


def pooled_whole(x: Tensor, w: Tensor, head: Tensor) -> Tensor:
    return torch.tanh(x @ w).amax(1) @ head


@program({"cp": 4}, pooled_whole, lambda: (draw(2, 8, 5), draw(5, 6), draw(6, 3)), "cp")
def max_pooling_over_a_cut_sequence(pv: Vary, check_vma: Any) -> Global:
    @mapped({"cp": 4}, ("b (cp s) d", "d f", "f v"), "b v", check_vma)
    def pooled(x: Tensor, w: Tensor, head: Tensor) -> Tensor:
        return mc.all_reduce(torch.tanh(x @ pv(w, "cp")).amax(1), "cp", op="max") @ head

    return pooled


def prefix_whole(x: Tensor, w: Tensor) -> Tensor:
    return torch.cumsum(torch.tanh(x * w), 1)


@program({"cp": 4}, prefix_whole, lambda: (draw(2, 8, 3), draw(3)), "cp")
def prefix_sums_by_shifts(pv: Vary, check_vma: Any) -> Global:
    """Sums of the ranks before, in as many steps as the logarithm of their number."""

    @mapped({"cp": 4}, ("b (cp s) d", "d"), "b (cp s) d", check_vma)
    def prefix(x: Tensor, w: Tensor) -> Tensor:
        own = torch.cumsum(torch.tanh(x * pv(w, "cp")), 1)
        before = total = own[:, -1:]
        offset = 1
        while offset < mc.axis_size("cp"):
            before = before + mc.shift(before, "cp", offset, wrap=False)
            offset *= 2
        return own + (before - total)

    return prefix


def convolution_whole(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return F.conv1d(F.pad(x, (2, 0)), w, bias)


@program({"cp": 4}, convolution_whole, lambda: (draw(2, 3, 12), draw(4, 3, 3), draw(4)), "cp")
def causal_convolution_with_a_halo(pv: Vary, check_vma: Any) -> Global:
    @mapped({"cp": 4}, ("b c (cp s)", "f c k", "f"), "b f (cp s)", check_vma)
    def convolution(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        before = mc.shift(x[..., -2:], "cp", wrap=False)
        return F.conv1d(torch.cat([before, x], -1), *pv((w, bias), "cp"))

    return convolution


def forces_whole(x: Tensor, scale: Tensor) -> Tensor:
    apart = x[:, None] - x[None]
    return (apart * (-apart.square().sum(-1, keepdim=True) * scale).exp()).sum(1)


@program({"dp": 4}, forces_whole, lambda: (draw(8, 3), draw(1)), "dp")
def all_pairs_by_permute(pv: Vary, check_vma: Any) -> Global:
    """Particles visit all others."""

    @mapped({"dp": 4}, ("(dp n) c", "n"), "(dp n) c", check_vma)
    def forces(x: Tensor, scale: Tensor) -> Tensor:
        n, scale = mc.axis_size("dp"), pv(scale, "dp")
        total, visitors = torch.zeros_like(x), x
        for _ in range(n):
            apart = x[:, None] - visitors[None]
            total = total + (apart * (-apart.square().sum(-1, keepdim=True) * scale).exp()).sum(1)
            visitors = mc.permute(visitors, "dp", [(i, (i + 1) % n) for i in range(n)])
        return total

    return forces


# -------------------------------------------------------------------------------------------- experts, tables, pipeline


def experts_whole(x: Tensor, router: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    share = (x @ router).softmax(-1)
    gate, choice = share.max(-1)
    y = gate[:, None] * torch.tanh(torch.einsum("td,tdf->tf", x, w[choice]))
    load = F.one_hot(choice, share.shape[1]).to(F64).mean(0)
    return y, (load * share.mean(0)).sum()


@program({"ep": 4}, experts_whole, lambda: (draw(12, 5), draw(5, 8), draw(8, 5, 6)), "ep")
def mixture_of_experts(pv: Vary, check_vma: Any) -> Global:
    """Tokens go into the slots of their expert, wherever that is, and come back; with a loss that balances the load."""
    specs = ("(ep t) d", "d e", "(ep e) d f")

    @mapped({"ep": 4}, specs, ("(ep t) f", ""), check_vma)
    def experts(x: Tensor, router: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        share = (x @ pv(router, "ep")).softmax(-1)
        gate, choice = share.max(-1)
        chosen = F.one_hot(choice, share.shape[1])
        place = ((chosen.cumsum(0) - 1) * chosen).sum(-1)
        slots = chosen[..., None] * F.one_hot(place, x.shape[0])[:, None]  # token, expert, slot
        sent = mc.all_to_all(torch.einsum("tes,td->esd", slots.to(F64), x), "ep", 0, 1)
        back = mc.all_to_all(torch.tanh(sent @ w), "ep", 1, 0)
        y = torch.einsum("tes,esf->tf", slots * gate[:, None, None], back)
        load = mc.all_reduce(chosen.to(F64).mean(0), "ep", op="mean")
        return y, (load * mc.all_reduce(share.mean(0), "ep", op="mean")).sum()

    return experts


def choice_whole(x: Tensor, router: Tensor, w: Tensor) -> Tensor:
    share = (x @ router).softmax(-1)
    y = torch.zeros(len(x), w.shape[-1], dtype=F64)
    for i, expert in enumerate(w):
        gate, rows = share[:, i].topk(3)
        y = y.index_add(0, rows, gate[:, None] * torch.tanh(x[rows] @ expert))
    return y


@program({"ep": 4}, choice_whole, lambda: (draw(6, 5), draw(5, 4), draw(4, 5, 4)), "ep")
def experts_choose_their_tokens(pv: Vary, check_vma: Any) -> Global:
    """All ranks have all tokens; each takes the column of its own expert."""

    @mapped({"ep": 4}, ("t d", "d e", "(ep e) d f"), "t f", check_vma)
    def experts(x: Tensor, router: Tensor, w: Tensor) -> Tensor:
        share = (x @ router).softmax(-1)
        own = pv(share, "ep").index_select(1, mc.axis_index("ep").view(1))[:, 0]
        gate, rows = own.topk(3)
        seen = torch.tanh(pv(x, "ep").index_select(0, rows) @ w[0])
        y = torch.zeros(len(x), w.shape[-1], dtype=F64).index_add(0, rows, gate[:, None] * seen)
        return mc.all_reduce(y, "ep")

    return experts


def tables_whole(ids: Tensor, tables: Tensor, dense: Tensor, w: Tensor) -> Tensor:
    found = torch.stack([F.embedding(ids[:, i], table) for i, table in enumerate(tables)], 1)
    return torch.tanh(torch.cat([found.flatten(1), dense], 1) @ w)


@program({"ep": 4}, tables_whole, lambda: (integers(7, 8, 4), draw(4, 7, 3), draw(8, 5), draw(17, 6)), "ep")
def tables_beside_dense_layers(pv: Vary, check_vma: Any) -> Global:
    """Tables lie on one rank each, rows of the batch too: ids go to the tables and what is found comes back."""

    @mapped({"ep": 4}, ("(ep b) t", "(ep t) v d", "(ep b) d", "d f"), "(ep b) f", check_vma)
    def model(ids: Tensor, tables: Tensor, dense: Tensor, w: Tensor) -> Tensor:
        asked = mc.all_to_all(ids, "ep", 1, 0)
        found = F.embedding(asked[:, 0], tables[0])[:, None]
        back = mc.all_to_all(found, "ep", 0, 1).flatten(1)
        return torch.tanh(torch.cat([back, dense], 1) @ pv(w, "ep"))

    return model


def stages_whole(x: Tensor, stages: Tensor, head: Tensor, target: Tensor) -> Tensor:
    for w in stages:
        x = torch.tanh(x @ w)
    return F.mse_loss(x @ head, target)


def stages_inputs(count: int) -> tuple[Tensor, ...]:
    return draw(3, 2, 5, grad=False), draw(count, 5, 5), draw(5, 4), draw(3, 2, 4, grad=False)


@program({"pp": 4}, stages_whole, lambda: stages_inputs(4), "pp")
def pipeline(pv: Vary, check_vma: Any) -> Global:
    """Four stages, three microbatches: what a stage computes outside of its turn is masked out."""

    @mapped({"pp": 4}, ("m b d", "(pp l) d f", "d v", "m b v"), "", check_vma)
    def loss(x: Tensor, stages: Tensor, head: Tensor, target: Tensor) -> Tensor:
        here, n, micro, head = mc.axis_index("pp"), mc.axis_size("pp"), len(x), pv(head, "pp")
        carried, total = torch.zeros(*x.shape[1:], dtype=F64), torch.zeros((), dtype=F64)
        for step in range(micro + n - 1):
            y = torch.tanh(torch.where(here == 0, x[min(step, micro - 1)], carried) @ stages[0])
            done = step - (n - 1)
            if done >= 0:
                total = total + torch.where(here == n - 1, F.mse_loss(y @ head, target[done]), 0)
            carried = mc.shift(y, "pp", wrap=False)
        return mc.all_reduce(total, "pp") / micro

    return loss


def piped_inputs() -> tuple[Tensor, ...]:
    return draw(3, 4, 6, grad=False), draw(2, 6, 8), draw(2, 8, 6), draw(3, 4, 6, grad=False)


def piped_whole(x: Tensor, ups: Tensor, downs: Tensor, target: Tensor) -> Tensor:
    for up, down in zip(ups, downs, strict=True):
        x = x + torch.tanh(normed(x) @ up) @ down
    return F.mse_loss(x, target)


@program({"dp": 2, "tp": 2, "pp": 2}, piped_whole, piped_inputs, ("dp", "tp", "pp"))
def pipeline_with_data_and_tensor_parallelism(pv: Vary, check_vma: Any) -> Global:
    """Stages of tensor parallel blocks, over rows of the batch."""
    axes = {"dp": 2, "tp": 2, "pp": 2}
    specs = ("m (dp b) d", "(pp l) d (tp f)", "(pp l) (tp f) d", "m (dp b) d")

    @mapped(axes, specs, "", check_vma)
    def loss(x: Tensor, ups: Tensor, downs: Tensor, target: Tensor) -> Tensor:
        here, n, micro = mc.axis_index("pp"), mc.axis_size("pp"), len(x)
        up, down = pv((ups[0], downs[0]), "dp")
        carried, total = torch.zeros(x.shape[1:], dtype=F64), torch.zeros((), dtype=F64)
        for step in range(micro + n - 1):
            y = torch.where(here == 0, x[min(step, micro - 1)], carried)
            y = y + mc.all_reduce(torch.tanh(pv(normed(y), "tp") @ up) @ down, "tp")
            done = step - (n - 1)
            if done >= 0:
                total = total + torch.where(here == n - 1, F.mse_loss(y, target[done]), 0)
            carried = mc.shift(y, "pp", wrap=False)
        return mc.all_reduce(mc.all_reduce(total, "pp") / micro, "dp", op="mean")

    return loss


# --------------------------------------------------------------------------------------------------- norms and losses


def batch_norm_whole(x: Tensor, scale: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return F.batch_norm(x, None, None, scale, bias, training=True), x.mean(0), x.var(0, correction=0)


@program({"dp": 4}, batch_norm_whole, lambda: (draw(8, 3), draw(3), draw(3, seed=1)), "dp")
def sync_batch_norm(pv: Vary, check_vma: Any) -> Global:
    @mapped({"dp": 4}, (ROWS, "d", "d"), (ROWS, "d", "d"), check_vma)
    def norm(x: Tensor, scale: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, square = mc.all_reduce(torch.stack([x.mean(0), x.square().mean(0)]), "dp", op="mean")
        var = square - mean.square()
        at, inverse, scale, bias = pv((mean, (var + 1e-5).rsqrt(), scale, bias), "dp")
        return (x - at) * inverse * scale + bias, mean, var

    return norm


@program(LINE, lambda x, scale: normed(x, scale), lambda: (draw(3, 8), draw(8)), "tp")
def sync_layer_norm(pv: Vary, check_vma: Any) -> Global:
    """Over features that are cut."""

    @mapped(LINE, ("b (tp d)", "(tp d)"), "b (tp d)", check_vma)
    def norm(x: Tensor, scale: Tensor) -> Tensor:
        mean = pv(mc.all_reduce(x.mean(-1, keepdim=True), "tp", op="mean"), "tp")
        var = mc.all_reduce((x - mean).square().mean(-1, keepdim=True), "tp", op="mean")
        return (x - mean) * pv((var + 1e-5).rsqrt(), "tp") * scale

    return norm


def look_up(ids: Tensor, table: Tensor) -> Tensor:
    """The rows of a table that is cut over tp: a part of a sum over tp."""
    own = ids - mc.axis_index("tp") * len(table)
    inside = (own >= 0) & (own < len(table))
    return torch.where(inside[..., None], F.embedding(own.clamp(0, len(table) - 1), table), 0)


def cross_entropy_over_tp(logits: Tensor, ids: Tensor, pv: Vary) -> Tensor:
    """Of each row, from logits whose last dim is cut over tp; one value along tp."""
    width = logits.shape[-1]
    top = mc.all_reduce(logits.detach().amax(-1), "tp", op="max")
    total = mc.all_reduce((logits - pv(top, "tp")[..., None]).exp().sum(-1), "tp")
    own = ids - mc.axis_index("tp") * width
    picked = logits.gather(-1, own.clamp(0, width - 1)[..., None])[..., 0]
    chosen = mc.all_reduce(torch.where((own >= 0) & (own < width), picked, 0), "tp")
    return total.log() + top - chosen


@program(GRID, lambda ids, table: F.embedding(ids, table), lambda: (integers(8, 4, 3), draw(8, 5)), "dp")
def vocabulary_parallel_embedding(pv: Vary, check_vma: Any) -> Global:
    @mapped(GRID, ("(dp b) s", "(tp v) d"), "(dp b) s d", check_vma)
    def embedding(ids: Tensor, table: Tensor) -> Tensor:
        return mc.all_reduce(look_up(ids, pv(table, "dp")), "tp")

    return embedding


def entropy_whole(x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(x @ w, ids)


@program(GRID, entropy_whole, lambda: (draw(6, 5), draw(5, 8), integers(8, 6)), ("dp", "tp"))
def vocabulary_parallel_cross_entropy(pv: Vary, check_vma: Any) -> Global:
    @mapped(GRID, (ROWS, "d (tp v)", "(dp b)"), "", check_vma)
    def loss(x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
        logits = pv(x, "tp") @ pv(w, "dp")
        return mc.all_reduce(cross_entropy_over_tp(logits, ids, pv).mean(), "dp", op="mean")

    return loss


def tied_whole(ids: Tensor, table: Tensor, w: Tensor) -> Tensor:
    x = torch.tanh(F.embedding(ids[:, :-1], table) @ w)
    return F.cross_entropy(F.linear(x, table).flatten(0, 1), ids[:, 1:].flatten())


@program(GRID, tied_whole, lambda: (integers(8, 4, 5), draw(8, 6), draw(6, 6)), "dp")
def tied_embedding(pv: Vary, check_vma: Any) -> Global:
    """One table, cut over tp, finds the rows at the beginning and gives the logits at the end."""

    @mapped(GRID, ("(dp b) s", "(tp v) d", "d e"), "", check_vma)
    def loss(ids: Tensor, table: Tensor, w: Tensor) -> Tensor:
        table, w = pv((table, w), "dp")
        x = torch.tanh(mc.all_reduce(look_up(ids[:, :-1], table), "tp") @ w)
        logits = F.linear(pv(x, "tp"), table)
        return mc.all_reduce(cross_entropy_over_tp(logits, ids[:, 1:], pv).mean(), "dp", op="mean")

    return loss


def token_mean_whole(x: Tensor, w: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    each = F.cross_entropy((x @ w).flatten(0, 1), ids.flatten(), reduction="none")
    return (each * weight.flatten()).sum() / weight.sum()


def token_mean_inputs() -> tuple[Tensor, ...]:
    return draw(4, 3, 5), draw(5, 6), integers(6, 4, 3), draw(4, 3).detach().abs()


@program({"dp": 4}, token_mean_whole, token_mean_inputs, "dp")
def mean_over_weighted_tokens(pv: Vary, check_vma: Any) -> Global:
    """Ranks have different numbers of tokens: the sum and the count are reduced, not the mean."""

    @mapped({"dp": 4}, ("(dp b) s d", "d v", "(dp b) s", "(dp b) s"), "", check_vma)
    def loss(x: Tensor, w: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
        each = F.cross_entropy((x @ pv(w, "dp")).flatten(0, 1), ids.flatten(), reduction="none")
        return mc.all_reduce((each * weight.flatten()).sum(), "dp") / mc.all_reduce(weight.sum(), "dp")

    return loss


def masked_whole(x: Tensor, hidden: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    y = torch.tanh(torch.where(hidden[..., None], mask, x) @ w)
    return torch.where(hidden[..., None], (y - x).square(), 0).sum() / hidden.sum()


def masked_inputs() -> tuple[Tensor, ...]:
    hidden = integers(2, 4, 6).bool()
    hidden[:, 0] = True
    return draw(4, 6, 3), hidden, draw(3), draw(3, 3)


@program({"dp": 4}, masked_whole, masked_inputs, "dp")
def masked_loss(pv: Vary, check_vma: Any) -> Global:
    """A learned vector stands where tokens are hidden, and only those are counted."""

    @mapped({"dp": 4}, ("(dp b) s d", "(dp b) s", "d", "d e"), "", check_vma)
    def loss(x: Tensor, hidden: Tensor, mask: Tensor, w: Tensor) -> Tensor:
        mask, w = pv((mask, w), "dp")
        y = torch.tanh(torch.where(hidden[..., None], mask, x) @ w)
        error = torch.where(hidden[..., None], (y - x).square(), 0).sum()
        return mc.all_reduce(error, "dp") / mc.all_reduce(hidden.sum(), "dp")

    return loss


def contrastive_whole(a: Tensor, b: Tensor, wa: Tensor, wb: Tensor, scale: Tensor) -> Tensor:
    p, q = F.normalize(a @ wa, dim=-1), F.normalize(b @ wb, dim=-1)
    logits, own = p @ q.T * scale.exp(), torch.arange(len(p))
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


@program({"dp": 4}, contrastive_whole, lambda: (draw(8, 5), draw(8, 6), draw(5, 4), draw(6, 4), draw()), "dp")
def contrastive_loss(pv: Vary, check_vma: Any) -> Global:
    """Each rank's pairs against those of all ranks, both ways."""

    @mapped({"dp": 4}, (ROWS, ROWS, "d e", "d e", ""), "", check_vma)
    def loss(a: Tensor, b: Tensor, wa: Tensor, wb: Tensor, scale: Tensor) -> Tensor:
        wa, wb, factor = pv((wa, wb, scale.exp()), "dp")
        p, q = F.normalize(a @ wa, dim=-1), F.normalize(b @ wb, dim=-1)
        all_p, all_q = mc.all_gather((p, q), "dp")
        own = torch.arange(len(p)) + mc.axis_index("dp") * len(p)
        both = F.cross_entropy(p @ all_q.T * factor, own) + F.cross_entropy(q @ all_p.T * factor, own)
        return mc.all_reduce(both / 2, "dp", op="mean")

    return loss


def decay_whole(x: Tensor, w1: Tensor, w2: Tensor, scale: Tensor) -> Tensor:
    norm = (w1.square().sum() + w2.square().sum() + scale.square().sum()).sqrt()
    return (torch.tanh(x * scale @ w1) @ w2).square().mean() + 0.1 * norm


@program(GRID, decay_whole, lambda: (draw(4, 6), draw(6, 8), draw(8, 6), draw(6)), "dp")
def norm_of_all_parameters(pv: Vary, check_vma: Any) -> Global:
    """A penalty in which each element counts once, whether it is cut or replicated."""

    @mapped(GRID, (ROWS, "d (tp f)", "(tp f) d", "d"), "", check_vma)
    def loss(x: Tensor, w1: Tensor, w2: Tensor, scale: Tensor) -> Tensor:
        cut = mc.all_reduce(w1.square().sum() + w2.square().sum(), "tp")
        norm = (cut + scale.square().sum()).sqrt()
        w1, w2, scale = pv((w1, w2, scale), "dp")
        y = mc.all_reduce(torch.tanh(pv(x * scale, "tp") @ w1) @ w2, "tp")
        return mc.all_reduce(y.square().mean(), "dp", op="mean") + 0.1 * norm

    return loss


def clip_whole(x: Tensor, w1: Tensor, w2: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    y = torch.tanh(x * scale @ w1) @ w2
    slopes = torch.autograd.grad(y.square().sum(), (w1, w2, scale), create_graph=True)
    norm = torch.stack([g.square().sum() for g in slopes]).sum().sqrt()
    return norm, *(g * (0.5 / norm) for g in slopes)


@program(GRID, clip_whole, lambda: (draw(4, 6), draw(6, 8), draw(8, 6), draw(6)), "dp")
def clipped_gradients(pv: Vary, check_vma: Any) -> Global:
    """Gradients inside, their norm over cut and replicated parameters, and what comes of them: differentiable again."""
    specs = ("d (tp f)", "(tp f) d", "d")

    @mapped(GRID, (ROWS, *specs), ("", *specs), check_vma)
    def clip(x: Tensor, w1: Tensor, w2: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        v1, v2, s = pv((w1, w2, scale), "dp")
        y = mc.all_reduce(torch.tanh(pv(x * s, "tp") @ v1) @ v2, "tp")
        loss = mc.all_reduce(y.square().sum(), "dp")
        g1, g2, gs = torch.autograd.grad(loss, (w1, w2, scale), create_graph=True)
        norm = (mc.all_reduce(g1.square().sum() + g2.square().sum(), "tp") + gs.square().sum()).sqrt()
        factor = 0.5 / norm
        of_cut = pv(factor, "tp")
        return norm, g1 * of_cut, g2 * of_cut, gs * factor

    return clip


def steps_whole(params: dict[str, Tensor], x: Tensor, target: Tensor) -> dict[str, Tensor]:
    for _ in range(2):
        slopes = torch.func.grad(loss_whole)(params, x, target)
        params = {name: p - 0.5 * slopes[name] for name, p in params.items()}
    return params


@program({"dp": 4}, steps_whole, loss_inputs, "dp")
def training_steps_by_func_grad(pv: Vary, check_vma: Any) -> Global:
    """Two steps of gradient descent inside the function."""

    @mapped({"dp": 4}, ("...", ROWS, ROWS), "...", check_vma)
    def train(params: dict[str, Tensor], x: Tensor, target: Tensor) -> dict[str, Tensor]:
        def loss(params: dict[str, Tensor]) -> Tensor:
            return mc.all_reduce(loss_whole(pv(params, "dp"), x, target), "dp", op="mean")

        for _ in range(2):
            slopes = torch.func.grad(loss)(params)
            params = {name: p - 0.5 * slopes[name] for name, p in params.items()}
        return params

    return train


# -------------------------------------------------------------------------------------------------------------- einsum


def product_whole(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    return torch.tanh(a @ b + bias)


@program({"r": 2, "c": 2}, product_whole, lambda: (draw(4, 6), draw(6, 8), draw(8)), "r")
def matrices_cut_both_ways(pv: Vary, check_vma: Any) -> Global:
    axes = {"r": 2, "c": 2}

    @mapped(axes, ("(r m) (c k)", "(r k) (c n)", "(c n)"), "(r m) (c n)", check_vma)
    def product(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
        return torch.tanh(mc.einsum("(r m) (c k), (r k) (c n) -> (r m) (c n)", a, b) + pv(bias, "r"))

    return product


@program(GRID, sequence_whole, lambda: (draw(4, 6, 6), draw(6), draw(6, 8), draw(8, 6)), ("dp", "tp"))
def sequence_parallel_by_einsum(pv: Vary, check_vma: Any) -> Global:
    """einsum sees to the weights; the norm's weight is the user's."""

    @mapped(GRID, ("(dp b) (tp s) d", "d", "d (tp f)", "(tp f) d"), "(dp b) (tp s) d", check_vma)
    def mlp(x: Tensor, scale: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        y = normed(x, pv(scale, ("dp", "tp")))
        hidden = F.gelu(mc.einsum("(dp b) (tp s) d, d (tp f) -> (dp b) s (tp f)", y, w1))
        return x + mc.einsum("(dp b) s (tp f), (tp f) d -> (dp b) (tp s) d", hidden, w2)

    return mlp


@program(GRID, mlp_whole, lambda: (draw(4, 6), draw(6, 8), draw(8), draw(8, 6)), "dp")
def tensor_parallel_by_einsum(pv: Vary, check_vma: Any) -> Global:
    @mapped(GRID, (ROWS, "d (tp f)", "(tp f)", "(tp f) d"), ROWS, check_vma)
    def mlp(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor) -> Tensor:
        hidden = F.gelu(mc.einsum("(dp b) d, d (tp f) -> (dp b) (tp f)", x, w1) + pv(b1, "dp"))
        return mc.einsum("(dp b) (tp f), (tp f) d -> (dp b) d", hidden, w2)

    return mlp


# ---------------------------------------------------------------------------------------------------------- checkpoint


def blocks_whole(x: Tensor, ups: list[Tensor], downs: list[Tensor]) -> Tensor:
    for up, down in zip(ups, downs, strict=True):
        x = x + torch.tanh(normed(x) @ up) @ down
    return x


def blocks_inputs() -> tuple[Any, ...]:
    return draw(4, 6), [draw(6, 8, seed=i) for i in range(2)], [draw(8, 6, seed=i) for i in range(2)]


def checkpointed(pv: Vary, check_vma: Any, reentrant: bool) -> Global:
    mesh = mc.make_mesh(GRID)

    @mapped(GRID, (ROWS, "d (tp f)", "(tp f) d"), ROWS, check_vma)
    def blocks(x: Tensor, ups: list[Tensor], downs: list[Tensor]) -> Tensor:
        def block(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
            with mc.use_mesh(mesh):  # on ranks it runs again when shard_map's function is over
                up, down = pv((up, down), "dp")
                return x + mc.all_reduce(torch.tanh(pv(normed(x), "tp") @ up) @ down, "tp")

        for up, down in zip(ups, downs, strict=True):
            x = checkpoint(block, x, up, down, use_reentrant=reentrant)
        return x

    return blocks


@program(GRID, blocks_whole, blocks_inputs, ("dp", "tp"))
def checkpointed_blocks(pv: Vary, check_vma: Any) -> Global:
    """The forward of a block runs again in backward, collectives and all."""
    return checkpointed(pv, check_vma, reentrant=False)


@program(GRID, blocks_whole, blocks_inputs, ("dp", "tp"), on_ranks=True)
def reentrant_checkpointed_blocks(pv: Vary, check_vma: Any) -> Global:
    return checkpointed(pv, check_vma, reentrant=True)


# -------------------------------------------------------------------------------------------------------- three axes


def transformer_whole(ids: Tensor, p: dict[str, Any]) -> Tensor:
    x = F.embedding(ids[:, :-1], p["table"]) + p["place"]
    for block in p["blocks"]:
        y = normed(x, block["norm1"])
        q, k, v = (torch.einsum("bsd,dhe->bhse", y, block[name]) for name in ("q", "k", "v"))
        x = x + torch.einsum("bhse,hed->bsd", attend(q, k, v), block["o"])
        x = x + F.gelu(normed(x, block["norm2"]) @ block["up"]) @ block["down"]
    return F.cross_entropy(F.linear(normed(x, p["norm"]), p["table"]).flatten(0, 1), ids[:, 1:].flatten())


def transformer_inputs() -> tuple[Any, ...]:
    blocks = [
        {
            "norm1": draw(8, seed=i), "q": draw(8, 2, 4, seed=10 + i), "k": draw(8, 2, 4, seed=20 + i),
            "v": draw(8, 2, 4, seed=30 + i), "o": draw(2, 4, 8, seed=i), "norm2": draw(8, seed=40 + i),
            "up": draw(8, 12, seed=i), "down": draw(12, 8, seed=i),
        }
        for i in range(2)
    ]  # fmt: skip
    return integers(6, 2, 9), {"table": draw(6, 8), "place": draw(8, 8), "norm": draw(8, seed=50), "blocks": blocks}


BLOCK = {
    "norm1": "d", "q": "d (tp h) e", "k": "d (tp h) e", "v": "d (tp h) e", "o": "(tp h) e d",
    "norm2": "d", "up": "d (tp f)", "down": "(tp f) d",
}  # fmt: skip
MODEL = {"table": "(tp v) d", "place": "(cp tp s) d", "norm": "d", "blocks": [BLOCK, BLOCK]}


@program(CUBE, transformer_whole, transformer_inputs, ("dp", "cp"))
def transformer_over_three_axes(pv: Vary, check_vma: Any) -> Global:
    """Data, context (ring) and tensor parallelism with the sequence cut over tp between the blocks; tied embedding."""
    data, every = ("dp", "cp"), ("dp", "cp", "tp")

    def varied(block: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: pv(w, every if name.startswith("norm") else data) for name, w in block.items()}

    @mapped(CUBE, ("(dp b) (cp s)", "(dp b) (cp s)", MODEL), "", check_vma)
    def loss(ids: Tensor, targets: Tensor, p: dict[str, Any]) -> Tensor:
        table = pv(p["table"], data)
        x = mc.reduce_scatter(look_up(ids, table), "tp", 1) + pv(p["place"], "dp")
        for block in p["blocks"]:
            w = varied(block)
            y = mc.all_gather(normed(x, w["norm1"]), "tp", 1)
            q, k, v = (torch.einsum("bsd,dhe->bhse", y, w[name]) for name in ("q", "k", "v"))
            seen = torch.einsum("bhse,hed->bsd", ring(q, k, v, "cp"), w["o"])
            x = x + mc.reduce_scatter(seen, "tp", 1)
            y = mc.all_gather(normed(x, w["norm2"]), "tp", 1)
            x = x + mc.reduce_scatter(F.gelu(y @ w["up"]) @ w["down"], "tp", 1)
        y = mc.all_gather(normed(x, pv(p["norm"], every)), "tp", 1)
        each = cross_entropy_over_tp(F.linear(y, table), targets, pv)
        return mc.all_reduce(each.mean(), data, op="mean")

    return lambda ids, p: loss(ids[:, :-1], ids[:, 1:], p)


BY_NAME = {each.name: each for each in PROGRAMS}
