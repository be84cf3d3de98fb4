"""The process world: ``init`` finds or makes torch's process group of all ranks, ``shutdown`` leaves it cleanly.

A plain process (no launcher, no group) is a world of one without any process group: ``ensure()`` is None there.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from meshcomm import _torch
from meshcomm.errors import FIRST_CAUSE, CommError, fail, text
from meshcomm.runtime import tracebacks
from meshcomm.runtime.health import peers
from meshcomm.runtime.ops import Op
from meshcomm.runtime.process import exits, forks, inside
from meshcomm.runtime.process.neighbours import Address, Neighbours
from meshcomm.runtime.start import devices, network, rendezvous
from meshcomm.runtime.start.launchers import Launcher, choice, detect
from meshcomm.runtime.start.membership import ProcessWorld, adopted, all_under_guard, whole_group
from meshcomm.runtime.start.request import Request, duration, guard_wanted, host_port

DEFAULT_TIMEOUT = timedelta(minutes=5)


@dataclass(eq=False, repr=False, match_args=False)  # what is not made takes no time at import
class _State:
    """``world`` is None in a plain process; ``solo``: a group of one, made for torch's sake in a plain process."""

    request: Request
    launcher: str | None = None
    world: ProcessWorld | None = None
    group: weakref.ref[dist.ProcessGroup] | None = None
    solo: bool = False
    excepthook: tuple[Callable[..., Any], Callable[..., Any]] | None = None
    set_variables: list[str] = field(default_factory=list)
    interface: network.Choice | None = None


_lock = threading.RLock()


@forks.in_every_fork
def _forked() -> None:
    global _lock
    _lock = threading.RLock()  # who held it is not here


_state: _State | None = None
_launched: Request | None = None
"""What ``launch`` had this process ask for when it started it: asking again begins anew, among the same processes."""
_begun_again = 0
_callbacks: list[Callable[[], Callable[[], object] | None]] = []
_told: list[Callable[[int, int], object]] = []


# ------------------------------------------------------------------------------------------------------------ questions


def current() -> ProcessWorld | None:
    """The world that ``init`` made or adopted, the group of one of ``solo_process_group``; None in a plain process."""
    state = _state
    if state is None or state.world is None:
        return None
    if dist.is_initialized() and state.group is not None and state.group() is dist.group.WORLD:
        return state.world
    with _lock:
        _drop(state)
    return None


def ensure() -> ProcessWorld | None:
    """The world of this launch, made now if need be; None in a plain process."""
    forks.refuse_if_forked("make_mesh")
    here = current()
    if here is not None:
        return None if _is_solo() else here
    if not under_launcher():
        return None
    with _lock:
        if current() is None:
            init()
    return current()


def under_launcher() -> bool:
    """Is this process one rank of a launch: a launcher's variables are set, or a process group is initialised?"""
    if dist.is_initialized():
        return not _is_solo()
    return _launched is not None or detect(os.environ) is not None


def is_met() -> bool:
    """Has a process group of torch's been initialised, here or by something else?"""
    return dist.is_initialized()


def _is_solo() -> bool:
    return _state is not None and _state.solo and current() is not None


def on_shutdown(callback: Callable[[], object]) -> None:
    """Call ``callback`` before each end of the process group, to drop references to it and to its subgroups.

    A bound method is held weakly, so that its object may go.
    """
    if hasattr(callback, "__self__") and not isinstance(callback.__self__, type(sys)):
        _callbacks.append(weakref.WeakMethod(callback))
    else:
        _callbacks.append(lambda: callback)


def on_init(tell: Callable[[int, int], object]) -> None:
    """Call ``tell`` with this process's rank and the number of processes when it has become one of several, or has
    asked for that again.
    """
    _told.append(tell)


# ----------------------------------------------------------------------------------------------------------------- init


