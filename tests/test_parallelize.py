"""One call for a model: what it does by the axes of the mesh, against one rank, and against the calls that it names."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import meshcomm as mc
from meshcomm import parallel
from meshcomm.parallel import full_state_dict, parallel_calls, parallelize

F64 = torch.float64


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))
        self.blocks = nn.ModuleList(blocks).to(F64)
        self.head = nn.Linear(8, 4, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        found: Tensor = self.head(x)
        return found


ROWS = torch.randn(8, 8, generator=torch.Generator().manual_seed(1), dtype=F64)


def trained(module: nn.Module, x: Tensor) -> None:
    optimiser = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for _ in range(3):
        optimiser.zero_grad()
        module(x).square().mean().backward()
        optimiser.step()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def on_this_rank(shape: dict[str, int], axes: dict[str, Any] | None, by_calls: bool) -> tuple[Any, Any]:
    mesh = mc.make_mesh(shape)
    with mc.use_mesh(mesh):
        model = parallelize(net(), mesh, grads="mean", axes=axes)
        calls = parallel_calls(model)
        if by_calls:
            model = net()
            for call in calls:
                eval(call, {**{name: getattr(parallel, name) for name in parallel.__all__}, "model": model})
        index = count = 0
        for name, size in shape.items():
            if (axes or {}).get(name) != "tensor" and name != "tp":
                index, count = index * size + mesh.coordinate[name], (count or 1) * size
        trained(model, ROWS.chunk(count or 1)[index])
        return calls, full_state_dict(model)


CASES: list[tuple[dict[str, int], dict[str, Any] | None, list[str]]] = [
    ({"dp": 4}, None, ["data_parallel(model, 'dp', grads='mean')"]),
    ({"fsdp": 2}, None, ["fully_shard(model, 'fsdp', grads='mean')"]),
    ({"tp": 2}, None, ["tensor_parallel"]),
    ({"dp": 2, "tp": 2}, None, ["tensor_parallel", "data_parallel"]),
    ({"fsdp": 2, "tp": 2}, None, ["tensor_parallel", "fully_shard"]),
    ({"replica": 2, "fsdp": 2, "tp": 2}, None, ["tensor_parallel", "fully_shard(model, 'fsdp', grads='mean', replica_axis='replica')"]),
    ({"replica": 2, "dp": 2}, None, ["data_parallel(model, ('replica', 'dp'), grads='mean')"]),
    ({"a": 2, "b": 2}, {"a": "fsdp", "b": "tensor"}, ["tensor_parallel", "fully_shard(model, 'a'"]),
]  # fmt: skip


@pytest.mark.parametrize("by_calls", [False, True])
def test_a_cut_sequence(by_calls: bool) -> None:
    rows = torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(1), dtype=F64)

    def program() -> tuple[Any, Any]:
        mesh = mc.make_mesh({"fsdp": 2, "tp": 2})
        with mc.use_mesh(mesh):
            model = parallelize(net(), mesh, grads="mean", sequence=True)
            calls = parallel_calls(model)
            if by_calls:
                model = net()
                for call in calls:
                    eval(call, {**{name: getattr(parallel, name) for name in parallel.__all__}, "model": model})
            trained(model, rows.chunk(2)[mesh.coordinate["fsdp"]])
            return calls, full_state_dict(model)

    calls, state = mc.launch(program, 4)[0]
    assert "{'': Block(before='split', after='gather')" in calls[0]
    assert calls[0].endswith("axis='tp', sequence=True)")
    alone = net()
    trained(alone, rows)
    for key, p in alone.named_parameters():
        assert_close(state[key], p.detach(), rtol=0, atol=1e-9)


@pytest.mark.one_in(3, alike=True)
@pytest.mark.parametrize("by_calls", [False, True])
@pytest.mark.parametrize(("shape", "axes", "expected"), CASES)
def test_by_the_axes(shape: dict[str, int], axes: Any, expected: list[str], by_calls: bool) -> None:
    ranks = torch.Size(shape.values()).numel()
    calls, found = mc.launch(on_this_rank, ranks, (shape, axes, by_calls))[0]
    alone = net()
    trained(alone, ROWS)
    for name, p in alone.named_parameters():
        assert_close(found[name], p.detach(), rtol=0, atol=1e-8)
    assert len(calls) == len(expected)
    for call, beginning in zip(calls, expected, strict=True):
        assert call.startswith(beginning)


def test_on_processes(pool4: Any) -> None:
    found = pool4.run(on_this_rank, {"fsdp": 2, "tp": 2}, None, False)[0][1]
    alone = net()
    trained(alone, ROWS)
    for name, p in alone.named_parameters():
        assert_close(found[name], p.detach(), rtol=0, atol=1e-8)


def test_one_rank_prints_the_plan_and_the_calls(capsys: pytest.CaptureFixture[str]) -> None:
    mc.launch(lambda: parallelize(net(), mc.make_mesh({"dp": 2, "tp": 2}), grads="sum"), 4)
    said = capsys.readouterr().out
    assert said.count("a rank sends per token and step") == 1
    assert said.splitlines()[-1] == "data_parallel(model, 'dp', grads='sum')"


def test_mixed_precision_and_units_go_where_they_belong() -> None:
    def program() -> tuple[Any, Any]:
        mesh = mc.make_mesh({"fsdp": 2})
        model = parallelize(net().float(), mesh, grads="mean", param_dtype=torch.bfloat16, units=["blocks.*"])
        return parallel_calls(model), model(ROWS.float()).dtype

    calls, dtype = mc.launch(program, 2)[0]
    assert calls == ("fully_shard(model, 'fsdp', grads='mean', units=['blocks.*'], param_dtype=torch.bfloat16)",)
    assert dtype == torch.bfloat16


@pytest.mark.parametrize(("axis", "call"), [("dp", "data_parallel"), ("fsdp", "fully_shard")])
def test_the_dtype_in_which_gradients_are_added_up(axis: str, call: str) -> None:
    def program() -> Any:
        mesh = mc.make_mesh({axis: 2})
        model = parallelize(net().bfloat16(), mesh, grads="mean", accumulate_dtype=torch.float32)
        model(ROWS.bfloat16()).sum().backward()
        return parallel_calls(model), {p.grad.dtype for p in model.parameters() if p.grad is not None}

    calls = (f"{call}(model, {axis!r}, grads='mean', accumulate_dtype=torch.float32)",)
    assert mc.launch(program, 2) == [(calls, {torch.float32})] * 2


WRONG: list[tuple[dict[str, int], dict[str, Any], str]] = [
    ({"x": 2}, {}, r"what axis 'x' of the mesh \{'x': 2\} is for is not known[\s\S]*axes=\{'x': 'data'\}"),
    ({"dp": 2}, {"axes": {"dp": "date"}}, r"'dp' is 'date'[\s\S]*did you mean 'data'"),
    ({"dp": 2}, {"axes": {"q": "data"}}, r"axes names 'q'"),
    ({"dp": 2}, {"axes": ["dp"]}, r"axes is no mapping but list"),
    ({"dp": 2}, {"grads": "avg"}, r"grads='avg'"),
    ({"dp": 2}, {"plan": "best"}, r"plan='best'"),
    ({"dp": 2}, {"plan": {"*": "column"}}, r"a plan, and no axis for tensor parallelism"),
    ({"dp": 2}, {"param_dtype": torch.bfloat16}, r"param_dtype=, and no axis[\s\S]*torch.autocast"),
    ({"dp": 2}, {"units": ["blocks.*"]}, r"units=, and no axis"),
    ({"tp": 2}, {"reduce_dtype": torch.bfloat16}, r"reduce_dtype=, and no axis"),
    ({"tp": 2}, {"accumulate_dtype": torch.float32}, r"accumulate_dtype=, and no axis"),
    ({"dp": 2}, {"accumulate_dtype": "float32"}, r"accumulate_dtype='float32' is no dtype"),
    ({"dp": 2}, {"divide": ["heads"]}, r"divide= without a plan"),
    ({"fsdp": 2}, {"param_dtype": "bfloat16"}, r"param_dtype='bfloat16' is no dtype"),
    ({"dp": 2}, {"sync_batch_norm": 1}, r"sync_batch_norm=1 is neither True nor False"),
]


@pytest.mark.parametrize(("shape", "how", "said"), WRONG)
def test_what_is_wrong_is_said_before_anything_is_changed(shape: dict[str, int], how: Any, said: str) -> None:
    def program() -> None:
        model = net()
        with pytest.raises(mc.MeshError, match=said):
            parallelize(model, mc.make_mesh(shape), **{"grads": "mean", **how})
        with pytest.raises(mc.MeshError, match="was not given to parallelize"):
            parallel_calls(model)

    mc.launch(program, 2)


def test_without_a_mesh() -> None:
    with pytest.raises(mc.MeshError, match="there is no mesh"):
        parallelize(net(), grads="mean")


# ------------------------------------------------------------------------------------------------ norms of the batch


class OwnNorm(nn.BatchNorm1d):
    """A class of one's own, whose forward nobody but its author knows."""


