"""What a program is to do on a torch that lacks a private name: run by tests/test_torch_missing.py, in a process that
starts one fork per name.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import einops  # noqa: F401  # all that meshcomm imports, before the forks
import numpy  # noqa: F401  # ICN001
import torch
import torch.distributed  # before the forks, too
from torch import Tensor

README = Path(__file__).resolve().parents[1] / "README.md"


def readme(mc: Any, by_hand: bool = False) -> object:
    """The first program of README; by hand: without the checker."""
    program = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0]
    lines: list[str] = []
    if by_hand:
        program = program.replace('out_specs="(dp b) d"', 'out_specs="(dp b) d", check_vma=False')
        program = program.replace("x @ w1) @ w2", 'mc.pvary(x, "tp") @ mc.pvary(w1, "dp")) @ mc.pvary(w2, "dp")', 1)
    exec(compile(program, "README.md", "exec"), {"print": lines.append})
    return lines


def readme_by_hand(mc: Any) -> object:
    """The same with ``check_vma=False``."""
    return readme(mc, by_hand=True)


README_SAYS = ["loss 1.4711, gradient 1.4590"] * 2


def collectives(mc: Any) -> object:
    """Forward, backward, backward of backward, a tree, a message and later."""

    def main() -> list[float]:
        with mc.use_mesh(mc.make_mesh({"x": 2})):
            w = torch.tensor([1.0, 2.0], requires_grad=True)
            varied = mc.pvary({"w": w, "more": [w.detach(), (w * 2,)]}, "x")
            y = mc.all_reduce((varied["w"] * varied["more"][1][0] * (1 + mc.axis_index("x"))).sum(), "x", async_op=True)
            loss = y.wait()
            (g,) = torch.autograd.grad(loss, w, create_graph=True)
            (h,) = torch.autograd.grad((g * g).sum(), w)
            return [loss.item(), *g.tolist(), *h.tolist(), *mc.shift(w.detach(), "x").tolist()]

    return mc.launch(main, ranks=2)


COLLECTIVES = [[30.0, 12.0, 24.0, 288.0, 576.0, 1.0, 2.0]] * 2


def transforms(mc: Any) -> object:
    """torch.func outside of ranks: the axes have one rank."""
    mesh, x = mc.make_mesh({"x": 1}), torch.tensor([1.0, 2.0])

    def f(x: Tensor) -> Tensor:
        return mc.all_reduce((mc.pvary(x, "x", mesh=mesh) ** 3).sum(), "x", mesh=mesh)

    _, tangent = torch.func.jvp(f, (x,), (torch.ones(2),))
    return [torch.func.grad(f)(x).tolist(), torch.func.vmap(f)(x[:, None]).tolist(), tangent.item()]


TRANSFORMS = [[3.0, 12.0], [1.0, 8.0], 15.0]


def forward_mode(mc: Any) -> object:
    """On ranks: dual tensors of two threads."""

    def main() -> float:
        mesh = mc.make_mesh({"x": 2})
        x = torch.tensor([1.0, 2.0]) + mesh.rank
        return float(torch.func.jvp(lambda x: mc.all_reduce(x.sum(), "x", mesh=mesh), (x,), (torch.ones(2),))[1])

    return mc.launch(main, ranks=2)


def by_value(mc: Any) -> object:
    """A collective whose tangent depends on its value."""
    mesh = mc.make_mesh({"x": 1})
    x = torch.tensor([1.0, 2.0])
    return torch.func.jvp(lambda x: mc.all_reduce(x, "x", "max", mesh=mesh) * 2, (x,), (x,))[1].tolist()


def leaked(mc: Any) -> object:
    """A tensor that has leaked out of a transform."""
    mesh, kept = mc.make_mesh({"x": 1}), list[Tensor]()
    torch.func.grad(lambda x: (kept.append(x), x.sum())[1])(torch.ones(2))
    return mc.all_reduce(kept[0], "x", mesh=mesh).tolist()


def trained(shard: Callable[[Any], object], x: Tensor) -> list[float]:
    """The losses of some steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    shard(model)
    step, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        loss = model(x).square().mean()
        step.zero_grad()
        loss.backward()
        step.step()
        found.append(loss.item())
    return found


