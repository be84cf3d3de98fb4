"""A whole training step in one compiled graph: eager's numbers, fewer waits with inductor's bucketing, and no rank in the graph.

Compiling is slow: what is compiled is shared by several tests.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from cases import OLD
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.utils import run_and_get_code
from torch.func import functional_call, grad_and_value
from torch.testing import assert_close
from torch.utils import _pytree as pytree

import meshcomm as mc
from meshcomm.parallel import data_parallel, fsdp, full_state_dict, fully_shard, no_sync, tensor_parallel
from meshcomm.runtime.transports.process_group import ProcessLink

F64 = torch.float64
WIDTH, HIDDEN, BLOCKS, STEPS = 4, 8, 1, 3
# Four ranks share this machine's cores while they compile.
pytestmark = pytest.mark.thorough

# Names of inductor's configuration, as torch.compile(options=) takes them. Loops over vectors take the C++ compiler half as
# long again; a cached graph shows no code.
SCALAR: dict[str, Any] = {"cpp.simdlen": 1}
PLAIN = SCALAR | {"fx_graph_cache": False}
BUCKETED = PLAIN | dict.fromkeys(("bucket_all_gathers_fx", "bucket_reduce_scatters_fx", "bucket_all_reduces_fx"), "all")
OVERLAPPED = PLAIN | {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": [
        "reorder_communication_preserving_peak_memory",
        "sink_waits_iterative",
        "reorder_communication_preserving_peak_memory",
    ],
}


def compiled(fn: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True, backend="inductor", dynamic=False, options=options)


def without_group_names(code: str, mesh: mc.Mesh) -> str:
    """The code with each process group called by its axis: which group it is may differ between ranks."""
    called = {dist.group.WORLD.group_name: "world"}
    links = {axis: mesh.axis(axis).link for axis in mesh.axis_names}
    called |= {link.group.group_name: axis for axis, link in links.items() if isinstance(link, ProcessLink)}
    for name, axis in called.items():
        code = re.sub(rf"""['"]{re.escape(name)}['"]""", f"<{axis}>", code)
    return code


def calls_in(code: str) -> list[str]:
    """The collectives and waits of generated code, and its matrix products as "mm", in order."""
    found = re.findall(r"_c10d_functional\.(\w+)\.default\(|extern_kernels\.\w*(mm)\(", code)
    return [collective.removesuffix("_out").rstrip("_") or mm for collective, mm in found]


# --------------------------------------------------------------------------------------------------- training steps


def parameters(mesh: mc.Mesh) -> dict[str, Any]:
    """Weights cut over tp and then over dp, as FSDP has them; gains and biases that every rank holds."""
    numbers = torch.Generator().manual_seed(0)

    def shard(shape: tuple[int, int], dim: int) -> Tensor:
        whole = torch.randn(shape, dtype=F64, generator=numbers) / 2
        return mc.shard(mc.shard(whole, "tp", dim, mesh=mesh), "dp", mesh=mesh)

    return {
        "shards": [{"up": shard((WIDTH, HIDDEN), 1), "down": shard((HIDDEN, WIDTH), 0)} for _ in range(BLOCKS)],
        "whole": [{"gain": torch.ones(WIDTH, dtype=F64), "bias": torch.zeros(WIDTH, dtype=F64)} for _ in range(BLOCKS)],
    }


def batch(mesh: mc.Mesh) -> tuple[Tensor, Tensor]:
    """This rank's data: different along dp, the same along tp."""
    numbers = torch.Generator().manual_seed(1 + mesh.coordinate["dp"])
    return torch.randn(3, WIDTH, dtype=F64, generator=numbers), torch.randn(3, WIDTH, dtype=F64, generator=numbers)


def loss_on(mesh: mc.Mesh) -> Callable[..., Tensor]:
    def loss(params: dict[str, Any], x: Tensor, target: Tensor) -> Tensor:
        whole = mc.pvary(params["whole"], "dp", mesh=mesh)
        for shards, w in zip(params["shards"], whole, strict=True):
            up, down = (mc.all_gather(shards[name], "dp", mesh=mesh) for name in ("up", "down"))
            hidden = (mc.pvary(x * w["gain"], "tp", mesh=mesh) @ up).tanh()
            x = x + mc.all_reduce(hidden @ down, "tp", mesh=mesh) + w["bias"]
        return mc.all_reduce((x - target).square().mean(), "dp", "mean", mesh=mesh)

    return loss


