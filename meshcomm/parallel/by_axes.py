"""parallelize: the adaptors that the axes of a mesh call for, in the order in which one would write them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from meshcomm.axis import AxisName
from meshcomm.errors import fail, likely, names
from meshcomm.mesh import Mesh, current_mesh
from meshcomm.parallel.batch_norm import convert_batch_norm, local_batch_norms
from meshcomm.parallel.cut_parameters import checked_module
from meshcomm.parallel.tensor.auto.patterns import style_text
from meshcomm.runtime.ops import Op

M = TypeVar("M", bound=nn.Module)
Role = Literal["data", "fsdp", "tensor"]
WHERE = "parallelize"
_ROLES: dict[str, Role] = {"dp": "data", "replica": "data", "fsdp": "fsdp", "tp": "tensor"}
_CALLS = "_meshcomm_parallel_calls"


@Op("parallelize", composed=True)
def parallelize(
    module: M,
    mesh: Mesh | None = None,
    plan: Mapping[str, Any] | Literal["auto"] = "auto",
    *,
    grads: Literal["sum", "mean"],
    axes: Mapping[str, Role] | None = None,
    divide: Collection[str] | Mapping[str, int] = (),
    sequence: bool = False,
    units: Iterable[str | type[nn.Module] | nn.Module] | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    accumulate_dtype: torch.dtype | None = None,
    sync_batch_norm: bool = True,
) -> M:
    """Make ``module`` parallel by the axes that the mesh has: tensor parallel, then sharded or data parallel.

    ::

        {"tp": 4}                           tensor_parallel
        {"dp": 4}                           data_parallel
        {"fsdp": 4, "tp": 2}                tensor_parallel, fully_shard
        {"dp": 2, "fsdp": 4, "tp": 2}       tensor_parallel, fully_shard(replica_axis="dp")

    Batch norms normalise by the rows of all ranks, as those of one rank do, before gradients are reduced
    (:func:`convert_batch_norm`). The calls, and the table of a plan that was found, are printed by the first rank of
    the mesh; :func:`parallel_calls` gives the calls as data. Written out they do the same: begin with this function,
    and go on with them.

    Args:
        module: changed in place, the same on every rank but for the values.
        mesh: the current mesh by default; all of its axes are made use of.
        plan: of the tensor parallel part: "auto", which is :func:`auto_plan`, or patterns and styles.
        grads: "sum" or "mean", as :func:`data_parallel` and :func:`fully_shard` have it.
        axes: what axes with other names are for: "data", "fsdp" or "tensor" by name. By name are known ``dp`` and
            ``replica``, ``fsdp``, and ``tp``.
        divide: with a plan by hand, as :func:`tensor_parallel` has it.
        sequence: whether activations are cut along the sequence, as :func:`tensor_parallel` has it.
        units: as :func:`fully_shard` has it.
        param_dtype: parameters are gathered and used in this dtype; needs an axis of fsdp.
        reduce_dtype: gradients are reduced in this dtype.
        accumulate_dtype: gradients of microbatches are added up in this dtype, as :func:`fully_shard` has it.
        sync_batch_norm: False: each rank normalises by its own rows, as DistributedDataParallel has it; so do batch
            norms of classes of one's own, which are named after the calls.

    Returns: ``module``.

    Cost: that of the calls; of "auto" that of :func:`auto_plan`. A tensor axis of size 1 is left out with "auto".

    Raises:
        MeshError: not a module; no mesh; an axis of another name that ``axes`` does not have; a role that is none; a
            plan, units or ``param_dtype`` without an axis to make use of it; and what the calls raise.

    Example:
        >>> import torch, meshcomm as mc
        >>> from meshcomm.parallel import parallel_calls, parallelize
        >>> def program():
        ...     mesh = mc.make_mesh({"dp": 2, "tp": 1})
        ...     model = parallelize(torch.nn.Linear(4, 2), mesh, grads="mean")
        ...     return parallel_calls(model)
        >>> mc.launch(program, ranks=2)[0]
        data_parallel(model, 'dp', grads='mean')
        ("data_parallel(model, 'dp', grads='mean')",)

    Source: none; accelerate's ``prepare`` and torchtitan's ``parallelize_llama`` are of this kind.
    """
    checked_module(WHERE, module)
    here = mesh if mesh is not None else current_mesh()
    if not isinstance(here, Mesh):
        fail(WHERE, "there is no mesh." if here is None else f"mesh is no Mesh but {type(here).__name__}.",
             fix="mesh=mc.make_mesh({'dp': 2, 'tp': 2}), or mc.use_mesh(mesh) around it")  # fmt: skip
    roles = _roles(here, axes)
    if grads not in ("sum", "mean"):
        fail(WHERE, f"grads={grads!r}.", fix='"sum" if you reduce the loss over the ranks, "mean" for a local loss')
    data, fsdp, tensor = (_together(role, roles) for role in ("data", "fsdp", "tensor"))
    dtypes = {"reduce_dtype": reduce_dtype, "accumulate_dtype": accumulate_dtype}
    _refuse_idle(plan, divide, sequence, units, param_dtype, dtypes, data, fsdp, tensor)
    if not isinstance(sync_batch_norm, bool):
        fail(WHERE, f"sync_batch_norm={sync_batch_norm!r} is neither True nor False.", fix="True or False")
    calls: list[str] = []
    table = ""
    if tensor is not None and not (isinstance(plan, str) and here.size_of(tensor) == 1):
        if isinstance(plan, str):
            auto = _asked_for("meshcomm.parallel.tensor.auto.auto_plan").auto_plan
            found = auto(module, tensor, sequence=sequence, mesh=here)
            plan, divide, table = found, found.divide, f"{found}\n"
        _asked_for("meshcomm.parallel.tensor.module").tensor_parallel(
            module, plan, axis=tensor, sequence=sequence, divide=divide, mesh=here
        )
        styled: Any = plan
        styles = ", ".join(f"{pattern!r}: {_written(style)}" for pattern, style in styled.items())
        counts = f"{', sequence=True' if sequence else ''}{f', divide={divide!r}' if divide else ''}"
        calls.append(f"tensor_parallel(model, {{{styles}}}, axis={tensor!r}{counts})")
    rows = tuple(name for name, role in roles.items() if role != "tensor")
    alone = local_batch_norms(module) if sync_batch_norm and rows and here.size_of(rows) > 1 else []
    if alone:
        over = rows if len(rows) > 1 else rows[0]
        convert_batch_norm(module, over, mesh=here)
        left = local_batch_norms(module)
        calls += [f"convert_batch_norm(model, {over!r})"] if len(left) < len(alone) else []
        alone = left
    if fsdp is not None:
        said = {"replica_axis": data, "units": units, "param_dtype": param_dtype, **dtypes}
        _asked_for("meshcomm.parallel.fsdp.module").fully_shard(module, fsdp, grads=grads, mesh=here, **said)
        calls.append(f"fully_shard(model, {fsdp!r}, grads={grads!r}{_given(said)})")
    elif data is not None:
        _asked_for("meshcomm.parallel.data.ddp").data_parallel(module, data, grads=grads, mesh=here, **dtypes)
        calls.append(f"data_parallel(model, {data!r}, grads={grads!r}{_given(dtypes)})")
    vars(module)[_CALLS] = tuple(calls)
    if not any(here.own_coordinate().values()):
        notes = [f"# by the rows of each rank alone normalise {names(alone)}"] if alone else []
        sys.stdout.write(table + "".join(f"{line}\n" for line in (*calls, *notes)))
    return module


def _asked_for(module: str) -> Any:
    """An adaptor's module: only those that the axes call for are imported."""
    return importlib.import_module(module)


