"""What checking varying types costs the host, with nothing to communicate: one run, ratios, no assertions.

    python -m benchmarks.checker                  # about a minute
    python -m benchmarks.checker --quick          # some seconds, noisier
    python -m benchmarks.checker --json out.json

The programs run on a mesh of one rank, the collectives on torch's fake backend, of 8 ranks. "a mode" is a
TorchFunctionMode that does nothing: what torch asks of anyone who sees its operations.
The modes take turns in short samples; each number is the median of its samples.
"""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch reads it

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import layer_norm, scaled_dot_product_attention, softmax
from torch.overrides import TorchFunctionMode

import meshcomm as mc
from benchmarks.common import (
    RANKS,
    Budget,
    as_json,
    options_of,
    print_budgets,
    print_table,
    run,
    take_turns,
    timed,
    worst,
)

CHAIN = 500
MODES: tuple[bool | str, ...] = (False, "error", True)
AXES = {"dp": 1, "tp": 1}


class Nothing(TorchFunctionMode):
    """Sees every operation and lets it pass."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


# ------------------------------------------------------------------------------------------------------- operations


def of_one_type(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    for _ in range(CHAIN):
        x = x * y
    return x


def of_two_types(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """An invariant operand without grad in each."""
    for _ in range(CHAIN):
        x = x * w
    return x


def with_pvary(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """The same operand, which requires grad: its pvary is made once and remembered."""
    w = w.detach().requires_grad_()
    for _ in range(CHAIN):
        x = x * w
    return x


def views(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    for _ in range(CHAIN):
        x = x.view(8)
    return x


def cats(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    for _ in range(CHAIN):
        x = torch.cat([x[:4], y[:4]])
    return x


def keywords(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    for _ in range(CHAIN):
        x = torch.add(x, y, alpha=0.5)
    return x


def dims(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    for _ in range(CHAIN):
        x.sum(dim=0, keepdim=True)
    return x


def functions_of_python(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    for _ in range(CHAIN):
        x = softmax(x, dim=-1)
    return x


def in_place(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    x = x.clone()
    for _ in range(CHAIN):
        x.mul_(y)
    return x


def in_place_with_keywords(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """As optimizers write it."""
    x = x.clone()
    for _ in range(CHAIN // 2):
        x.add_(y, alpha=0.5)
        x.addcmul_(y, y, value=-0.5)
    return x


def overwritten(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    x = x.clone()
    for _ in range(CHAIN):
        x.copy_(y)
    return x


def narrower(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """An invariant operand, into what varies."""
    x = x * y
    for _ in range(CHAIN):
        x.mul_(w)
    return x


def images(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    for _ in range(CHAIN):
        torch.zeros_like(x)
    return x


def rows(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    chosen = x > 0.5
    for _ in range(CHAIN):
        torch.where(chosen, x, y)
    return x


OPERATIONS = {
    "one type": of_one_type, "two types": of_two_types, "with pvary": with_pvary, "views": views, "cat of views": cats,
    "a keyword": keywords, "dim=": dims, "softmax": functions_of_python, "in place": in_place,
    "in place, a keyword": in_place_with_keywords, "copy_": overwritten,
    # From here on something that varies has been written in place, and all that is written is looked for.
    "one type, after a write": of_one_type, "views, after a write": views, "a keyword, after a write": keywords,
    "two types, after a write": of_two_types, "with pvary, after a write": with_pvary,
    "in place, narrower": narrower, "zeros_like": images, "where": rows,
}  # fmt: skip
"""In this order."""


def measure_operations(repeats: int) -> dict[str, dict[str, float]]:
    """Seconds per operation on 8 numbers."""
    x, y = (mc.mark_varying(torch.rand(8), "dp") for _ in range(2))
    w = mc.mark_varying(torch.rand(8), ())
    found = {}
    for name, chain in OPERATIONS.items():

        def under(mode: Any, chain: Callable[..., Tensor] = chain) -> Callable[[], object]:
            def run() -> None:
                with mode():
                    chain(x, y, w)

            return run

        calls = {
            ("plain", name): under(nullcontext),
            ("a mode", name): under(Nothing),
            ("checked", name): under(mc.check_vma),
        }
        times = take_turns(calls, repeats)
        found[name] = {who: each[name] / CHAIN for who, each in times.items()}
    return found


def measure_collectives(repeats: int) -> dict[str, dict[str, float]]:
    """Seconds per collective of 16 numbers over 8 ranks, checked and not."""
    dist.init_process_group("fake", rank=0, world_size=RANKS)
    mesh = mc.make_mesh({"tp": RANKS})
    ours = {
        "all_reduce": lambda x: mc.all_reduce(x, "tp"),
        "all_gather": lambda x: mc.all_gather(x, "tp"),
        "reduce_scatter": lambda x: mc.reduce_scatter(x, "tp"),
        "shift": lambda x: mc.shift(x, "tp"),
        "all_reduce, started and waited for": lambda x: mc.all_reduce(x, "tp", async_op=True).wait(),
        "all_gather, started and waited for": lambda x: mc.all_gather(x, "tp", async_op=True).wait(),
    }
    found = {}
    with mc.use_mesh(mesh):
        for grad in (False, True):
            x = mc.mark_varying(torch.ones(16, requires_grad=grad), "tp")
            for what, call in ours.items():
                name = what + ", with grad" * grad
                calls = {
                    ("plain", name): _under(nullcontext, call, x),
                    ("checked", name): _under(mc.check_vma, call, x),
                }
                times = take_turns(calls, repeats)
                found[name] = {who: each[name] / (CHAIN // 10) for who, each in times.items()}
    return found


def _under(mode: Any, call: Callable[[Tensor], object], x: Tensor) -> Callable[[], object]:
    """Calls of it in a mode, so many that to enter the mode counts for little."""

    def run() -> None:
        with mode():
            for _ in range(CHAIN // 10):
                call(x)

    return run


# -------------------------------------------------------------------------------------------------- a training step


def block(p: dict[str, Tensor], x: Tensor, vary: Callable[[Tensor], Tensor]) -> Tensor:
    """A transformer block, tensor parallel as Megatron has it."""
    y = vary(layer_norm(x, x.shape[-1:], p["norm1"]))
    q, k, v = (torch.einsum("bsd,hde->bhse", y, p[name]) for name in ("q", "k", "v"))
    seen = scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + mc.all_reduce(torch.einsum("bhse,hed->bsd", seen, p["o"]), "tp")
    y = vary(layer_norm(x, x.shape[-1:], p["norm2"]))
    return x + mc.all_reduce(torch.relu(y @ p["up"]) @ p["down"], "tp")


def parameters(width: int, heads: int) -> dict[str, Tensor]:
    def weight(*shape: int) -> Tensor:
        return (torch.randn(shape) / width**0.5).requires_grad_()

    return {
        "norm1": weight(width), "norm2": weight(width), "q": weight(heads, width, width // heads),
        "k": weight(heads, width, width // heads), "v": weight(heads, width, width // heads),
        "o": weight(heads, width // heads, width), "up": weight(width, 4 * width), "down": weight(4 * width, width),
    }  # fmt: skip


SPECS = {
    "norm1": "d", "norm2": "d", "q": "(tp h) d e", "k": "(tp h) d e", "v": "(tp h) d e", "o": "(tp h) e d",
    "up": "d (tp f)", "down": "(tp f) d",
}  # fmt: skip


def step_with(mode: bool | str, width: int, tokens: int) -> Callable[[], object]:
    """Forward and backward of four blocks; with every pvary written out unless they are inserted."""
    layers = [parameters(width, 4) for _ in range(4)]
    leaves = [w for layer in layers for w in layer.values()]
    x = torch.randn(4, tokens, width)
    written = mode is not True

    @mc.shard_map(in_specs=([SPECS] * 4, "(dp b) s d"), out_specs="", check_vma=mode)
    def loss(layers: list[dict[str, Tensor]], x: Tensor) -> Tensor:
        layers = [mc.pvary(layer, "dp") for layer in layers] if written else layers
        for layer in layers:
            x = block(layer, x, lambda y: mc.pvary(y, "tp") if written else y)
        return mc.all_reduce(x.square().mean(), "dp")

    return lambda: torch.autograd.grad(loss(layers, x), leaves)


def measure_steps(repeats: int, sizes: Sequence[tuple[int, int]]) -> dict[str, dict[str, float]]:
    """Seconds per step."""
    found = {}
    for width, tokens in sizes:
        steps = {str(mode): step_with(mode, width, tokens) for mode in MODES}
        taken: dict[str, list[float]] = {mode: [] for mode in steps}
        for number in range(repeats + 2):
            for mode, step in steps.items():
                start = time.perf_counter()
                step()
                if number >= 2:
                    taken[mode].append(time.perf_counter() - start)
        found[f"4 x {tokens} tokens, width {width}"] = {mode: median(each) for mode, each in taken.items()}
    return found


# ------------------------------------------------------------------------------------------------------------ report


def report(operations: dict[str, dict[str, float]], steps: dict[str, dict[str, float]]) -> None:
    print_table(
        "One operation on 8 numbers",
        ["µs", "plain", "a mode", "checked", "checked - plain", "checked - a mode"],
        [
            [
                name,
                *(f"{1e6 * took[who]:.2f}" for who in ("plain", "a mode", "checked")),
                *(f"{1e6 * (took['checked'] - took[other]):.2f}" for other in ("plain", "a mode")),
            ]
            for name, took in operations.items()
        ],
    )
    print_table(
        "Forward and backward of four transformer blocks through shard_map",
        ["ms", *(f"check_vma={mode!r}" for mode in MODES), "error / False", "True / False"],
        [
            [
                name,
                *(f"{1e3 * took[str(mode)]:.2f}" for mode in MODES),
                *(f"{took[mode] / took['False']:.2f}" for mode in ("error", "True")),
            ]
            for name, took in steps.items()
        ],
    )


def budgets_of(operations: dict[str, dict[str, float]], collectives: dict[str, dict[str, float]]) -> list[Budget]:
    """Those of the design that this program can judge."""
    modes = {name: took["checked"] / took["a mode"] for name, took in operations.items()}
    adds = {name: 1e6 * (took["checked"] - took["plain"]) for name, took in collectives.items()}
    most = max(adds, key=adds.__getitem__)
    return [
        worst("an operation over one under an empty TorchFunctionMode", modes, 1.6),
        timed(f"what check_vma adds to a collective, most: {most}", adds[most], 15, "µs"),
    ]


def measure(options: Namespace) -> dict[str, Any]:
    """Everything, as it goes to --json."""
    repeats = 3 if options.quick else 30
    with mc.use_mesh(mc.make_mesh(AXES)):
        operations = measure_operations(repeats)
        steps = measure_steps(repeats, [(32, 16)] if options.quick else [(64, 64), (256, 128), (512, 128)])
    mc.shutdown()  # the mesh of one rank: the next one has others
    collectives = measure_collectives(repeats)
    report(operations, steps)
    rows = [
        [name, *(f"{1e6 * each:.1f}" for each in (took["plain"], took["checked"], took["checked"] - took["plain"]))]
        for name, took in collectives.items()
    ]
    head = ["µs", "plain", "checked", "checked - plain"]
    print_table(f"One collective of 16 numbers, fake backend, {RANKS} ranks", head, rows)
    budgets = budgets_of(operations, collectives)
    print_budgets(budgets)
    return {"operations": operations, "steps": steps, "collectives": collectives, "budgets": as_json(budgets)}


def main(arguments: Sequence[str] | None = None) -> None:
    run(options_of("What checking varying types costs."), measure, arguments)


if __name__ == "__main__":
    main()