def step_on(mesh: mc.Mesh) -> Callable[..., Any]:
    """Forward, backward and SGD with momentum as one function without side effects."""
    gradient = grad_and_value(loss_on(mesh))

    def step(params: Any, momentum: Any, x: Tensor, target: Tensor) -> tuple[Any, Any, Tensor]:
        grads, loss = gradient(params, x, target)
        momentum = pytree.tree_map(lambda m, g: 0.9 * m + g, momentum, grads)
        return pytree.tree_map(lambda p, m: p - 0.1 * m, params, momentum), momentum, loss

    return step


def train(step: Callable[..., Any], mesh: mc.Mesh) -> tuple[list[Tensor], list[Tensor]]:
    """The losses of some steps and the parameters after them."""
    params, losses = parameters(mesh), []
    momentum = pytree.tree_map(torch.zeros_like, params)
    for _ in range(STEPS):
        params, momentum, loss = step(params, momentum, *batch(mesh))
        losses.append(loss)
    return losses, pytree.tree_leaves(params)


class Trained(NamedTuple):
    losses: list[Tensor]
    params: list[Tensor]
    code: str


def training() -> dict[str, Trained]:
    mesh = mc.make_mesh({"dp": 2, "tp": 2})
    found = {"eager": Trained(*train(step_on(mesh), mesh), "")}
    for name, options in {"plain": PLAIN, "bucketed": BUCKETED, "overlapped": OVERLAPPED}.items():
        (losses, params), codes = run_and_get_code(train, compiled(step_on(mesh), options), mesh)
        (code,) = codes  # forward, backward and update are one graph, compiled once
        found[name] = Trained(losses, params, without_group_names(code, mesh))
    return found


@pytest.fixture(scope="module")
def trained(pool4: Any) -> list[dict[str, Trained]]:
    """What each rank found."""
    found: list[dict[str, Trained]] = pool4.run(training)
    return found


@pytest.mark.parametrize("how", ["plain", "bucketed", "overlapped"])
def test_a_compiled_step_gives_eagers_numbers(trained: list[dict[str, Trained]], how: str) -> None:
    for rank, found in enumerate(trained):
        assert found["eager"].losses[-1] < found["eager"].losses[0]
        for part in ("losses", "params"):
            actual, expected = getattr(found[how], part), getattr(found["eager"], part)
            assert_close(
                actual, expected, rtol=1e-12, atol=1e-12, msg=lambda text: f"{part} of {how} on rank {rank}: {text}"
            )


def test_bucketing_leaves_fewer_waits(trained: list[dict[str, Trained]]) -> None:
    """One gather and one scatter for all weights; of the all_reduces those remain that wait for each other."""
    plain, bucketed = (Counter(calls_in(trained[0][how].code)) for how in ("plain", "bucketed"))
    weights = 2 * BLOCKS
    assert plain["all_gather_into_tensor"] == plain["reduce_scatter_tensor"] == weights
    assert plain["all_reduce"] == BLOCKS + BLOCKS + 2  # after each block, before each in backward; the loss, pvary
    assert plain["wait_tensor"] == 2 * weights + plain["all_reduce"]
    assert bucketed["all_gather_into_tensor"] == bucketed["reduce_scatter_tensor"] == 1
    assert bucketed["all_reduce"] < plain["all_reduce"]
    assert bucketed["wait_tensor"] == 2 + bucketed["all_reduce"]


def test_overlap_passes_move_our_collectives(trained: list[dict[str, Trained]]) -> None:
    """The same calls; those whose input is there start before the first product, their waits come after it."""
    plain, overlapped = (calls_in(trained[0][how].code) for how in ("plain", "overlapped"))
    assert Counter(plain) == Counter(overlapped)
    before = overlapped[: overlapped.index("mm")]
    assert before.count("all_gather_into_tensor") == 2 * BLOCKS
    assert before.count("wait_tensor") == 1
    unasked = plain[: plain.index("mm")].count("all_gather_into_tensor") == 2 * BLOCKS  # since torch 2.15
    assert in_flight(overlapped) > in_flight(plain) - unasked
    assert in_flight(overlapped) > 1


def in_flight(calls: list[str]) -> int:
    """How many collectives are under way at most."""
    return max(accumulate({"wait_tensor": -1, "mm": 0}.get(call, 1) for call in calls))