@Op("init")
def init(
    *,
    launcher: str | None = None,
    backend: str | None = None,
    init_method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    store: Store | None = None,
    port: int | None = None,
    timeout: float | timedelta | None = None,
    guard: bool | None = None,
) -> None:
    """Join the processes of this launch. Everything is found by itself: ``make_mesh`` calls ``init()`` when needed.

    Looked for in this order: explicit arguments (``init_method`` or ``store``); a torch process group that something
    else has initialised, which is adopted; RANK and WORLD_SIZE (torchrun); Open MPI's or MPICH's variables; a step of
    Slurm with more than one task; nothing, which leaves a plain process: a world of one.

    On a rank among those of one process, or of a dry run, nothing begins and nothing of the process changes: time-out,
    guard and place of meeting are those of the launch.

    Args:
        launcher: "pytorch", "mpi" or "slurm": take this one's variables, and raise if they are not set.
        backend: torch's name or names of backends. By default gloo for CPU tensors together with the accelerator's own.
            "gloo" puts all ranks on the CPU.
        init_method: ``tcp://host:port`` or ``file:///path``, with ``rank`` and ``world_size`` where no launcher gives
            them.
        rank: this process's number in the world. Differs per process; every other argument is equal in all.
        world_size: number of processes.
        store: a torch store that all ranks reach, with ``rank`` and ``world_size``.
        port: the port at which rank 0 is met, in place of MASTER_PORT.
        timeout: seconds or a timedelta, of the meeting and of each collective after it; 5 minutes by default.
        guard: whether the ranks compare each call before it moves anything (operation, arguments, dtype, shape, splits,
            whether a gradient is needed), and a rank that waits finds out within a second that another one has called
            something else, waits for it, has raised an error, returned or ended. None: as MESHCOMM_GUARD says, which is
            1 or 0, the default. Ranks of one process always do.

    Returns: nothing.

    Cost: one meeting of all processes; nothing when called again.

    Raises:
        MeshError: arguments or variables that do not fit together, or do not fit the world that is there already.
        CommError: too few ranks within ``timeout``; a port in use; rank 0 not reached.

    Example:
        >>> import meshcomm as mc
        >>> mc.init()
        >>> mc.make_mesh({"dp": -1}).size
        1
    """
    forks.refuse_if_forked("init")
    limit = duration("init", timeout)
    request = Request(launcher, backend, init_method, rank, world_size, store, port, limit, guard)
    place = inside.running_or_dry()
    if place is not None:
        _one_of_these(place, request)
        return
    with _lock:
        current()  # Forgets a group that its owner has destroyed meanwhile.
        if _state is not None and (_state.world is not None or not dist.is_initialized()):
            _same_or_fail(_state, request)
        else:
            _begin(request)
            if _state is not None and _state.world is not None:
                for told in _told:
                    told(_state.world.rank, _state.world.size)


def launched_as(**given: Any) -> None:
    """``init``, in a process that ``launch`` has started; later calls of ``init`` without a place are among the same
    processes.
    """
    global _launched
    init(**given)
    _launched = Request(**given)


def _as_launched(request: Request) -> Request:
    """What is asked for, with what ``launch`` knows of this process."""
    global _begun_again
    if _launched is None or request.explicit or request.launcher is not None or request.port is not None:
        return request
    _begun_again += 1  # alike on all ranks, as are their calls of shutdown
    given = {**_launched.given(), **request.given()}
    given["store"] = PrefixStore(f"begun again {_begun_again}", given["store"])
    return Request(**given)


def _begin(request: Request) -> None:
    global _state
    if dist.is_initialized():
        here, one_node = adopted(request)
        exits.watch(peers.leave, _run_callbacks, _end_group, peers.let_go_first)
        _state = _State(request, None, here, weakref.ref(whole_group()))
        if one_node:
            _use_loopback(_state)  # for the groups that are made of it here
        return
    request = _as_launched(request)
    found = detect(os.environ, request.launcher) if request.rank is None else None
    if request.explicit:
        _start(request.who(found), request)
    elif found is not None:
        _start(found, request)
    else:
        devices.choose_backend(request.backend)
        _state = _State(request)


def _one_of_these(place: tuple[int, int], request: Request) -> None:
    """They have met: nothing is begun, and what is asked for fits who this rank is."""
    devices.choose_backend(request.backend)
    rank, size = place
    if request.rank is not None and (request.rank, request.world_size) != place:
        fail(
            "init",
            "this is a rank of one process, and another one than it says.",
            got=f"rank={request.rank} of {request.world_size}; here runs rank {rank} of {size}",
            fix="leave rank= and world_size= out; mc.launch gives them",
        )