def parallel_calls(module: nn.Module) -> tuple[str, ...]:
    """The calls that :func:`parallelize` has made of ``module``, in order, as one would write them.

    Args:
        module: one that :func:`parallelize` gave.

    Returns: the text of each; they run where the names of ``meshcomm.parallel``, ``torch`` and ``model`` are known.

    Cost: nothing.

    Raises:
        MeshError: another module.

    Example:
        >>> import torch, meshcomm as mc
        >>> from meshcomm.parallel import parallel_calls, parallelize
        >>> mesh = mc.make_mesh({"dp": 1})
        >>> parallel_calls(parallelize(torch.nn.Linear(4, 2), mesh, grads="sum"))
        data_parallel(model, 'dp', grads='sum')
        ("data_parallel(model, 'dp', grads='sum')",)

    Source: none.
    """
    checked_module("parallel_calls", module)
    found: tuple[str, ...] | None = vars(module).get(_CALLS)
    if found is None:
        fail("parallel_calls", "the module was not given to parallelize.", fix="the one that parallelize gave")
    return found


def _roles(mesh: Mesh, axes: Mapping[str, Role] | None) -> dict[str, Role]:
    """What each axis of the mesh is for."""
    said = {} if axes is None else axes
    if not isinstance(said, Mapping):
        fail(WHERE, f"axes is no mapping but {type(said).__name__}.", fix="such as axes={'model': 'tensor'}")
    kinds = ("data", "fsdp", "tensor")
    for name, role in said.items():
        if name not in mesh.shape and name not in mesh.names:
            fail(WHERE, f"axes names {name!r}, which the mesh {mesh.shape} has not.", fix=names(mesh.shape))
        if role not in kinds:
            fail(WHERE, f"axes: {name!r} is {role!r}.", fix=f"one of {names(kinds)}{likely(str(role), kinds)}")
    roles: dict[str, Role] = {}
    wholes = {part: name for name, parts in mesh.names.items() for part in parts}
    for name in mesh.axis_names:
        whole = wholes.get(name, name)
        if name in said and whole in said and whole != name:
            fail(WHERE, f"axes: {name!r} is a part of {whole!r}.", got=f"axes {dict(said)}", fix="one of them")
        found = said.get(name) or said.get(whole) or _ROLES.get(name) or _ROLES.get(whole)
        if found is None:
            what = f"what axis {name!r} of the mesh {mesh.shape} is for is not known."
            fix = f"axes={{{name!r}: 'data'}}, or 'fsdp' or 'tensor'; known by name are {names(_ROLES)}"
            fail(WHERE, what, fix=fix)
        roles[name] = found
    return roles