@pytest.mark.parametrize("how", ["plain", "overlapped"])
def test_the_code_of_a_step_is_the_same_on_every_rank(trained: list[dict[str, Trained]], how: str) -> None:
    first, *others = (found[how].code for found in trained)
    assert first.count("<dp>")
    assert first.count("<tp>")
    for code in others:
        assert code == first


def test_bucketed_collectives_are_in_the_same_order_on_every_rank(trained: list[dict[str, Trained]]) -> None:
    """The code may differ: where a rank's part of a gathered bucket lies is a constant that inductor itself writes."""
    first, *others = (calls_in(found["bucketed"].code) for found in trained)
    assert others == [first] * 3


def two_graphs() -> tuple[list[list[str]], list[Tensor], list[Tensor]]:
    """The usual way: the loss is compiled, ``backward()`` is called on it."""
    mesh = mc.make_mesh({"dp": 2, "tp": 2})

    def gradients(loss: Callable[..., Tensor]) -> list[Tensor]:
        params = pytree.tree_map(lambda leaf: leaf.requires_grad_(), parameters(mesh))
        value = loss(params, *batch(mesh))
        value.backward()
        return [value.detach(), *(leaf.grad for leaf in pytree.tree_leaves(params))]

    actual, codes = run_and_get_code(gradients, compiled(loss_on(mesh), BUCKETED))
    return [calls_in(code) for code in codes], actual, gradients(loss_on(mesh))


def test_a_compiled_loss_and_its_backward_are_bucketed_too(pool4: Any) -> None:
    for codes, actual, expected in pool4.run(two_graphs):
        forward, backward = map(Counter, codes)
        assert_close(actual, expected, rtol=1e-12, atol=1e-12)
        assert forward["all_gather_into_tensor"] == backward["reduce_scatter_tensor"] == 1
        assert not forward["reduce_scatter_tensor"]
        assert not backward["all_gather_into_tensor"]


# ----------------------------------------------------------------------------------------- programs whose ranks differ


def programs(mesh: mc.Mesh) -> dict[str, Callable[[Tensor], Tensor]]:
    """Programs of one tensor [4] that do something else on each rank."""
    both = ("dp", "tp")
    short = 1 + mesh.coordinate["tp"]  # outside: in what is compiled a rank is a tensor

    def where(x: Tensor) -> Tensor:
        first = mc.axis_index("dp", mesh=mesh) == 0
        return mc.all_gather(mc.all_reduce(torch.where(first, x, -2 * x), "tp", mesh=mesh), "dp", mesh=mesh)

    def broadcast(x: Tensor) -> Tensor:
        return mc.broadcast(x * mc.axis_index("tp", mesh=mesh), both, src=2, mesh=mesh) * x

    def exchanged(x: Tensor) -> Tensor:
        x = mc.all_to_all(x * (1 + mc.axis_index(both, mesh=mesh)), "tp", 0, 0, mesh=mesh)
        return mc.reduce_scatter(x, "dp", mesh=mesh)

    def reduced(x: Tensor) -> Tensor:
        return mc.all_reduce(x, both, "max", mesh=mesh) + mc.all_reduce(x, ("tp", "dp"), "product", mesh=mesh)

    def shard(x: Tensor) -> Tensor:
        return mc.all_gather(mc.shard(mc.all_reduce(x, "tp", mesh=mesh), "tp", mesh=mesh) * 2, "dp", mesh=mesh)

    def invariant(x: Tensor) -> Tensor:
        return mc.all_gather_invariant(x * 2, "dp", mesh=mesh)

    def ring(x: Tensor) -> Tensor:
        return mc.shift(x * 2, both, mesh=mesh) + x

    def stages(x: Tensor) -> Tensor:
        return mc.shift(x * 3, both, wrap=False, mesh=mesh) + mc.shift(x * 4, "tp", -1, wrap=False, mesh=mesh)

    def permute(x: Tensor) -> Tensor:
        return mc.permute(x * 5, both, [(0, 3), (2, 1)], mesh=mesh)

    def ragged(x: Tensor) -> Tensor:
        return mc.all_gather(x[:short] * 6, "tp", sizes=(1, 2), mesh=mesh)

    def left_out(x: Tensor) -> Tensor:
        """On ranks 2 and 3 nothing is sent or kept: their exchange does not depend on any input."""
        return mc.permute(mc.all_gather(x * 2, both, mesh=mesh) * 3, both, [(0, 1)], mesh=mesh)

    def alike_on_some(x: Tensor) -> Tensor:
        """Two exchanges of one tensor that on ranks 1 and 2 are the same one."""
        return mc.shift(x, both, mesh=mesh) + mc.shift(x, both, wrap=False, mesh=mesh) * 2

    kept = (
        where, broadcast, exchanged, reduced, shard, invariant, ring, stages, permute, ragged, left_out, alike_on_some,
    )  # fmt: skip
    return {program.__name__: program for program in kept}