def sharded(mc: Any) -> object:
    """A fully sharded module, and a whole one."""
    x = torch.ones(6, 2, dtype=torch.float64).cumsum(0)

    def main() -> list[float]:
        mesh = mc.make_mesh({"fs": 2})
        units = lambda model: [model[0], model[2]]  # noqa: E731
        return trained(
            lambda model: mc.parallel.fully_shard(model, "fs", grads="mean", units=units(model), mesh=mesh),
            x.chunk(2)[mesh.rank],
        )

    of_ranks = torch.tensor(mc.launch(main, ranks=2), dtype=torch.float64).mean(0)
    whole = torch.tensor(trained(lambda model: None, x), dtype=torch.float64)
    return bool(((of_ranks - whole).abs() < 1e-12).all())


def views(mc: Any) -> object:
    """Views of one weight, of which each needs a pvary."""
    mesh = mc.make_mesh({"x": 2})
    f = mc.shard_map(
        lambda x, w: mc.all_reduce(sum((part * x).sum() for part in w.view(2, 2).T.unbind()), "x"),
        mesh=mesh, in_specs=("(x n)", "n"), out_specs="",
    )  # fmt: skip
    w = torch.arange(4.0, requires_grad=True)
    f(torch.arange(4.0), w).backward()
    return w.grad.tolist()  # type: ignore[union-attr]


def checked_under_func(mc: Any) -> object:
    """torch.func inside of a body that is checked."""
    mesh = mc.make_mesh({"x": 2})
    body = lambda x: torch.func.grad(lambda y: (y * y).sum())(x)  # noqa: E731
    return mc.shard_map(body, mesh=mesh, in_specs="(x n)", out_specs="(x n)")(torch.arange(4.0)).tolist()


def traced(mc: Any) -> object:
    """What a trace says of forward and backward."""

    def main() -> list[bool]:
        mesh, w = mc.make_mesh({"x": 2}), torch.ones(2, requires_grad=True)
        with mc.trace() as found:
            mc.all_reduce((mc.pvary(w, "x", mesh=mesh)).sum(), "x", mesh=mesh).backward()
        return [event.backward for event in found.events]

    return mc.launch(main, ranks=2)


def own_classes(mc: Any) -> object:
    """Containers of every kind."""
    mesh = mc.make_mesh({"x": 1})
    tree = {"b": [torch.ones(1)], "a": (torch.zeros(1), torch.max(torch.ones(1, 2), 1))}
    found = mc.all_reduce(tree, "x", mesh=mesh)
    return [list(found), type(found["a"]).__name__, found["a"][1].values.item()]


PROGRAMS: dict[str, tuple[Callable[[Any], object], object]] = {
    "readme": (readme, README_SAYS),
    "readme_by_hand": (readme_by_hand, README_SAYS),
    "collectives": (collectives, COLLECTIVES),
    "transforms": (transforms, TRANSFORMS),
    "forward_mode": (forward_mode, [4.0, 4.0]),
    "by_value": (by_value, [2.0, 4.0]),
    "leaked": (leaked, [1.0, 1.0]),
    "sharded": (sharded, True),
    "views": (views, [2.0, 2.0, 4.0, 4.0]),
    "checked_under_func": (checked_under_func, [0.0, 2.0, 4.0, 6.0]),
    "traced": (traced, [[False, True]] * 2),
    "own_classes": (own_classes, [["b", "a"], "tuple", 1.0]),
}
"""Name to a program and what it gives."""


def outcome(program: Callable[[Any], object], expected: object) -> str:
    """ "right", "wrong: ...", "refused: ..." or "crashed: ..."."""
    import meshcomm as mc  # noqa: PLC0415  # now, with what is to be done without

    try:
        found = program(mc)
    except mc.MeshError as error:
        return f"refused: {error}"
    except BaseException:
        text = traceback.format_exc()
        return f"refused: {text}" if "MeshError: meshcomm" in text and "has no torch." in text else f"crashed: {text}"
    return "right" if found == expected else f"wrong: {found}"