def _same_or_fail(state: _State, request: Request) -> None:
    """A second init says nothing, or what is the case."""
    facts = state.request.given()
    shown: dict[str, Any] = {}
    if state.world is not None:
        here = state.world
        made = {"rank": here.rank, "world_size": here.size, "timeout": here.timeout, "backend": here.backend}
        made["guard"] = here.guard
        facts = {**made, "launcher": state.launcher, **facts}
    for name, value in request.given().items():
        same = value is facts.get(name) if name == "store" else value == facts.get(name)
        if not same and not (name == "backend" and state.world is not None and value == state.world.backend):
            shown[name] = value
    if shown:
        now = "a plain process" if state.world is None else f"rank {state.world.rank} of {state.world.size}"
        fail(
            "init",
            f"already initialised otherwise: {', '.join(shown)}.",
            got=", ".join(f"{k}={v!r} (now {facts.get(k, 'not given')!r})" for k, v in shown.items()) + f"; {now}",
            fix=("give them to mc.launch" if _launched is not None else "leave the arguments out")
            + ", or call mc.shutdown() first, on every rank",
        )


# ------------------------------------------------------------------------------------------------------------- starting


def _start(who: Launcher, request: Request) -> None:
    """Meet, choose the device, make the process group."""
    global _state
    backend, device_type = devices.choose_backend(request.backend)
    timeout, guard = request.timeout or DEFAULT_TIMEOUT, guard_wanted(request.guard)
    state = _State(request, choice(who.name))
    neighbours, name = None, ""
    with contextlib.ExitStack() as meeting, _undone(state):
        if backend == "fake":
            place = devices.Place(who.rank, who.world_size, 0, devices.present(device_type))
            _make_group(state, backend, who, timeout, None, place.device)
        else:
            store = meeting.enter_context(rendezvous.meeting_place(who, request, timeout))
            card = devices.Card.mine(who.local_rank, device_type)
            seat = network.Seat.mine(card.host, _master(who, request))
            mine = json.dumps([card, Address.mine().write(), os.urandom(8).hex(), guard, seat])
            here, told = rendezvous.join(store, who.rank, who.world_size, mine, timeout)
            cards, addresses, tokens, guards, seats = zip(*map(json.loads, told), strict=True)
            all_under_guard(guards)
            place = devices.place([devices.Card(*card) for card in cards], who.rank, device_type)
            if place.device.type != "cpu":
                torch.accelerator.set_device_index(place.device.index)
            if devices.has_gloo(backend):
                seated = [network.Seat.read(each) for each in seats]
                _listen_at(state, network.choose(seat, seated, os.environ))
                rendezvous.reached(here, who.rank, seated, os.environ.get(network.GLOO), timeout)
            _make_group(state, backend, who, timeout, here, place.device)
            name = tokens[0]
            near = Neighbours(name, tuple(map(Address.read, addresses)))
            if rendezvous.agreed(here, who.rank, who.world_size, near.are_seen(who.rank), timeout):
                neighbours = near
    state.world = ProcessWorld(
        who.rank,
        who.world_size,
        *place,
        backend,
        timeout,
        adopted=False,
        guard=guard,
        neighbours=neighbours,
        name=name,
    )
    _state = state


def _master(who: Launcher, request: Request) -> str | None:
    """The host where the ranks meet, as far as it is known."""
    if request.store is not None:
        return network.master_of(request.store)
    if request.init_method is not None:
        return host_port(request.init_method)[0] if request.init_method.startswith("tcp://") else None
    return who.master_addr


@contextlib.contextmanager
def _undone(state: _State) -> Iterator[None]:
    """On an error leave nothing behind."""
    try:
        yield
    except BaseException as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        _restore(state)
        if isinstance(error, dist.DistError):  # of the store, between two steps of the meeting
            what, fix = "the store failed while the ranks met.", "look at rank 0: it serves the store"
            raise CommError(text("init", what, got=str(error).split("\n", 1)[0], fix=fix)) from error
        raise