def value_and_gradient(fn: Callable[[Tensor], Any], mesh: mc.Mesh) -> tuple[list[Tensor], Tensor]:
    leaf = (torch.arange(1, 5, dtype=F64) + 10 * mesh.rank).requires_grad_()
    values = pytree.tree_leaves(fn(leaf))
    total = sum((y * torch.arange(3, 3 + y.numel(), dtype=F64)).sum() for y in values)
    (g,) = torch.autograd.grad(total, leaf)
    return [y.detach() for y in values], g


def differing_programs() -> tuple[Any, Any]:
    """Those whose graphs differ between ranks, in one function: what is compiled and what is not."""
    mesh = mc.make_mesh({"dp": 2, "tp": 2})
    every = {name: program for name, program in programs(mesh).items() if name not in ALIKE or name == "broadcast"}
    assert len(every) == 6

    def fn(x: Tensor) -> dict[str, Tensor]:
        return {name: program(x) for name, program in every.items()}

    return value_and_gradient(compiled(fn, SCALAR), mesh), value_and_gradient(fn, mesh)


def test_programs_whose_ranks_differ(pool4: Any) -> None:
    """Integers in floating point, moved and added: the same to the last bit. The last two have exchanges that only some
    ranks could leave out, which would end in a hang.
    """
    for actual, expected in pool4.run(differing_programs):
        assert_close(actual, expected, rtol=0, atol=0)


class Graphs(NamedTuple):
    """A program's graphs as text, forward and backward, and what came of them and of the program without them."""

    text: str
    found: Any
    expected: Any


def graphs() -> dict[str, Graphs]:
    mesh = mc.make_mesh({"dp": 2, "tp": 2})
    texts: list[str] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        texts.append(graph.print_readable(print_output=False))
        return make_boxed_func(graph)

    def graphs_of(fn: Callable[[Tensor], Tensor]) -> Graphs:
        texts.clear()
        torch._dynamo.reset()
        backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
        found = value_and_gradient(torch.compile(fn, fullgraph=True, backend=backend, dynamic=False), mesh)
        return Graphs(without_group_names("\n".join(texts), mesh), found, value_and_gradient(fn, mesh))

    rank = mesh.rank  # a Python number
    baked = {"python_number": lambda x: mc.all_gather(x * rank, "dp", mesh=mesh)}
    every = programs(mesh) | baked
    return {name: graphs_of(every[name]) for name in (*ALIKE, *baked)}


ALIKE = ["where", "broadcast", "exchanged", "reduced", "ring", "shard", "invariant"]
"""The programs whose graphs do not differ: of the others, which do, there is nothing to compare."""


@pytest.fixture(scope="module")
def kept(pool4: Any) -> list[dict[str, Graphs]]:
    found: list[dict[str, Graphs]] = pool4.run(graphs)
    return found


def addressed(text: str) -> str:
    """The text without how much goes to whom: to whom a rank sends says which rank it is."""
    return re.sub(r"(all_to_all_single\.default\(\w+), \[[\d, ]*\], \[[\d, ]*\]", r"\1, <sizes>", text)


@pytest.mark.parametrize("name", ALIKE)
def test_the_graph_is_the_same_on_every_rank(kept: list[dict[str, Graphs]], name: str) -> None:
    first, *others = (addressed(found[name].text) for found in kept)
    assert "_c10d_functional" in first
    for text in others:
        assert text == first


