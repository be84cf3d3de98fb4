"""Every line on the right-hand side of docs/coming-from.md runs, and gives what the old one on the left gives."""

from __future__ import annotations

import ast
import importlib
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

import meshcomm as mc
from meshcomm.elsewhere import cells, lines
from meshcomm.runtime.start import world

PAGE = Path(__file__).resolve().parents[1] / "docs" / "coming-from.md"
HOMES = (
    "objects.objects", "objects.results", "training.process", "training.main_only", "training.reductions",
    "training.metrics",
)  # fmt: skip


def rows() -> list[tuple[str, str, str]]:
    """Section, what stands on the left, and a line of code on the right; a cell may have several."""
    found = []
    for section, theirs, ours in cells(PAGE.read_text()):
        codes = lines(ours)
        assert " | " not in ours, ours
        assert codes or ours.startswith("nothing: "), ours
        assert "there is none" not in ours or "because" in ours or "a copy" in ours, ours
        found += [(section, theirs, line) for line in codes]
    return found


ROWS = rows()
STARTING = sorted({code for section, _, code in ROWS if section == "Starting and ending"})
WITHIN = sorted({code for section, _, code in ROWS if section != "Starting and ending"})


class Root:
    """meshcomm's names, with those that are imported when first asked for."""

    def __getattr__(self, name: str) -> Any:
        for module in (
            mc,
            *(importlib.import_module(f"meshcomm.{home}") for home in HOMES),
            importlib.import_module("meshcomm.collectives.agree"),
        ):
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(name)


def evaluate(code: str, names: dict[str, Any]) -> Any:
    tree = ast.parse(code)
    if isinstance(tree.body[-1], ast.Expr) and len(tree.body) == 1:
        return eval(code, names)
    exec(code, names)
    return None


# ------------------------------------------------------------------------------------------------------------ inputs

AXES = {"dp": [[0, 2], [1, 3]], "tp": [[0, 1], [2, 3]], "both": [[0, 1, 2, 3]]}


def axis_in(code: str) -> str:
    """Along which axis a line of the page goes."""
    if "mesh.axis_names" in code or '("dp", "tp")' in code:
        return "both"
    return "tp" if "tp" in code and '"dp"' not in code else "dp"


def x_of(rank: int) -> Tensor:
    return torch.arange(8.0, dtype=torch.float64).view(4, 2) + 10 * rank + 1


def names_of(rank: int, code: str, folder: str) -> dict[str, Any]:
    axis = axis_in(code)
    group = next(ranks for ranks in AXES[axis] if rank in ranks)
    me, x = group.index(rank), x_of(rank)
    splits = [[1, 3], [3, 1]]  # of what each of two sends
    return {
        "mc": Root(), "torch": torch, "x": x, "xs": [x + i for i in range(len(group))], "me": me,
        "ragged": x[: 1 + 2 * me].clone(), "same": torch.arange(8.0, dtype=torch.float64).view(4, 2), "pair": x.view(2, 4).clone(),
        "input_splits": splits[me % 2], "output_splits": [row[me % 2] for row in splits],
        "obj": {"from": me}, "objs": [f"for {i}" for i in range(len(group))],
        "metrics": {"loss": x[0], "seen": torch.tensor(me)}, "losses": x[0], "params": [x],
        "weight": torch.arange(6.0, dtype=torch.float64).view(3, 2), "ids": torch.arange(4), "heads": x.view(1, 1, 4, 2).clone(),
        "parts": [f"sample {i}" for i in range(me, 4, 2)], "tmpdir": folder,
    }  # fmt: skip


GATHERED = (
    'mc.parallel.tensor_parallel(model, {"up": mc.parallel.Column(gather=True), "down": mc.parallel.Row(split=True)}, '
    'axis="tp")'
)


