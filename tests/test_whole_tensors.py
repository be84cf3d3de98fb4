"""load_full_state_dict from what holds whole tensors: files, folders, names, dtypes, and what is wrong with them."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_full_state import MESH, WAYS, Net, in_stages, whole
from torch import Tensor, nn
from torch.testing import assert_close

import meshcomm as mc
from meshcomm.parallel import checkpoint, full_state_dict, fully_shard, load_full_state_dict
from meshcomm.parallel.weights import whole_tensors

pytest.importorskip("safetensors", reason="needs the extra meshcomm[weights]")
from safetensors.torch import save_file


def separate(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in state.items()}


def safe(folder: Path, state: dict[str, Tensor]) -> Path:
    save_file(separate(state), folder / "weights.safetensors")
    return folder / "weights.safetensors"


def safe_folder(folder: Path, state: dict[str, Tensor]) -> Path:
    save_file(separate(state), folder / "model.safetensors")
    torch.save({}, folder / "optimizer.pt")
    return folder


def dropped_name(folder: Path, state: dict[str, Tensor]) -> Path:
    """As transformers writes what is tied: once."""
    return safe_folder(folder, {name: x for name, x in state.items() if name != "table.weight"})


def shards(folder: Path, state: dict[str, Tensor], suffix: str = "safetensors", name: str = "model") -> Path:
    parts = [list(state)[at::3] for at in range(3)]
    files = {f"{name}-{at + 1:05}-of-00003.{suffix}": names for at, names in enumerate(parts)}
    for file, names in files.items():
        part = separate({name: state[name] for name in names})
        save_file(part, folder / file) if suffix == "safetensors" else torch.save(part, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, names in files.items() for name in names}}
    (folder / f"{name}.{suffix}.index.json").write_text(json.dumps(index))
    return folder


def shards_of_torch(folder: Path, state: dict[str, Tensor]) -> Path:
    return shards(folder, state, "bin", "pytorch_model")


def index(folder: Path, state: dict[str, Tensor]) -> Path:
    return shards(folder, state) / "model.safetensors.index.json"


def saved(folder: Path, state: dict[str, Tensor]) -> Path:
    torch.save(state, folder / "pytorch_model.bin")
    return folder


def old_format(folder: Path, state: dict[str, Tensor]) -> Path:
    torch.save(state, folder / "old.pt", _use_new_zipfile_serialization=False)
    return folder / "old.pt"


def compiled(folder: Path, state: dict[str, Tensor]) -> Path:
    return safe(folder, {f"_orig_mod.{name}": x for name, x in state.items()})


def steps(folder: Path, state: dict[str, Tensor]) -> Path:
    net = Net()
    net.load_state_dict(state)
    checkpoint.save(folder, net, step=3)
    return folder


FORMS = [safe, safe_folder, dropped_name, shards, shards_of_torch, index, saved, old_format, compiled, steps]


@pytest.mark.one_in(4, alike=True)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
def test_forms(form: Callable[..., Path], way: Callable[[Net], None], tmp_path: Path) -> None:
    expected = whole(1).state_dict()
    expected["steps"] = torch.tensor(7.0)
    path = form(tmp_path, expected)

    def main() -> dict[str, Tensor]:
        mesh = mc.make_mesh(MESH)
        with mc.use_mesh(mesh):
            net = in_stages(way, mesh)
            load_full_state_dict(net, path)
            return full_state_dict(net)

    for found in mc.launch(main, ranks=8):
        assert_close(found, dict(expected), rtol=0, atol=0)


def test_dtypes(tmp_path: Path) -> None:
    """Converted as load_state_dict does, but for what would lose its kind."""
    path = safe(tmp_path, {"weight": torch.randn(4, 4, dtype=torch.float64), "bias": torch.arange(4)})

    def main() -> Any:
        mesh = mc.make_mesh({"fs": 2})
        net = fully_shard(nn.Linear(4, 4).bfloat16(), "fs", grads="sum", mesh=mesh)
        load_full_state_dict(net, path)
        found = full_state_dict(net)
        with pytest.raises(mc.MeshError, match=r"'bias' is torch.float32, which does not become torch.int64"):
            load_full_state_dict(Ints(), {"bias": torch.ones(2)})
        return found

    class Ints(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("bias", torch.zeros(2, dtype=torch.int64))

    given = whole_tensors.opened("test", path)
    for found in mc.launch(main, ranks=2):
        assert found["weight"].dtype == found["bias"].dtype == torch.bfloat16
        assert torch.equal(found["weight"], given.plain("weight").bfloat16())
        assert found["bias"].tolist() == [0, 1, 2, 3]


def corrupt(folder: Path) -> Path:
    path = safe(folder, dict(whole().state_dict()))
    path.write_bytes(path.read_bytes()[:-8])
    return path


def no_header(folder: Path) -> Path:
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 2**40) + b"{}")
    return folder


def missing_shard(folder: Path) -> Path:
    shards(folder, dict(whole().state_dict()))
    (folder / "model-00002-of-00003.safetensors").unlink()
    return folder


def other_shard(folder: Path) -> Path:
    shards(folder, dict(whole().state_dict()))
    save_file({"x": torch.ones(1)}, folder / "model-00002-of-00003.safetensors")
    return folder


def outside(folder: Path) -> Path:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../x.safetensors"}}))
    return folder


def no_map(folder: Path) -> Path:
    (folder / "model.safetensors.index.json").write_text("{}")
    return folder


def two_files(folder: Path) -> Path:
    for name in "ab":
        save_file({"x": torch.ones(1)}, folder / f"{name}.safetensors")
    return folder


def nothing(folder: Path) -> Path:
    (folder / "config.json").write_text("{}")
    return folder


def no_pickle(folder: Path) -> Path:
    (folder / "x.bin").write_bytes(b"no weights")
    return folder / "x.bin"


def code(folder: Path) -> Path:
    torch.save({"x": Path("x")}, folder / "x.pt")
    return folder / "x.pt"


def a_list(folder: Path) -> Path:
    torch.save([torch.ones(1)], folder / "x.pt")
    return folder / "x.pt"


def other_shape(folder: Path) -> Path:
    return safe(folder, {**whole().state_dict(), "steps": torch.zeros(2), "layers.0.bias": torch.zeros(9)})


def prefixed(folder: Path) -> Path:
    return safe(folder, {f"module.{name}": x for name, x in whole().state_dict().items()})


def deeper(folder: Path) -> Path:
    return safe(folder, {f"base.model.{name}": x for name, x in whole().state_dict().items()})


def part(folder: Path) -> Path:
    return safe(folder, {f"{name.partition('.')[2] or name}": x for name, x in whole().layers.state_dict().items()})


def less(folder: Path) -> Path:
    return safe(folder, {name: x for name, x in whole().state_dict().items() if "layers" not in name})


def wrapped(folder: Path) -> Path:
    torch.save({"model": whole().state_dict(), "step": 3}, folder / "x.pt")
    return folder / "x.pt"


def twice(folder: Path) -> Path:
    state = whole().state_dict()
    return safe(folder, {**state, "_orig_mod.steps": torch.ones(())})


def pointer(folder: Path) -> Path:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 3\n")
    return folder


def hub(folder: Path) -> Path:
    return Path("somebody/a-model")


WRONG: dict[Callable[[Path], Path], str] = {
    corrupt: r"file '.*weights.safetensors' cannot be read.*fix: write or copy it again",
    no_header: r"file '.*model.safetensors' cannot be read",
    missing_shard: r"files that '.*index.json' names are not there.*1 of 3: 'model-00002-of-00003.safetensors'",
    other_shard: r"names tensors that are not in their file.*in 'model-00002-of-00003.safetensors'",
    outside: r"names what is no file beside it.*'../x.safetensors'",
    no_map: r"index '.*' cannot be read.*KeyError: 'weight_map'",
    two_files: r"there are several files, and no index of them.*'a.safetensors', 'b.safetensors'",
    nothing: r"there are no weights in '.*'.*'config.json'.*fix: one of these files, or a folder with 'model.safetensors'",
    no_pickle: r"file '.*x.bin' cannot be read.*fix: a file of tensors that torch.save has written",
    code: r"file '.*x.pt' cannot be read",
    a_list: r"in file '.*x.pt' is no mapping but list",
    other_shape: r"'steps' has shape \(2,\), the buffer \(\); 'layers.0.bias' has shape \(9,\), the parameter \(8,\)",
    prefixed: r"Missing key.*fix: names begin with 'module.' there.*ModuleDict\({'module': module}\)",
    deeper: r"Missing key.*fix: names begin with 'base.model.' there: {name.removeprefix\('base.model.'\): x for",
    wrapped: r"Unexpected key\(s\): 'model', 'step'.*fix: the state_dict stands under 'model' there: state\['model'\]",
    twice: r"'steps' and '_orig_mod.steps' are one name|'_orig_mod.steps' and 'steps' are one name",
    pointer: r"cannot be read.*fix: .*git lfs pull",
    hub: r"there is no file or folder 'somebody/a-model'.*huggingface_hub.snapshot_download",
    less: r"Missing key\(s\): 'layers.0.weight'.*and 0 more|Missing key\(s\): 'layers.0.weight'",
}


@pytest.mark.parametrize("make", WRONG)
def test_wrong_files(make: Callable[[Path], Path], tmp_path: Path) -> None:
    """Every rank says it, and nothing has changed."""
    path = make(tmp_path)

    def main() -> str:
        mesh = mc.make_mesh({"rep": 2, "fs": 2})
        with mc.use_mesh(mesh):
            net = fully_shard(whole(), "fs", grads="sum", replica_axis="rep")
            with pytest.raises((mc.MeshError, RuntimeError)) as caught:
                load_full_state_dict(net, path)
            assert_close(full_state_dict(net), dict(whole().state_dict()), rtol=0, atol=0)
            return str(caught.value).replace("\n", " ")

    for said in mc.launch(main, ranks=4):
        assert re.search(WRONG[make], said), said


def test_one_rank_cannot_read(tmp_path: Path) -> None:
    paths = [safe(tmp_path, dict(whole().state_dict())), tmp_path / "nowhere"]

    def main() -> None:
        mesh = mc.make_mesh({"fs": 2})
        net = fully_shard(whole(), "fs", grads="sum", mesh=mesh)
        load_full_state_dict(net, paths[mesh.rank])

    with pytest.raises(mc.MeshError, match="there is no file or folder"):
        mc.launch(main, ranks=2)


OTHERS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], type[Exception], str]] = {
    "less": (lambda state: {"weight": state["weight"]}, RuntimeError, r"Missing key\(s\): 'bias'"),
    "more": (lambda state: {**state, "x": torch.ones(1)}, RuntimeError, r"Unexpected key\(s\): 'x'"),
    "shape": (lambda state: {**state, "bias": torch.ones(5)}, mc.MeshError, r"index 1: 'bias' has shape \(5,\)"),
    "dtype": (lambda state: {**state, "bias": state["bias"].cfloat()}, mc.MeshError, "index 1: 'bias' is .*complex64"),
    "none": (lambda state: None, mc.MeshError, "index 1: state is neither a mapping nor a path, but NoneType"),
    "path": (lambda state: "nowhere", mc.MeshError, "index 1: there is no file or folder 'nowhere'"),
}


def another(name: str) -> str:
    make, kind, said = OTHERS[name]
    mesh = mc.make_mesh({"fs": 2, "rep": 2})
    net = fully_shard(nn.Linear(4, 4), "fs", grads="sum", replica_axis="rep", mesh=mesh)
    state = dict(nn.Linear(4, 4).state_dict())
    before = {name: x.clone() for name, x in net.state_dict().items()}
    with pytest.raises(kind) as caught:
        load_full_state_dict(net, make(state) if mesh.rank == 1 else state, mesh=mesh)
    assert re.search(said, str(caught.value)), caught.value
    assert_close(dict(net.state_dict()), before, rtol=0, atol=0)
    return str(caught.value)


@pytest.mark.parametrize("name", OTHERS)
def test_one_rank_is_given_something_else(name: str) -> None:
    """All ranks say the same, and nothing has changed."""
    assert len({*mc.launch(another, ranks=4, args=(name,))}) == 1


def test_one_process_is_given_something_else(pool4: Any) -> None:
    for name in ("less", "path"):
        assert len({*pool4.run(another, name)}) == 1


def test_what_did_not_fit_is_told(tmp_path: Path) -> None:
    """With strict=False, as of load_state_dict; the same on all ranks."""
    given = {"weight": torch.ones(4, 4), "_orig_mod.x": torch.ones(1), "y": 3}

    def main() -> Any:
        mesh = mc.make_mesh({"fs": 2})
        net = fully_shard(nn.Linear(4, 4), "fs", grads="sum", mesh=mesh)
        found = load_full_state_dict(net, given, strict=False)
        assert full_state_dict(net)["weight"].eq(1).all()
        nothing = load_full_state_dict(net, nn.Linear(4, 4).state_dict())
        assert nothing == ([], [])
        return found

    theirs = nn.Linear(4, 4).load_state_dict({"weight": torch.ones(4, 4), "x": 1, "y": 3}, strict=False)
    for found in mc.launch(main, ranks=2):
        assert found.missing_keys == theirs.missing_keys == ["bias"]
        assert found.unexpected_keys == theirs.unexpected_keys == ["x", "y"]


def test_prefix_by_a_container(tmp_path: Path) -> None:
    path = prefixed(tmp_path)

    def main() -> None:
        mesh = mc.make_mesh({"fs": 2})
        net = fully_shard(whole(2), "fs", grads="sum", mesh=mesh)
        load_full_state_dict(nn.ModuleDict({"module": net}), path)
        assert_close(full_state_dict(net), dict(whole().state_dict()), rtol=0, atol=0)

    mc.launch(main, ranks=2)


def test_a_part_of_the_module() -> None:
    def main() -> None:
        mesh = mc.make_mesh({"fs": 2})
        net = fully_shard(whole(2), "fs", grads="sum", mesh=mesh)
        with pytest.raises(RuntimeError, match=r"load into its part: load_full_state_dict\(module.layers, ...\)"):
            load_full_state_dict(nn.ModuleDict({"layers": net.layers}), whole().layers.state_dict())
        load_full_state_dict(net.layers, whole().layers.state_dict())
        assert_close(full_state_dict(net.layers), dict(whole().layers.state_dict()), rtol=0, atol=0)

    mc.launch(main, ranks=2)


class Own(nn.Module):
    """A module that takes its state in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))
        self.seen = 0

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        self.seen += prefix + "weight" in state
        super()._load_from_state_dict(state, prefix, *args)


def test_what_is_loaded_in_a_way_of_its_own() -> None:
    def main() -> None:
        mesh = mc.make_mesh({"fs": 2})
        net = fully_shard(nn.Sequential(Own(), nn.BatchNorm1d(4)), "fs", grads="sum", mesh=mesh)
        heard: list[Any] = []
        net.register_load_state_dict_post_hook(lambda module, keys: heard.append(module))
        given = {**nn.Sequential(Own(), nn.BatchNorm1d(4)).state_dict(), "0.weight": torch.arange(16.0).view(4, 4)}
        del given["1.num_batches_tracked"]  # as of files before torch 0.4.1
        load_full_state_dict(net, given)
        assert net[0].seen == 1
        assert heard == [net]
        assert_close(full_state_dict(net)["0.weight"], given["0.weight"], rtol=0, atol=0)

    mc.launch(main, ranks=2)


def test_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = safe(tmp_path, dict(whole().state_dict()))
    monkeypatch.setattr(whole_tensors, "safetensors", None)
    with pytest.raises(mc.MeshError, match=r"read by safetensors, which is not installed[^!]*pip install safetensors"):
        load_full_state_dict(whole(), path)