@pytest.mark.parametrize("name", ALIKE)
def test_what_ranks_make_of_the_same_graph(kept: list[dict[str, Graphs]], name: str) -> None:
    """To the last bit what they make of the program; three of them by hand too."""
    x = torch.arange(1, 5, dtype=F64)  # + 10 rank
    for rank, of_rank in enumerate(kept):
        found = of_rank[name].found
        assert_close(found, of_rank[name].expected, rtol=0, atol=0)
        (value,) = found[0]
        if name == "where":
            assert_close(value, torch.cat([2 * x + 10, -2 * (2 * x + 50)]))
        if name == "broadcast":
            assert_close(value, 0 * (x + 10 * rank))  # rank 2 has index 0 along tp
        if name == "exchanged" and rank % 2 == 0:
            scaled = [(1 + other) * (x + 10 * other) for other in (0, 1, 2, 3)]
            pieces = [torch.cat([scaled[a][:2], scaled[b][:2]]) for a, b in ((0, 1), (2, 3))]
            assert_close(value, (pieces[0] + pieces[1]).view(2, 2)[rank // 2])


def test_a_python_number_is_compiled_in(kept: list[dict[str, Graphs]]) -> None:
    """What to avoid, and that the comparison sees it: the ranks' graphs differ in their constants."""
    constants = [re.findall(r"mul\.Tensor\(\w+, (\d)\)", found["python_number"].text) for found in kept]
    assert constants == [[str(rank)] * 2 for rank in range(4)]  # forward and backward


# ------------------------------------------------------------------------------------------------------- the adaptors


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())  # type: ignore[no-any-return]


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, WIDTH)).double()


def tensor_parallel_stack(mesh: mc.Mesh) -> nn.Module:
    plan = {"*.up": "column", "*.down": "row", "*.norm": "replicated", "2": "replicated"}
    return data_parallel(tensor_parallel(stack(), plan, axis="tp", mesh=mesh), "dp", grads="mean", mesh=mesh)


ADAPTORS: dict[str, tuple[Callable[[mc.Mesh], nn.Module], list[str]]] = {
    "tensor_parallel": (tensor_parallel_stack, ["whole"]),
    "data_parallel": (lambda mesh: data_parallel(stack(), ("dp", "tp"), grads="mean", mesh=mesh), ["forward"]),
    "fully_shard": (
        lambda mesh: fully_shard(stack(), "tp", grads="mean", replica_axis="dp", units=["0", "1"], mesh=mesh),
        ["forward", "whole"],
    ),
}
"""Modules, and what is compiled of their steps."""


def rows_of(mesh: mc.Mesh, name: str) -> Tensor:
    """This rank's part of the batch."""
    whole = torch.randn(8, WIDTH, dtype=F64, generator=torch.Generator().manual_seed(3))
    axes = "dp" if name == "tensor_parallel" else ("dp", "tp")
    return mc.shard(whole, axes, mesh=mesh)


def steps_of(model: nn.Module, x: Tensor, way: str) -> None:
    """Two steps of training: forward in one graph, or forward and backward, by inductor's partition and no code."""
    torch._dynamo.reset()
    sgd, params = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), list(model.parameters())

    def loss(x: Tensor) -> Tensor:
        return model(x).square().mean()  # type: ignore[no-any-return]

    def whole_step(x: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss(x), params)

    if way == "whole" and OLD:
        way = "forward"  # torch 2.11 compiles no autograd.grad
    run: Any = {"eager": loss, "forward": loss, "whole": whole_step}[way]
    if way != "eager":
        run = torch.compile(run, fullgraph=True, dynamic=False, backend="aot_eager_decomp_partition")
    for _ in range(2):
        if way == "whole":
            for p, g in zip(params, run(x), strict=True):
                p.grad = g
        else:
            run(x).backward()
        sgd.step()
        sgd.zero_grad()


def adapted() -> list[tuple[str, str, dict[str, Tensor]]]:
    """What the parameters are after them, whole."""
    mesh = mc.make_mesh({"dp": 2, "tp": 2})
    found = []
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        for name, (make, ways) in ADAPTORS.items():
            for way in ways:
                model = make(mesh)
                steps_of(model, rows_of(mesh, name), way)
                found.append((name, way, full_state_dict(model)))
    return found


def test_whole_steps_over_the_adaptors(pool4: Any) -> None:
    """In one graph, against one rank that has the whole batch and no compiler."""
    alone = stack()
    steps_of(alone, torch.randn(8, WIDTH, dtype=F64, generator=torch.Generator().manual_seed(3)), "eager")
    expected = alone.state_dict()
    for found in pool4.run(adapted):
        for name, way, state in found:
            assert_close(state, expected, rtol=1e-12, atol=1e-12, msg=lambda text, at=(name, way): f"{at}: {text}")