class Mlp(torch.nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(2, 4), torch.nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.relu(self.up(x)))
        return y

    def encode(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(x)
        return y


def modules_in(code: str) -> dict[str, Any]:
    """The modules that a line of the page speaks of."""
    made: dict[str, Any] = {}
    for name in re.findall(r"\b(model|replica|sharded)\b", code):
        model = Mlp().double()
        with torch.no_grad():
            for at, p in enumerate(model.parameters()):
                p.copy_(torch.arange(p.numel(), dtype=p.dtype).view_as(p) / 10 + at)
        made["state"] = {key: value.clone() + 1 for key, value in model.state_dict().items()}
        if name == "replica":
            model = mc.parallel.data_parallel(model, "dp", grads="mean")
        elif name == "sharded":
            model = mc.parallel.fully_shard(model, "dp", grads="mean")
        made[name] = model
    return made


# ------------------------------------------------------------------------------- what the old line gives, on lists
# xs: what the ranks of the group have; i: this one's index.

Oracle = Callable[[list[Tensor], int], Any]


def total(xs: list[Tensor], i: int) -> Tensor:
    return torch.stack(xs).sum(0)


def rows_of(xs: list[Tensor], i: int) -> Tensor:
    return total(xs, i).chunk(len(xs))[i]


def gathered(xs: list[Tensor], i: int) -> Tensor:
    return torch.cat(xs)


def swapped(split: int, concat: int) -> Oracle:
    return lambda xs, i: torch.cat([x.chunk(len(xs), split)[i] for x in xs], concat)


def uneven(xs: list[Tensor], i: int) -> Tensor:
    return torch.cat([xs[0].split([1, 3])[i], xs[1].split([3, 1])[i]])


def only(index: int, oracle: Oracle) -> Oracle:
    return lambda xs, i: oracle(xs, i) if i == index else None


def lists(xs: list[Tensor]) -> list[list[Tensor]]:
    return [[x + i for i in range(len(xs))] for x in xs]


def like_tensor(size: int) -> Tensor:
    return torch.arange(8.0, dtype=torch.float64).view(4, 2)


def sent(tag: str) -> str:
    return f'mc.send(x, "dp", 1{tag}) if me == 0 else mc.recv("dp", 0, shape=x.shape, dtype=x.dtype{tag})'


WEIGHT = torch.arange(6.0, dtype=torch.float64).view(3, 2)
NONE: Oracle = lambda xs, i: None  # noqa: E731
CUT: Oracle = lambda xs, i: like_tensor(0).chunk(len(xs))[i]  # noqa: E731
OBJECTS: Oracle = lambda xs, i: [{"from": j} for j in range(len(xs))]  # noqa: E731
ORACLES: dict[str, Oracle] = {
    'mc.all_reduce(x, "dp")': total, 'mc.all_reduce(x, "tp")': total, "mc.all_reduce(x, mesh.axis_names)": total,
    'mc.all_reduce(x, ("dp", "tp"))': total, 'mc.all_reduce(x, "dp", async_op=True).wait()': total,
    'mc.all_reduce(x, "tp", async_op=True).wait()': total, 'mc.pvary(mc.all_reduce(x, "dp"), "dp")': total,
    'mc.all_reduce(x, "dp", "sum")': total, 'mc.all_gather(xs, "dp")': lambda xs, i: [torch.cat([x + j for x in xs]) for j in range(2)],
    'mc.all_reduce(x, "dp", async_op=True).then(torch.sum).wait()': lambda xs, i: total(xs, i).sum(),
    'mc.all_reduce(x > 12, "dp", "band")': lambda xs, i: (xs[0] > 12) & (xs[1] > 12), 'mc.all_reduce(x > 12, "dp", "bor")': lambda xs, i: (xs[0] > 12) | (xs[1] > 12),
    'mc.all_reduce(x > 12, "dp", "bxor")': lambda xs, i: (xs[0] > 12) ^ (xs[1] > 12),
    'mc.argmax(x, "dp")': lambda xs, i: torch.stack(xs).argmax(0), 'mc.argmin(x, "dp")': lambda xs, i: torch.stack(xs).argmin(0),
    'mc.all_gather(x[None], "dp").logsumexp(0)': lambda xs, i: torch.stack(xs).logsumexp(0),
    'mc.send_object(obj, "dp", 1) if me == 0 else mc.recv_object("dp", 0)': only(1, lambda xs, i: {"from": 0}),
    'mc.all_gather_object(obj, "dp")[1 - me]': lambda xs, i: {"from": 1 - i},
    '[row[me] for row in mc.all_gather_object(objs, "dp")]': lambda xs, i: [f"for {i}"] * 2,
    'sum(mc.all_gather_object(me, "dp")[: me + 1])': lambda xs, i: sum(range(i + 1)),
    'mc.wait([mc.all_reduce(x, "dp", async_op=True), mc.shift(x, "dp", 1, async_op=True)])': lambda xs, i: [total(xs, i), xs[i - 1]],
    'torch.stack([mc.shift(x, "dp", 1), mc.shift(x, "dp", -1)])': lambda xs, i: torch.stack([xs[i - 1], xs[(i + 1) % 2]]),
    'torch.stack([mc.shift(x[1], "dp", 1), mc.shift(x[0], "dp", -1)])': lambda xs, i: torch.stack([xs[i - 1][1], xs[(i + 1) % 2][0]]),
    'mc.broadcast(x, "dp", 0, async_op=True).wait()': lambda xs, i: xs[0], 'mc.all_to_all(x, "dp", 0, 0, async_op=True).wait()': swapped(0, 0),
    'mc.barrier("dp", async_op=True).wait()': NONE,
    'mc.all_to_all(pair.unsqueeze(2), "dp", 0, 2).squeeze(0)': lambda xs, i: torch.stack([x.view(2, 4)[i] for x in xs], 1),
    'mc.all_to_all(pair, "dp", 0, 0)': lambda xs, i: torch.stack([x.view(2, 4)[i] for x in xs]),
    'mc.axis_size("tp")': lambda xs, i: 2, 'mc.varying_axes(mc.mark_varying(x, "dp"))': lambda xs, i: frozenset({"dp"}),
    'mc.reshard(same, "a b -> (dp a) b")': CUT, 'mc.layout_of(("dp", None), "a b")': lambda xs, i: "(dp a) b",
    'mc.layout_from(mc.placements("(tp a) b"), "a b")': lambda xs, i: "(tp a) b", 'mc.placements("(tp a) b")': lambda xs, i: (Replicate(), Shard(0)),
    'mc.einsum("(tp a) b -> a", x)': lambda xs, i: torch.cat(xs).sum(1), 'mc.einsum("(dp a) b, b c -> (dp a) c", x, x.T)': lambda xs, i: xs[i] @ xs[i].T,
    'list(mc.MeshBatchSampler(4, 2, "dp", shuffle=False))': lambda xs, i: [[i], [i + 2]],
    'same[me :: mc.axis_size("dp")]': lambda xs, i: like_tensor(0)[i::2],
    'mc.shard_map(torch.sin, mesh=mesh, in_specs="(dp a) b", out_specs="(dp a) b", check_vma=False)(same)': lambda xs, i: like_tensor(0).sin(),
    'mc.parallel.column_linear(same, weight, axis="tp")': lambda xs, i: like_tensor(0) @ WEIGHT.T,
    'mc.parallel.row_linear(x, weight, axis="tp")': lambda xs, i: total(xs, i) @ WEIGHT.T,
    'mc.parallel.vocab_embedding(ids, weight, axis="tp")': lambda xs, i: torch.cat([WEIGHT, WEIGHT])[:4],
    'mc.parallel.vocab_cross_entropy(x, ids, axis="tp")': lambda xs, i: torch.nn.functional.cross_entropy(torch.cat(xs, 1), torch.arange(4)),
    'mc.parallel.context_attention(heads, heads, heads, axis="tp", causal=False)': lambda xs, i: torch.nn.functional.scaled_dot_product_attention(xs[i], torch.cat(xs), torch.cat(xs)).view(1, 1, 4, 2),
    'mc.parallel.context_order(8, "tp")': lambda xs, i: torch.tensor([0, 1, 6, 7, 2, 3, 4, 5]),
    'mc.parallel.linear_cross_entropy(same, weight, ids, axis="tp")': lambda xs, i: torch.nn.functional.cross_entropy(like_tensor(0) @ torch.cat([WEIGHT, WEIGHT]).T, torch.arange(4)),
    'mc.parallel.sequence_layer_norm(x, axis="tp")': lambda xs, i: torch.nn.functional.layer_norm(xs[i], (2,)),
    'mc.parallel.sequence_rms_norm(x, axis="tp")': lambda xs, i: torch.nn.functional.rms_norm(xs[i], (2,)),
    'mc.all_reduce(x, "dp", "mean")': lambda xs, i: torch.stack(xs).mean(0),
    'mc.all_reduce(x, "dp", "max")': lambda xs, i: torch.stack(xs).amax(0),
    'mc.all_reduce(x, "dp", "min")': lambda xs, i: torch.stack(xs).amin(0),
    'mc.all_reduce(x, "dp", "product")': lambda xs, i: torch.stack(xs).prod(0),
    'mc.all_reduce(x.long(), "dp", "band")': lambda xs, i: xs[0].long() & xs[1].long(),
    'mc.all_reduce(x.long(), "dp", "bor")': lambda xs, i: xs[0].long() | xs[1].long(),
    'mc.all_reduce(x.long(), "dp", "bxor")': lambda xs, i: xs[0].long() ^ xs[1].long(),
    'mc.all_reduce(0.5 * x, "dp")': lambda xs, i: 0.5 * total(xs, i),
    'mc.all_reduce(xs, "dp")': lambda xs, i: [total(xs, i) + 2 * j for j in range(2)],
    'mc.all_reduce(metrics, "dp")': lambda xs, i: {"loss": total(xs, i)[0], "seen": torch.tensor(1)},
    'mc.all_reduce(losses, "dp", "mean")': lambda xs, i: torch.stack(xs).mean(0)[0],
    'mc.all_gather(x, "dp")': gathered, 'mc.all_gather(x, "tp")': gathered, 'mc.all_gather(x, "tp", 0)': gathered,
    'mc.all_gather_invariant(x, "dp")': gathered, 'mc.all_gather_invariant(x, "tp")': gathered,
    'mc.all_gather(x, "tp", -1)': lambda xs, i: torch.cat(xs, -1), 'mc.all_gather_invariant(x, "tp", -1)': lambda xs, i: torch.cat(xs, -1),
    'mc.all_gather(x[None], "dp")': lambda xs, i: torch.stack(xs), 'mc.all_gather(x[None], "dp").unbind()': lambda xs, i: xs,
    'mc.all_gather(ragged, "dp", sizes=[1, 3])': lambda xs, i: torch.cat([xs[0][:1], xs[1][:3]]),
    'mc.reduce_scatter(x, "dp")': rows_of, 'mc.reduce_scatter(x, "tp")': rows_of, 'mc.reduce_scatter(x, "tp", 0)': rows_of,
    'mc.reduce_scatter(x, "tp", -1)': lambda xs, i: total(xs, i).chunk(2, -1)[i],
    'mc.reduce_scatter(torch.stack(xs), "dp")[0]': lambda xs, i: sum(part[i] for part in lists(xs)),
    'mc.reduce_scatter(pair, "dp")[0]': lambda xs, i: total(xs, i).view(2, 4)[i],
    'mc.reduce_scatter(x, "dp", sizes=[1, 3])': lambda xs, i: total(xs, i).split([1, 3])[i],
    'mc.all_to_all(x, "dp", 0, 0)': swapped(0, 0), 'mc.all_to_all(x, "tp", 0, 0)': swapped(0, 0), 'mc.all_to_all(x, "dp", 0, 1)': swapped(0, 1),
    'mc.all_to_all(x, "tp", 0, 1)': swapped(0, 1), 'mc.all_to_all(x, "tp", 1, 0)': swapped(1, 0),
    'mc.all_to_all(x, "dp", 0, 0, input_splits, output_splits)': uneven, 'mc.all_to_all(x, "tp", 0, 0, input_splits, output_splits)': uneven,
    'mc.all_to_all(torch.stack(xs), "dp", 0, 0).unbind()': lambda xs, i: [part[i] for part in lists(xs)],
    'mc.broadcast(x, "dp", 0)': lambda xs, i: xs[0], 'mc.broadcast(x, "tp", 0)': lambda xs, i: xs[0], 'mc.broadcast(x, "dp", 1)': lambda xs, i: xs[1],
    'mc.broadcast(metrics, "tp")': lambda xs, i: {"loss": xs[0][0], "seen": torch.tensor(0)},
    'mc.reduce(x, "dp", 0)': only(0, total), 'mc.reduce(x, "dp", 1)': only(1, total),
    'mc.gather(x, "dp")': only(0, gathered), 'mc.gather(x, "dp", 1)': only(1, gathered), 'mc.gather(x[None], "dp")': only(0, lambda xs, i: torch.stack(xs)),
    'mc.scatter(torch.stack(xs) if me == 0 else None, "dp")[0]': lambda xs, i: lists(xs)[0][i],
    sent(", tag=3"): only(1, lambda xs, i: xs[0]), f"({sent(', async_op=True')}).wait()": only(1, lambda xs, i: xs[0]),
    'mc.exchange([(x, 1 - me)], [(1 - me, x.shape, x.dtype)], "dp")': lambda xs, i: [xs[1 - i]],
    'mc.exchange([(x, 1 - me)], [(1 - me, x.shape, x.dtype)], "dp")[0]': lambda xs, i: xs[1 - i],
    'mc.shift(x, "dp", 1)': lambda xs, i: xs[i - 1], 'mc.shift(x, "tp", 1, wrap=False)': lambda xs, i: xs[0] if i else torch.zeros_like(xs[0]),
    'mc.permute(x, "tp", [(0, 1), (1, 0)])': lambda xs, i: xs[1 - i], 'mc.permute(x, "dp", [(0, 1)])': lambda xs, i: xs[0] if i else torch.zeros_like(xs[0]),
    'mc.permute(x, "dp", [(source, index) for index, source in enumerate([1, 0])])': lambda xs, i: xs[1 - i],
    'mc.pvary(x, "dp")': lambda xs, i: xs[i], 'mc.pvary(x, "tp")': lambda xs, i: xs[i],
    'mc.shard(same, "tp")': CUT, 'mc.shard(same, "tp", -1)': lambda xs, i: like_tensor(0).chunk(2, -1)[i],
    'mc.reshard(same, "a b -> (tp a) b")': CUT, 'mc.reshard(x, "(tp a) b -> a (tp b)")': swapped(1, 0), 'mc.reshard(x, "(tp a) b -> a b")': gathered,
    'mc.shard_map(torch.sin, mesh=mesh, in_specs="(dp a) b", out_specs="(dp a) b")(same)': lambda xs, i: like_tensor(0).sin(),
    'mc.barrier("dp")': NONE, 'mc.barrier("dp", timeout=60)': NONE, "mc.barrier(mesh.axis_names)": NONE,
    'mc.broadcast_object(obj, "dp")': lambda xs, i: {"from": 0}, 'mc.broadcast_object(obj, "dp", 1)': lambda xs, i: {"from": 1},
    "mc.broadcast_object(obj, mesh.axis_names)": lambda xs, i: {"from": 0},
    'mc.all_gather_object(obj, "dp")': OBJECTS, "mc.all_gather_object(obj, mesh.axis_names)": OBJECTS, 'mc.gather_object(obj, "dp")': only(0, OBJECTS),
    'mc.gather_object(ragged, "dp")': only(0, lambda xs, i: [xs[0][:1], xs[1][:3]]),
    'mc.scatter_object(objs if me == 0 else None, "dp")': lambda xs, i: f"for {i}",
    'mc.scatter_object(xs if me == 0 else None, "dp")': lambda xs, i: xs[0] + i,
    'sum(mc.all_gather_object(me, "dp"))': lambda xs, i: 1,
    'mc.scan(x, "dp")': lambda xs, i: torch.stack(xs[: i + 1]).sum(0),
    'mc.scan(x, "dp", exclusive=True)': lambda xs, i: torch.stack([0 * xs[0], *xs[:i]]).sum(0),
    'mc.collect_results(parts, 3, "dp", order="stride")': only(0, lambda xs, i: ["sample 0", "sample 1", "sample 2"]),
    'mc.collect_results(parts, 3, "dp", order="stride", tmpdir=tmpdir)': only(0, lambda xs, i: ["sample 0", "sample 1", "sample 2"]),
    'mc.collect_results(parts, 3, "dp", order="stride", device=mc.device())': only(0, lambda xs, i: ["sample 0", "sample 1", "sample 2"]),
    'mc.weighted_mean(x.sum(), 2 + me, "dp")': lambda xs, i: total(xs, i).sum() / 5,
    'mc.axis_index("dp")': lambda xs, i: torch.tensor(i), 'mc.axis_size("dp")': lambda xs, i: 2,
    'mesh.coordinate["tp"]': lambda xs, i: i, "mc.world_size()": lambda xs, i: 4, "mc.local_world_size()": lambda xs, i: 4, "mc.node_rank()": lambda xs, i: 0,
    "mc.backend()": lambda xs, i: "in-process", "mc.device()": lambda xs, i: torch.device("cpu"), "mc.is_distributed()": lambda xs, i: True,
    "mc.main_only(broadcast=True)(dict)(lr=0.1)": lambda xs, i: {"lr": 0.1},
}  # fmt: skip

# By the rank of the world.
BY_RANK: dict[str, Callable[[int], Any]] = {
    "mc.rank()": lambda r: r, "mc.local_rank()": lambda r: r, "mc.get_dist_info()": lambda r: (r, 4), "mc.is_main()": lambda r: r == 0,
    "mc.main_only(str)(7)": lambda r: "7" if r == 0 else None,
    'mc.axis_index(("dp", "tp"))': lambda r: torch.tensor(r),
    'mesh.axis("tp").ranks[1]': lambda r: 1 if r < 2 else 3,
    'mesh.axis("tp").ranks': lambda r: (0, 1) if r < 2 else (2, 3),
    "mesh.rank": lambda r: r, 'mesh.coordinate["dp"]': lambda r: r // 2, "mesh.size": lambda r: 4, 'mesh.shape["dp"]': lambda r: 2,
    "mesh.axis_names": lambda r: ("dp", "tp"), "len(mesh.shape)": lambda r: 2, "mesh.ranks": lambda r: (0, 1, 2, 3),
    "mesh.device": lambda r: torch.device("cpu"), "tuple(mesh.shape.values())": lambda r: (2, 2), "mesh.shape": lambda r: {"dp": 2, "tp": 2},
    "mesh.coordinate": lambda r: {"dp": r // 2, "tp": r % 2},
}  # fmt: skip


def meshes(code: str, found: mc.Mesh, rank: int) -> bool:
    if "pair" in code:
        return found.shape == {"pair": 2} and (rank not in (0, 3) or found.rank == (rank == 3))
    return found.shape == {"dp": 2, "tp": 2} and found.rank == rank


def alike(names: list[dict[str, Any]], *groups: list[int]) -> bool:
    """The ranks of each group have drawn the same, and the groups differ."""
    drawn = [[tuple(names[rank]["drawn"].tolist()) for rank in group] for group in groups]
    return all(len(set(each)) == 1 for each in drawn) and drawn[0] != drawn[1]


def cut_in_pairs(calls: tuple[str, ...]) -> Callable[[list[Any], list[dict[str, Any]]], bool]:
    """Each rank has its columns of ``up`` and its rows of ``down`` (of a flat shard: half as many numbers), and these calls
    were made of it.
    """

    def judge(found: list[Any], names: list[dict[str, Any]]) -> bool:
        whole: Mlp = modules_in("model")["model"]
        right = []
        for rank, each in enumerate(names):
            up, down = each["model"].up.weight, each["model"].down.weight
            columns, rows = whole.up.weight.chunk(2)[rank % 2], whole.down.weight.chunk(2, 1)[rank % 2]
            if any(call.startswith("fully_shard") for call in calls):
                right.append((up.numel() + down.numel()) * 2 == columns.numel() + rows.numel())
            else:
                right.append(torch.equal(up, columns) and torch.equal(down, rows))
            made = mc.parallel.parallel_calls(each["model"]) if calls else ()
            right.append([call.partition("(")[0] for call in made] == [call.partition("(")[0] for call in calls])
            right.append(all(call in made for call in calls[1:]))
            right.append(found[rank] is each["model"] or found[rank] == made)
        return all(right)

    return judge


PAIR = ("tensor_parallel", "data_parallel(model, 'dp', grads='mean')")


# Changes in place, or gives what only all ranks together can judge.
TOGETHER: dict[str, Callable[[list[Any], list[dict[str, Any]]], bool]] = {
    'mc.all_reduce_params(params, "dp")': lambda found, names: all(
        torch.equal(names[r]["params"][0], x_of(r % 2) + x_of(r % 2 + 2)) for r in range(4)
    ),
    'mc.sync_seed("dp")': lambda found, names: (
        found[0] == found[2] and found[1] == found[3] and isinstance(found[0], int)
    ),
    'mc.Metrics({"loss": "mean"}).reduce("dp")': lambda found, names: all(list(f) == ["loss"] for f in found),
    "with mc.use_mesh(mesh): found = mc.current_mesh()": lambda found, names: all(
        each["found"] is each["mesh"] for each in names
    ),
    'str(mc.plan("a b -> (dp a) b", (4, 2)))': lambda found, names: all("a b -> (dp a) b" in each for each in found),
    'with mc.rng("(dp a) b", seed=0): drawn = torch.rand(2, 3)': lambda found, names: (
        torch.equal(names[0]["drawn"], names[1]["drawn"]) and not torch.equal(names[0]["drawn"], names[2]["drawn"])
    ),
    **dict.fromkeys(
        (
            "with mc.parallel.no_sync(replica): replica(x).sum().backward()",
            "with mc.parallel.join(replica): replica(x).sum().backward()",
        ),
        lambda found, names: all(p.grad is not None for each in names for p in each["replica"].parameters()),
    ),
    "with mc.parallel.gathered(sharded): sharded(x).sum().backward()": lambda found, names: all(
        p.grad is not None for each in names for p in each["sharded"].parameters()
    ),
    'mc.parallel.fully_shard([model.up, model.down], "dp", grads="mean")': lambda found, names: all(
        mine == [each["model"].up, each["model"].down] for mine, each in zip(found, names, strict=True)
    ),
    'mc.parallel.Block("enter", "leave")': lambda found, names: found == [mc.parallel.Block("enter", "leave")] * 4,
    GATHERED: lambda found, names: all(mine is each["model"] for mine, each in zip(found, names, strict=True)),
    **dict.fromkeys(
        (
            'mc.parallel.data_parallel(model, "dp", grads="mean")',
            'mc.parallel.convert_batch_norm(model, "dp")',
            'mc.parallel.fully_shard(model, "dp", grads="mean")',
            'mc.parallel.fully_shard(model, "dp", grads="mean", units=["up", "down"])',
            'mc.parallel.fully_shard(model, "tp", grads="mean", replica_axis="dp")',
            'mc.parallel.fully_shard(model, "dp", grads="mean", param_dtype=torch.bfloat16)',
            'mc.parallel.fully_shard(model, "dp", grads="mean", regather=False)',
            'mc.parallel.fully_shard(model, "dp", grads="mean", reduce_dtype=torch.float32)',
            'mc.parallel.fully_shard(model, "dp", grads="mean", offload=True)',
            'mc.parallel.fully_shard(model, "dp", grads="mean", ignore=["down.bias"])',
            'mc.parallel.fully_shard(model, "dp", grads="mean", whole=True)',
            'mc.parallel.fully_shard(model, "dp", grads="mean", prefetch=2)',
            'mc.parallel.fully_shard(model, "dp", grads="sum")',
            'mc.parallel.fully_shard(model, "dp", grads="mean", methods=["encode"])',
            'mc.parallel.data_parallel(model, "dp", grads="mean", bucket_mb=5, buffers="leave")',
            'mc.parallel.data_parallel(model, "dp", grads="mean", reduce_dtype=torch.bfloat16)',
            'mc.parallel.data_parallel(model, "dp", grads="mean", ignore=["down.bias"])',
            'mc.parallel.tensor_parallel(model, {"up": "column", "down": "row"}, axis="tp")',
            'mc.parallel.tensor_parallel(model, {"up": "column", "down": "row"}, axis="tp", sequence=True)',
        ),
        lambda found, names: all(mine is each["model"] for mine, each in zip(found, names, strict=True)),
    ),
    'mc.parallel.tensor_parallel(model, "auto", axis="tp")': cut_in_pairs(()),
    'mc.parallel.parallelize(model, mesh, grads="mean")': cut_in_pairs(PAIR),
    'mc.parallel.parallel_calls(mc.parallel.parallelize(model, mesh, grads="mean"))': cut_in_pairs(PAIR),
    'mc.parallel.parallelize(model, mesh, grads="mean", axes={"dp": "fsdp"})': cut_in_pairs(
        ("tensor_parallel", "fully_shard(model, 'dp', grads='mean')")
    ),
    'dict(mc.parallel.auto_plan(model, "tp"))': lambda found, names: found == [{"up": "column", "down": "row"}] * 4,
    "mc.parallel.full_state_dict(sharded)": lambda found, names: all(
        torch.equal(each["down.bias"], found[0]["down.bias"]) and len(each) == 4 for each in found
    ),
    "mc.parallel.save_full_state_dict(sharded, tmpdir)": lambda found, names: found == [None] * 4,
    "mc.parallel.load_full_state_dict(sharded, state)": lambda found, names: (
        not any(each.missing_keys for each in found)
    ),
    'mc.parallel.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), "dp")': lambda found, names: all(
        isinstance(each, torch.optim.SGD) for each in found
    ),
    "mc.parallel.clip_grad_norm(sharded, 1.0)": lambda found, names: [norm.item() for norm in found] == [0.0] * 4,
    "mc.parallel.checkpoint.save(tmpdir, sharded)": lambda found, names: (
        len(set(found)) == 1 and Path(found[0]).exists()
    ),
    "mc.parallel.checkpoint.load(mc.parallel.checkpoint.save(tmpdir, sharded), sharded)": lambda found, names: all(
        isinstance(each, mc.parallel.checkpoint.Checkpoint) for each in found
    ),
    'with mc.fork_rng("tp"): drawn = torch.rand(2)': lambda found, names: alike(names, [0, 2], [1, 3]),
    'with mc.fork_rng("dp"): drawn = torch.rand(2)': lambda found, names: alike(names, [0, 1], [2, 3]),
}


# ------------------------------------------------------------------------------------------------------------- tests


def check(found: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected)
    elif isinstance(expected, (list, tuple)) and any(isinstance(part, Tensor) for part in expected):
        for mine, theirs in zip(found, expected, strict=True):
            check(mine, theirs)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            check(found[key], value)
    else:
        assert found == expected


@pytest.mark.parametrize("code", WITHIN)
def test_within_ranks(code: str, tmp_path: Path) -> None:
    names: list[dict[str, Any]] = [names_of(rank, code, str(tmp_path)) for rank in range(4)]

    def main() -> Any:
        mesh = mc.make_mesh({"dp": 2, "tp": 2})
        mine = names[mesh.rank]
        mine["mesh"] = mesh
        before = mine["x"].clone()
        with mc.use_mesh(mesh):
            mine |= modules_in(code)
            found = evaluate(code, mine)
            if isinstance(found, mc.Mesh):
                return meshes(code, found, mesh.rank)
        assert torch.equal(mine["x"], before) or code in TOGETHER, "inputs are left alone"
        return found

    found = mc.launch(main, ranks=4)
    if "make_mesh" in code:
        assert found == [True] * 4
    elif code in TOGETHER:
        assert TOGETHER[code](found, names)
    else:
        for rank, mine in enumerate(found):
            group = next(ranks for ranks in AXES[axis_in(code)] if rank in ranks)
            xs = [x_of(other) for other in group]
            check(mine, BY_RANK[code](rank) if code in BY_RANK else ORACLES[code](xs, group.index(rank)))


def test_every_line_has_an_oracle_and_every_oracle_a_line() -> None:
    known = {*ORACLES, *BY_RANK, *TOGETHER}
    assert {code for code in WITHIN if "make_mesh" not in code} == known


ALONE = ("mc.init()", "mc.init(guard=True)")
"""In a plain process there is nobody to meet."""


def ranks_here() -> int:
    return int(dist.is_initialized()) + 1


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    world.shutdown()
    yield monkeypatch
    world.shutdown()


@pytest.mark.parametrize("code", STARTING)
def test_starting_and_ending(code: str, plain: pytest.MonkeyPatch) -> None:
    """In a process of its own, a world of one."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    names = {
        "mc": mc,
        "backend": "gloo",
        "url": f"tcp://127.0.0.1:{port}",
        "r": 0,
        "n": 1,
        "t": 20,
        "store": dist.HashStore(),
        "p": port,
        "fn": ranks_here,
    }
    if "launcher=" in code:
        plain.setenv("RANK", "0")
        plain.setenv("WORLD_SIZE", "1")
    if code == 'mc.init(backend="mpi")' and not dist.is_mpi_available():
        with pytest.raises(mc.MeshError, match="backend 'mpi' is not available on this machine"):
            evaluate(code, names)
        return
    names["mesh"] = mc.make_mesh({"dp": 1}) if "mesh." in code else None
    found = evaluate(code, names)
    here = world.current()
    if "mc.init(" in code and code not in ALONE:
        assert here is not None
        assert (here.rank, here.size) == (0, 1)
    elif "launch(" in code:
        assert found == [2 if "processes" in code else 1]
    elif "get_group" in code:
        assert found.size() == 1
    elif "from_device_mesh" in code:
        assert found.shape == {"dp": 1}
    else:
        assert code in (*ALONE, "mc.shutdown()"), code
        assert here is None


# What people call, by library; each stands on a left-hand side.
IN_USE = {
    "dist.": "init_process_group destroy_process_group is_initialized get_rank get_world_size get_backend get_node_local_rank new_group new_subgroups"
    " all_reduce all_reduce_coalesced all_gather all_gather_into_tensor reduce_scatter reduce_scatter_tensor all_to_all all_to_all_single broadcast"
    " reduce gather scatter send recv isend irecv batch_isend_irecv barrier monitored_barrier broadcast_object_list all_gather_object gather_object"
    " scatter_object_list group.WORLD",
    "ReduceOp.": "AVG MAX MIN PRODUCT BAND BOR BXOR PREMUL_SUM",
    "funcol.": "all_reduce all_gather_tensor reduce_scatter_tensor all_to_all_single permute_tensor broadcast wait_tensor",
    "lax.": "psum pmean pmax pmin all_gather all_gather_invariant psum_scatter all_to_all ppermute pshuffle pbroadcast pvary pcast axis_index axis_size",
    "comm.": "Get_rank Get_size Allreduce allreduce Allgather Allgatherv Reduce_scatter_block Reduce_scatter Alltoall Alltoallv Bcast Reduce Gather Gatherv"
    " Scatter Scatterv Send Recv Sendrecv Isend Iallreduce Scan Exscan bcast allgather gather scatter Barrier Split",
    "": "init_dist infer_launcher cleanup_dist get_dist_info get_local_rank get_local_size get_comm_device is_distributed is_main_process master_only"
    " get_default_group get_local_group destroy_group all_reduce_dict all_reduce_params sync_random_seed broadcast_object_list all_gather_object gather_object"
    " collect_results collect_results_cpu collect_results_gpu P2POp cast_data_device get_data_device"
    " copy_to_tensor_model_parallel_region reduce_from_tensor_model_parallel_region scatter_to_tensor_model_parallel_region"
    " gather_from_tensor_model_parallel_region scatter_to_sequence_parallel_region gather_from_sequence_parallel_region"
    " reduce_scatter_to_sequence_parallel_region all_gather_last_dim_from_tensor_parallel_region reduce_scatter_last_dim_to_tensor_parallel_region"
    " all_to_all_sp2hp all_to_all_hp2sp average_losses_across_data_parallel_group broadcast_data init_device_mesh TCPStore FileStore",
}


@pytest.mark.parametrize("library", IN_USE)
def test_nothing_in_common_use_is_missing(library: str) -> None:
    left = " ".join(cell for _, cell, _ in ROWS) + PAGE.read_text()
    assert not [
        name for name in IN_USE[library].split() if not re.search(rf"(?<![\w.]){re.escape(library + name)}(?!\w)", left)
    ]


def test_left_hand_sides_of_torch_exist() -> None:
    for name in re.findall(r"(?<![\w.])dist\.(\w+)", PAGE.read_text()):
        assert hasattr(dist, name) or name == "nn", name