class Normed(nn.Module):
    def __init__(self, norm: type[nn.BatchNorm1d] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16, dtype=F64), norm(16, dtype=F64), nn.Linear(16, 4, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(torch.relu(self.norm(self.up(x))))
        return found


def normed_on_this_rank(shape: dict[str, int], synced: bool) -> Any:
    mesh = mc.make_mesh(shape)
    with mc.use_mesh(mesh):
        torch.manual_seed(0)
        module, heard = Normed(), list[torch.Size]()
        module.norm.register_forward_hook(lambda *seen: heard.append(seen[2].shape))
        model = parallelize(module, mesh, grads="mean", sync_batch_norm=synced)
        heard.clear()  # a plan that is found calls copies, hooks and all
        index = count = 0
        for name, size in shape.items():
            if name != "tp":
                index, count = index * size + mesh.coordinate[name], (count or 1) * size
        trained(model, ROWS.chunk(count)[index])
        assert len(heard) == 3
        return parallel_calls(model), full_state_dict(model)


@pytest.mark.parametrize(
    ("shape", "over"),
    [
        ({"dp": 4}, "'dp'"),
        ({"fsdp": 2}, "'fsdp'"),
        ({"dp": 2, "tp": 2}, "'dp'"),
        ({"replica": 2, "fsdp": 2, "tp": 2}, "('replica', 'fsdp')"),
    ],
)
def test_batch_norms_see_the_rows_of_all_ranks(shape: dict[str, int], over: str) -> None:
    ranks = torch.Size(shape.values()).numel()
    calls, found = mc.launch(normed_on_this_rank, ranks, (shape, True))[0]
    torch.manual_seed(0)
    alone = Normed()
    trained(alone, ROWS)
    for name, x in alone.state_dict().items():
        assert_close(found[name], x, rtol=0, atol=1e-8)
    assert calls[-2] == f"convert_batch_norm(model, {over})"
    calls, found = mc.launch(normed_on_this_rank, ranks, (shape, False))[0]
    assert not any("batch_norm" in call for call in calls)
    assert (found["norm.running_var"] - alone.norm.running_var).abs().max() > 1e-6  # type: ignore[operator]


def test_batch_norms_that_are_not_converted_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    def program(norm: type[nn.BatchNorm1d], ranks: int, **how: Any) -> Any:
        return parallel_calls(parallelize(Normed(norm), mc.make_mesh({"dp": ranks}), grads="mean", **how))

    assert len(mc.launch(program, 2, (OwnNorm, 2))[0]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "# by the rows of each rank alone normalise 'norm'"
    assert len(mc.launch(program, 1, (nn.BatchNorm1d, 1))[0]) == 1  # all rows are its own
    mc.launch(program, 2, (OwnNorm, 2), {"sync_batch_norm": False})
    assert "#" not in capsys.readouterr().out

    def replaced() -> Any:
        model = Normed()
        model.norm.forward = functools.partial(nn.BatchNorm1d.forward, model.norm)  # type: ignore[method-assign]
        return parallel_calls(parallelize(model, mc.make_mesh({"dp": 2}), grads="mean"))

    assert len(mc.launch(replaced, 2)[0]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "# by the rows of each rank alone normalise 'norm'"