@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_parallel_alone_on_one_rank(sequence: bool) -> None:
    """No other adaptor around it, and no process group: the compiler sees other code of it."""
    mesh = mc.make_mesh({"tp": 1})
    x, plan = torch.randn(8, WIDTH, dtype=F64), {"*.up": "column", "*.down": "row", "*.norm": "replicated"}
    model = tensor_parallel(stack()[:2], plan, axis="tp", sequence=sequence, mesh=mesh)
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    mine, its = (torch.autograd.grad(fn(x).square().sum(), list(model.parameters())) for fn in (run, model))
    assert_close(mine, its)


def kept_by_graphs() -> dict[str, tuple[int, int, Tensor, Tensor]]:
    """Gathers of the graphs of forward and backward, and the gradient against that of eager code."""
    mesh = mc.make_mesh({"fsdp": 2})
    x = torch.randn(3, WIDTH, dtype=F64, generator=torch.Generator().manual_seed(mesh.rank))
    codes: list[str] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        codes.append(graph.code)
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)

    def run(loss: Callable[..., Tensor], shards: list[Tensor]) -> tuple[int, int, Tensor, Tensor]:
        torch._dynamo.reset()
        codes.clear()
        compiled = torch.compile(loss, fullgraph=True, dynamic=False, backend=backend)
        (mine,), (its,) = (torch.autograd.grad(fn(), shards[:1]) for fn in (compiled, loss))
        return *(code.count("all_gather_into_tensor.default") for code in codes), mine, its  # type: ignore[return-value]

    block = stack()[0]
    params = {name: p.detach().requires_grad_() for name, p in block.named_parameters()}
    shards, tree = fsdp.shard(params, "fsdp", mesh=mesh)

    def applied() -> Tensor:
        y: Tensor = fsdp.apply(lambda params: functional_call(block, params, (x,)), shards, tree)
        return y.square().sum()

    model = fully_shard(stack(), "fsdp", grads="sum", units=["0", "1"], reduce_dtype=F64, whole=True, mesh=mesh)
    mine = [p for p in model.parameters() if p.numel()]
    return {"apply": run(applied, shards), "module": run(lambda: model(x).square().sum(), mine)}


def test_graphs_keep_no_gathered_weights(pool2: Any) -> None:
    """Backward gathers those that forward is to let go of; the module's own, the last layer's, are kept."""
    for found in pool2.run(kept_by_graphs):
        for mine, its in (entry[2:] for entry in found.values()):
            assert_close(mine, its, rtol=1e-12, atol=1e-12)
        counts = {key: entry[:2] for key, entry in found.items()}
        assert counts == {"apply": (1, 1), "module": (3, 2)}


def refused() -> None:
    mesh = mc.make_mesh({"fsdp": 2})
    model = fully_shard(stack(), "fsdp", grads="sum", mesh=mesh)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with no_sync(model), pytest.raises(Exception, match="gradients are not collected in compiled code"):
        compiled(torch.ones(1, WIDTH, dtype=F64))
    half = fully_shard(stack(), "fsdp", grads="sum", offload=True, mesh=mesh)
    with pytest.raises(Exception, match="offload=True does not go into one graph"):
        torch.compile(half, fullgraph=True, backend="eager")(torch.ones(1, WIDTH, dtype=F64))


def test_what_does_not_go_into_one_graph(pool2: Any) -> None:
    pool2.run(refused)


def broken_at_backward() -> dict[str, Tensor]:
    """Steps of batches of two lengths, whose backward runs between two graphs."""
    mesh = mc.make_mesh({"fsdp": 2})
    model = fully_shard(stack(), "fsdp", grads="mean", units=["0", "1"], mesh=mesh)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    torch._dynamo.reset()

    @torch.compile(backend="eager")
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    rows = torch.randn(12, WIDTH, dtype=F64, generator=torch.Generator().manual_seed(3))
    for batch in (rows[:8], rows[8:], rows[:10]):
        step(mc.shard(batch, "fsdp", mesh=mesh))
        sgd.step()
        sgd.zero_grad()
    return full_state_dict(model)


def test_a_step_whose_graph_breaks_at_backward(pool2: Any) -> None:
    """Nothing of the library's is traced there."""
    alone = stack()
    sgd = torch.optim.SGD(alone.parameters(), lr=0.1)
    rows = torch.randn(12, WIDTH, dtype=F64, generator=torch.Generator().manual_seed(3))
    for batch in (rows[:8], rows[8:], rows[:10]):
        alone(batch).square().mean().backward()
        sgd.step()
        sgd.zero_grad()
    for found in pool2.run(broken_at_backward):
        assert_close(found, alone.state_dict(), rtol=1e-12, atol=1e-12)