def _together(role: str, roles: Mapping[str, Role]) -> AxisName | None:
    """The axes of a role as one."""
    found = tuple(name for name, each in roles.items() if each == role)
    return None if not found else found[0] if len(found) == 1 else found


def _refuse_idle(
    plan: Any,
    divide: Any,
    sequence: Any,
    units: Any,
    param_dtype: Any,
    dtypes: Mapping[str, Any],
    data: Any,
    fsdp: Any,
    tensor: Any,
) -> None:
    """What is said and has nothing to do."""
    if isinstance(plan, str) and plan != "auto":
        fail(WHERE, f"plan={plan!r}.", fix="'auto', or a mapping of patterns to styles")
    if isinstance(plan, str) and divide:
        fail(WHERE, "divide= without a plan.", fix="plan=, of which it is a part; 'auto' finds its own")
    if not isinstance(sequence, bool):
        fail(WHERE, f"sequence={sequence!r} is neither True nor False.", fix="True or False")
    if tensor is None and sequence:
        fail(WHERE, "sequence=True, and no axis for tensor parallelism.", fix="an axis 'tp', or axes={...: 'tensor'}")
    if tensor is None and not isinstance(plan, str):
        fail(WHERE, "a plan, and no axis for tensor parallelism.", fix="an axis 'tp', or axes={...: 'tensor'}")
    for name, value in {"units": units, "param_dtype": param_dtype}.items():
        if value is not None and fsdp is None:
            fix = "an axis 'fsdp'; or torch.autocast around forward" if name == "param_dtype" else "an axis 'fsdp'"
            fail(WHERE, f"{name}=, and no axis along which parameters are sharded.", fix=fix)
    for name, value in dtypes.items():
        if value is not None and fsdp is None and data is None:
            fail(WHERE, f"{name}=, and no axis along which gradients are reduced.", fix="an axis 'dp' or 'fsdp'")
    for name, value in {"param_dtype": param_dtype, **dtypes}.items():
        if value is not None and not isinstance(value, torch.dtype):
            fail(WHERE, f"{name}={value!r} is no dtype.", fix="such as torch.bfloat16")


def _written(style: Any) -> str:
    return repr(style) if isinstance(style, str) else style_text(style)


def _given(said: Mapping[str, Any]) -> str:
    return "".join(f", {name}={value!r}" for name, value in said.items() if value is not None)
