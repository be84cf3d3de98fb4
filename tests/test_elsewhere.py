"""Names that people try: what is missing says what to write instead, from the table of docs/coming-from.md."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys

import pytest

import meshcomm as mc
from meshcomm import elsewhere
from meshcomm.elsewhere import OF_MESHES, answers, code, rows

_TRIED = """
    psum pmean pmax pmin ppermute psum_scatter pshuffle pbroadcast pcast process_index process_count NamedSharding get_rank get_world_size
    init_process_group destroy_process_group is_initialized new_group new_subgroups init_device_mesh DeviceMesh all_gather_into_tensor
    reduce_scatter_tensor all_to_all_single isend irecv batch_isend_irecv P2POp monitored_barrier broadcast_object_list ReduceOp get_backend
    get_process_group_ranks all_reduce_coalesced distribute_tensor redistribute full_tensor fully_shard Allreduce allreduce Bcast Alltoallv
    Isend Sendrecv Scan Exscan Split COMM_WORLD Get_rank init_dist get_local_rank is_main_process master_only sync_random_seed all_reduce_dict
    copy_to_tensor_model_parallel_region reduce_scatter_to_sequence_parallel_region initialize_model_parallel P PartitionSpec pargmax pswapaxes
    ragged_all_to_all psend pmap typeof set_mesh process_allgather fold_in lax dist FSDP FullyShardedDataParallel DDP DistributedDataParallel
    DistributedSampler parallelize_module ColwiseParallel RowwiseParallel SequenceParallel loss_parallel MixedPrecisionPolicy context_parallel
    Schedule1F1B PipelineStage clip_grad_norm_ get_model_state_dict ColumnParallelLinear RowParallelLinear VocabParallelEmbedding
    vocab_parallel_cross_entropy DistributedOptimizer finalize_model_grads get_tensor_model_parallel_rank get_data_parallel_world_size
    get_tensor_model_parallel_group send_object_list rpc MAXLOC MINLOC IN_PLACE Abort Waitall Cart_create Neighbor_allgather Neighbor_alltoall
    ANY_SOURCE Win Request LAND alltoall
"""
TRIED = _TRIED.split()


def expressions(text: str) -> list[str]:
    return [line.strip().rpartition("  # ")[0] for line in text.splitlines()[1:]]


def resolves(line: str) -> bool:
    """It is Python, and what it takes of ``mc`` is there."""
    found = [ast.unparse(node) for node in ast.walk(ast.parse(line)) if isinstance(node, ast.Attribute)]
    paths = [path for path in found if re.fullmatch(r"mc(\.\w+)+", path)]
    for path in paths:
        value = mc
        for name in path.split(".")[1:]:
            value = getattr(value, name)
    return bool(paths)


@pytest.mark.parametrize("space", [mc, mc.parallel], ids=["root", "parallel"])
def test_names_that_are_tried_are_answered(space: object) -> None:
    for name in TRIED:
        if hasattr(space, name):
            assert space is mc.parallel
            continue
        with pytest.raises(AttributeError) as caught:
            getattr(space, name)
        lines = expressions(str(caught.value))
        assert lines, name
        assert any(map(resolves, lines)), (name, lines)
        assert "__all__" not in str(caught.value), name


def test_every_call_of_the_table_is_an_answer() -> None:
    assert len(rows()) > 200
    for row in rows():
        name = re.sub(r"^(\w+ = |@|with |from [\w.]+ import )", "", row.theirs)
        name = (re.match(r"[\w.]+", name) or [""])[0].rpartition(".")[2]
        if name and name not in dir(mc):
            assert answers(name), row


def test_the_same_from_an_import() -> None:
    for module, name in (("meshcomm", "psum"), ("meshcomm.parallel", "DistributedDataParallel")):
        with pytest.raises(ImportError, match=rf"cannot import name {name!r} from {module!r}\n  .*mc\.\w+\(") as caught:
            exec(f"from {module} import {name}", {})
        assert caught.value.name == module
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("meshcomm.psum")
    from_file = "from meshcomm import psum"
    done = subprocess.run([sys.executable, "-c", from_file], capture_output=True, text=True, timeout=280)
    assert "ImportError: cannot import name 'psum' from 'meshcomm'\n  mc.all_reduce(x, \"dp\")" in done.stderr


def test_meshes_and_axes_answer_too() -> None:
    mesh = mc.make_mesh({"dp": 1})
    for thing in (mesh, mesh.axis("dp")):
        with pytest.raises(
            AttributeError, match=rf"'{type(thing).__name__}' object has no attribute 'get_rank'\n  mc\.rank\(\)"
        ):
            thing.get_rank()
        assert not hasattr(thing, "_nothing_of_this")
    with pytest.raises(AttributeError, match=r'mc.current_mesh\(\).device_mesh\["dp"\].get_group\(\)'):
        mesh.get_group("dp")


def test_what_meshes_do_not_have_is_in_the_table() -> None:
    mesh = mc.make_mesh({"dp": 1})
    assert not OF_MESHES & {*dir(mesh), *dir(mesh.axis("dp"))}
    for name in OF_MESHES:
        assert not hasattr(mesh, name)
        assert any(map(resolves, (line.rpartition("  # ")[0] for line in answers(name)))), name
    asked = {match for row in rows() for match in re.findall(r"^(?:mesh|cart|comm)\.(\w+)", row.theirs)}
    assert {name for name in asked if name[:3] in ("get", "Get", "mes")} <= OF_MESHES | set(dir(mesh))
    assert "__getattr__" not in vars(mc.Mesh) | vars(mc.Mesh.__base__), "it would make every attribute slower"


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("fully_shard", "mc.parallel.fully_shard  # it is there"),
        ("AllReduce", "mc.all_reduce"),
        ("all_reduc", "mc.all_reduce  # is near"),
        ("get_rank", "mc.rank()  # dist.get_rank()"),
        ("nothing_like_this_at_all", "mc.__all__  # what there is"),
    ],
)
def test_the_first_answer(name: str, first: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(mc, name)
    assert str(caught.value).splitlines()[1].strip().startswith(first)


def test_private_names_are_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debuggers, pickle and inspect ask for many."""
    monkeypatch.setattr(elsewhere, "answer", lambda name: pytest.fail(name))
    assert not hasattr(mc, "__wrapped__")
    assert not hasattr(mc, "_psum")
    assert not hasattr(mc.make_mesh({"dp": 1}), "__torch_function__")


def test_without_the_page_the_error_is_as_short_as_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elsewhere, "_PAGES", ())
    rows.cache_clear()
    try:
        with pytest.raises(AttributeError, match="has no attribute 'ppermute'\n  mc.permute  # is near"):
            mc.ppermute  # noqa: B018
    finally:
        rows.cache_clear()


def test_dir_shows_what_is_public_only() -> None:
    assert dir(mc) == sorted({*mc.__all__, "parallel", "__version__"})
    assert dir(mc.parallel) == sorted(mc.parallel.__all__)


@pytest.mark.thorough
def test_the_table_is_not_read_before_a_name_is_missing() -> None:
    program = "import meshcomm as mc; mc.all_to_all; mc.parallel.fully_shard; from meshcomm import elsewhere; print(elsewhere.rows.cache_info().currsize)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=280, check=True)
    assert done.stdout.strip() == "0"


def test_code_of_a_cell() -> None:
    assert code("`a(b)`, then `c`") == ["a(b)", "c"]