def _make_group(
    state: _State, backend: str, who: Launcher, timeout: timedelta, store: Store | None, device: torch.device
) -> None:
    tracebacks.install()  # below torch's hook, which writes the rank in front
    before = sys.excepthook
    prefixed = None if store is None else PrefixStore("group", store)

    def make() -> None:
        dist.init_process_group(
            backend, store=prefixed, rank=who.rank, world_size=who.world_size, timeout=timeout,
            pg_options=_torch.options_for(backend, timeout),
        )  # fmt: skip
        _torch.connect(whole_group(), device)

    try:
        if store is not None and backend == "gloo":
            rendezvous.within(2 * timeout, make)  # it waits for ever for a store whose server stands still
        else:
            make()
    except (RuntimeError, ValueError) as error:
        lost = peers.account(range(who.world_size), closed=True)
        what = f"torch could not make the process group of {who.world_size} ranks with backend {backend!r}"
        what += f": {lost}" if lost else "."
        fix = FIRST_CAUSE
        raise CommError(text("init", what, got=f"rank {who.rank}: {error}", fix=fix)) from error
    state.group = weakref.ref(whole_group())
    # torch marks each traceback with the rank, once more for each group it makes: put the hook back at the end.
    state.excepthook = (before, sys.excepthook)
    exits.watch(peers.leave, _run_callbacks, _end_group, peers.let_go_first)


def _listen_at(state: _State, chosen: network.Choice | None) -> None:
    """What gloo listens at, as long as the group lasts; it resolves the host's name else."""
    if chosen is not None and network.GLOO not in os.environ:
        os.environ[network.GLOO] = chosen.interface
        state.set_variables.append(network.GLOO)
        state.interface = chosen


def _use_loopback(state: _State) -> None:
    """On one machine gloo need not offer its ports to the network."""
    name = network.LOOPBACK.get(sys.platform)
    _listen_at(state, None if name is None else network.Choice(name, "all ranks are on this machine"))


def interface() -> network.Choice | None:
    """What was found for gloo to listen at, while there is a group for which it was."""
    return None if _state is None else _state.interface


def solo_process_group() -> dist.ProcessGroup:
    """A process group of one in a plain process, for torch's own tools (DeviceMesh); made when first asked for."""
    global _state
    with _lock:
        if current() is None:
            if under_launcher():
                init()
            else:
                request = Request() if _state is None else _state.request
                state = _State(request, solo=True)
                backend, device_type = devices.choose_backend(request.backend)
                who, timeout = Launcher("explicit", 0, 1), request.timeout or DEFAULT_TIMEOUT
                _use_loopback(state)
                here = devices.present(device_type)
                _make_group(state, backend, who, timeout, HashStore(), here)
                state.world = ProcessWorld(0, 1, 0, 1, 0, here, backend, timeout, adopted=False)
                _state = state
        return whole_group()


# -------------------------------------------------------------------------------------------------------------- leaving


def shutdown() -> None:
    """Leave the process group that ``init`` made; forget, but do not end, one that it adopted. ``init`` may follow.

    Every rank calls it, or none: at the end of the process it happens by itself. No communication, so a rank that fails
    does not wait for the others; it waits for its own unfinished collectives, up to their timeout. Nothing on a rank
    among those of one process, which ends with its program.

    Example:
        >>> import meshcomm as mc
        >>> mc.init()
        >>> mc.shutdown()
    """
    if forks.is_fork() or inside.running_or_dry() is not None:
        return  # what there is to leave is the parent's, or that of the process whose ranks these are
    with _lock:
        state = _state
        if state is not None:
            current()
        if _state is not None:
            _drop(_state)


def _drop(state: _State) -> None:
    """End this state: references first, then the group, then what init had set."""
    global _state
    _state = None
    if state.world is None:
        return
    if not state.world.adopted:
        peers.leave("mc.shutdown() was called")
    _run_callbacks()
    alive = state.group is not None and dist.is_initialized() and state.group() is dist.group.WORLD
    if alive and not state.world.adopted:
        dist.destroy_process_group()
        if state.group is not None and state.group() is not None:
            gc.collect()  # A cycle (a traceback, a mesh) still holds it: its threads end with the last reference.
    _restore(state)


def _restore(state: _State) -> None:
    for name in state.set_variables:
        os.environ.pop(name, None)
    if state.excepthook is not None and sys.excepthook is state.excepthook[1]:
        sys.excepthook = state.excepthook[0]


def _run_callbacks() -> None:
    alive = [(ref, callback) for ref in _callbacks if (callback := ref()) is not None]
    _callbacks[:] = [ref for ref, _ in alive]
    for _, callback in alive:
        callback()


def _end_group() -> None:
    state = _state
    if state is None or state.group is None:
        return
    if state.world is not None and state.world.device.type != "cpu":
        torch.accelerator.set_device_index(state.world.device.index)
    if not (state.world is not None and state.world.adopted) and state.group() is dist.group.WORLD:
        dist.destroy_process_group()
    exits.settle()
