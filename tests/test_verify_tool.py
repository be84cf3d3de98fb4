"""``python -m meshcomm verify``, the assertions and strategies of meshcomm.testing, and reports that draw themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import meshcomm as mc
from meshcomm.testing import assert_parallel_equal, assert_training_equal, strategies
from meshcomm.tools.verify import main

HERE = "tests.test_verify_tool"
IN = ["--in", "b d=4,4", "--in", "d (tp f)=4,8", "--in", "(tp f) d=8,4", "--out", "b d"]
batches = [torch.randn(4, 4, generator=torch.Generator().manual_seed(number)) for number in range(2)]


def mlp(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    return mc.all_reduce(torch.relu(mc.pvary(x, "tp") @ w1) @ w2, "tp")


def forgetful(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    return mc.all_reduce(torch.relu(x @ w1) @ w2, "tp")


def make(mesh: mc.Mesh, factor: float = 1.0) -> Any:
    model = mc.parallel.data_parallel(nn.Linear(4, 1), "dp", grads="mean")
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> None:
        sgd.zero_grad()
        (factor * model(mc.shard(x, "dp")).square().mean()).backward()
        sgd.step()

    return model, sgd, step


def wrong(mesh: mc.Mesh) -> Any:
    return make(mesh, mesh.size)


def report(meshes: Any = None) -> mc.Report:
    return mc.verify_training(wrong, batches, 2, meshes or {"dp": 2}, checkpoint=False)


def no_report() -> int:
    return 3


def test_it_prints_what_was_found_and_its_code_says_whether(capsys: Any, tmp_path: Path) -> None:
    assert main([f"{HERE}:mlp", "--mesh", "tp=2", *IN]) == 0
    assert "nothing wrong was found" in capsys.readouterr().out
    drawn = tmp_path / "report.html"
    assert main([f"{HERE}:forgetful", "--mesh", "tp=2", *IN, "--html", str(drawn)]) == 1
    out = capsys.readouterr().out
    assert "fix: mc.pvary(operand 0, 'tp') before matmul at test_verify_tool.py:" in out
    assert "mc.pvary(operand 0" in drawn.read_text()
    assert (
        main([f"{HERE}:make", "--batches", f"{HERE}:batches", "--mesh", "dp=2", "--mesh", "dp=4", "--steps", "2"]) == 0
    )
    said = capsys.readouterr()
    assert "1 steps after a checkpoint of {'dp': 2}" in said.out
    assert "s] {'dp': 4}: 2 steps" in said.err
    assert main([f"{HERE}:report", "--mesh", "dp=2"]) == 1
    assert "2 times the right one" in capsys.readouterr().out


def test_a_file_of_ones_own(capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    file = tmp_path / "a_program_of_mine.py"
    file.write_text("import meshcomm as mc\ndef f(x):\n    return mc.all_reduce(x.sum(), 'dp')\n")
    assert main([f"{file}:f", "--in", "(dp n)=4", "--out", "", "--mesh", "dp=2"]) == 0


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["tests"], "'tests' is no module:function"),
        (["no.such.module:f"], "no module 'no.such.module' here"),
        (["nowhere.py:f"], "no file 'nowhere.py'"),
        ([f"{HERE}:nothing"], "no 'nothing' in 'tests.test_verify_tool'"),
        ([f"{HERE}:HERE"], "is not callable but str"),
        ([f"{HERE}:mlp"], "takes arguments that nothing gives"),
        ([f"{HERE}:no_report"], "gives no report but int"),
        ([f"{HERE}:mlp", "--mesh", "tp"], "'tp' is no mesh"),
        ([f"{HERE}:mlp", "--mesh", "tp=2,tp=2"], "is no mesh"),
        ([f"{HERE}:mlp", "--in", "b d"], "--in and --out come together"),
        ([f"{HERE}:mlp", "--in", "b d", "--out", "b d"], "'b d' is no layout with sizes"),
        ([f"{HERE}:make", "--batches", f"{HERE}:nothing"], "no 'nothing'"),
        ([f"{HERE}:no_report", "--batches", f"{HERE}:batches", "--steps", "0"], "steps=0 is not a positive int"),
        ([f"{HERE}:mlp", "--html", "report.pdf"], "ends in none of .html, .svg, .txt"),
    ],
)
def test_wrong_words(argv: list[str], said: str, capsys: Any) -> None:
    assert main(argv) == 2
    assert said in capsys.readouterr().err


def test_a_report_draws_itself() -> None:
    found = report()
    picture = found.picture()
    assert str(picture) == str(found)
    assert "gradient wrong" in picture.svg
    assert "{&#x27;dp&#x27;: 2}: 2 steps" in picture.svg
    assert found._repr_html_() == picture.svg
    assert "right" in mc.Report("verify", ran=["{'dp': 2}: value"]).picture().svg


def test_assertions() -> None:
    x, w1, w2 = torch.randn(4, 4), torch.randn(4, 8), torch.randn(8, 4)
    specs: Any = {"in_specs": ("b d", "d (tp f)", "(tp f) d"), "out_specs": "b d", "meshes": {"tp": 2}}
    assert assert_parallel_equal(mlp, x, w1, w2, **specs).ok
    with pytest.raises(AssertionError, match="before matmul"):
        assert_parallel_equal(forgetful, x, w1, w2, **specs)
    assert assert_training_equal(make, batches, 2, {"dp": 2}, checkpoint=False).ok
    with pytest.raises(AssertionError, match="2 times the right one"):
        assert_training_equal(wrong, batches, 2, {"dp": 2}, checkpoint=False)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data())
def test_strategies_make_what_fits(data: st.DataObject) -> None:
    mesh = data.draw(strategies.meshes(("dp", "tp", "cp"), most=6))
    assert [*mesh] == ["dp", "tp", "cp"]
    made = mc.make_mesh(mesh)
    assert made.size <= 6
    every = data.draw(st.booleans())
    layout = data.draw(strategies.layouts(mesh, dims=2, every=every))
    assert not every or all(axis in layout for axis in mesh)
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]))
    x = data.draw(strategies.tensors(layout, mesh, dtype=dtype))
    assert x.dtype == dtype
    assert all(mc.local_shape(layout, x.shape, mesh=made))


def test_strategies_refuse_what_cannot_be() -> None:
    for strategy, said in (
        (strategies.meshes(()), "are no names of axes"),
        (strategies.meshes(("dp",), sizes=(9,)), "no size for axis 'dp' leaves at most 8 ranks"),
        (strategies.layouts({"dp": 2}, dims=0, every=True), "a tensor without dims"),
        (strategies.tensors("(tp b)", {"dp": 2}), "no axis 'tp' in the mesh"),
    ):
        with pytest.raises(mc.MeshError, match=said):
            find_one(strategy)


def find_one(strategy: Any) -> None:
    @settings(max_examples=1, database=None, derandomize=True)
    @given(strategy)
    def one(value: Any) -> None:
        """Draws."""

    one()