def in_a_fork(without: str, wanted: Sequence[str]) -> dict[str, Any]:
    """What programs do without these names."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        gc.disable()  # what is imported is no garbage, and to look at it is half of what a fork takes
        os.close(reading)
        os.environ["MESHCOMM_WITHOUT"] = without
        try:
            before = set(sys.modules)
            found: dict[str, Any] = {name: outcome(*PROGRAMS[name]) for name in wanted}
            mine = ("meshcomm", "torch_names")
            found["modules"] = [m for m in sys.modules if m not in before and m.partition(".")[0] not in mine]
            from meshcomm import _versions  # noqa: PLC0415

            found["lacking"] = [name for name, _ in _versions.lacking]
            found["known"] = [name for name, _ in _versions.known]
        except BaseException:
            found = {"import": traceback.format_exc()}
        with os.fdopen(writing, "w") as pipe:
            json.dump(found, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    return json.loads(told) if told else {"import": "the process has died"}  # type: ignore[no-any-return]


USES = {
    "torch.distributed": [],  # by tests of processes
    "torch.ops": [],
    "torch.autograd.forward_ad": ["transforms", "forward_mode", "by_value"],
    "torch._functorch.eager_transforms": ["transforms", "forward_mode"],
    "torch._functorch.autograd_function": ["transforms", "leaked"],
    "torch.Tensor._version": ["readme_by_hand"],
    "torch.Tensor._view_func": ["views"],
    "torch.autograd.function.BackwardCFunction": ["sharded"],
    "torch.autograd.function._Single": [],
    "torch.nn.Module": ["sharded"],
    "torch.nn.utils": ["sharded"],
    "torch.amp.GradScaler": ["sharded"],
    "torch._C._current_graph_task_id": ["traced", "sharded"],
    "torch._C._autograd._top_saved": ["sharded"],
    "torch._C._autograd._get_sequence_nr": ["sharded"],
    "torch._C._current_autograd_node": ["sharded"],
    "torch.autograd._engine_run_backward": ["sharded"],
    "torch.autograd.Variable._execution_engine": ["sharded"],
    "torch._C._are_functorch_transforms_active": ["transforms", "by_value"],
    "torch._C._DisableFuncTorch": ["transforms", "leaked"],
    "torch._C._functorch": ["leaked", "views", "checked_under_func"],
    "torch._C.DisableTorchFunction": ["readme_by_hand"],
    "torch.autograd._profiler_enabled": ["collectives"],
    "torch.utils._python_dispatch": ["transforms"],
    "torch._subclasses": [],  # by tests of save_full_state_dict
    "torch.utils._pytree": ["own_classes"],
}
"""Where a name begins, to the programs that look at what it is for."""


def programs_for(name: str) -> list[str]:
    """What to run without a name."""
    return [
        "readme",
        "collectives",
        *(each for start, found in USES.items() if name.startswith(start) for each in found),
    ]


def main() -> None:
    """One fork with all names, which finds out what torch imports when it is first used, and one without each."""
    warnings.simplefilter("ignore")
    sys.dont_write_bytecode, sys.pycache_prefix = False, sys.argv[1]  # the first fork compiles for all
    results = {"": in_a_fork("", list(PROGRAMS))}
    for module in results[""].get("modules", ()):  # a second or two, once
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    torch.func.jvp(torch.square, (torch.ones(1),), (torch.ones(1),))
    gc.collect()
    gc.freeze()  # or each fork goes through all that was imported, and copies it
    for each in results[""].get("known", ()):
        results[each] = in_a_fork(each, programs_for(each))
    results["torch"] = in_a_fork("torch", ["readme", "readme_by_hand", "collectives"])
    for found in results.values():
        found.pop("modules", None)
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
