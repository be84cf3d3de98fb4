"""What every test shares: one thread per process, the skip of GPU tests, one pool of worker processes of each kind, and
which tests run one after the other where pytest-xdist spreads them over workers.
"""

from __future__ import annotations

import functools
import gc
import importlib
import itertools
import os
import sys
import weakref

# Before torch is imported: ranks outnumber cores, and each process would start a thread per core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MESHCOMM_TRACEBACK", "full")  # who works on the library wants to see its frames

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from served import serve

import meshcomm as mc
from meshcomm.runtime import groups
from meshcomm.runtime.start import workers, world
from meshcomm.runtime.start.workers import WorkerPool

collect_ignore_glob = ["loops/__main__.py", "loops/with_*"]
"""A program that runs when it is imported, and what needs packages that may be absent."""

collect_ignore = ["warm.py", "warm_compiler.py"]  # no doctests in them, and imported where processes are forked

POOLS = {"pool2", "pool4", "guarded4", "guarded4_at_the_store", "gloo4", "bare4"}
"""Fixtures that start processes."""


def pool_of(item: pytest.Item) -> str:
    """Which processes a test runs on: none, plain ones or guarded ones."""
    wants = POOLS & set(getattr(item, "fixturenames", ()))
    callspec = getattr(item, "callspec", None)
    texts = [] if callspec is None else [each for each in callspec.params.values() if isinstance(each, str)]
    wants |= POOLS & set(texts)
    if any(name.startswith("guarded4") for name in wants):
        return "guarded"
    return "plain" if wants or "processes" in texts else ""


def group_of(item: pytest.Item) -> str:
    """The tests that one worker of pytest-xdist runs, one after the other: those of a pool, or of a file."""
    pool = pool_of(item)
    return item.path.stem if not pool or item.get_closest_marker("thorough") else pool


FIRST = [
    "test_soak", "test_faults", "plain", "guarded", "test_compile", "test_compile_training", "test_torch_missing", "test_exit",
    "test_workers", "test_launchers", "test_examples_under_torchrun", "test_train_gpt", "test_benchmarks", "test_security", "test_checkpoint", "test_fuzz", "test_vma_programs",
]  # fmt: skip
"""The longest groups; who begins with them ends with the others."""


MANY = 10
"""So many cases of one test are a table, of which `make test` runs a part."""


def pytest_configure(config: pytest.Config) -> None:
    if config.pluginmanager.hasplugin("xdist"):
        config.pluginmanager.register(importlib.import_module("spread").Spread(group_of))


def spared(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Cases of tests marked ``one_in(n)`` that only `make test-all` runs: those that do not lie on every n-th diagonal of
    the parameters, as far as each value of each parameter has a case without them; ``alike`` values need none. A test of
    MANY cases that says nothing is one in three of them, alike, unless MESHCOMM_WHOLE_TABLES is set.
    """
    tests: dict[tuple[Any, ...], list[Any]] = {}
    for item in items:
        if hasattr(item, "callspec"):
            tests.setdefault((item.path, item.originalname), []).append(item)  # type: ignore[attr-defined]
    for cases in tests.values():
        marker = cases[0].get_closest_marker("one_in")
        if marker is None and (len(cases) < MANY or os.environ.get("MESHCOMM_WHOLE_TABLES")):
            continue
        n, alike = (3, True) if marker is None else (marker.args[0], marker.kwargs.get("alike", False))
        places: dict[str, dict[int, int]] = {}
        at = []
        for case in cases:
            seen = {name: places.setdefault(name, {}) for name in case.callspec.params}
            at.append(
                {(name, seen[name].setdefault(id(x), len(seen[name]))) for name, x in case.callspec.params.items()}
            )
        run = {number for number, each in enumerate(at) if sum(place for _, place in each) % n == 0}
        met = {value for number in run for value in at[number]}
        for number, case in enumerate(cases):
            if number not in run and (alike or at[number] <= met):
                yield case
            met |= at[number]


def crossed(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Cases of tests marked ``pairs`` that are not run: each value of each parameter meets each value of every other one
    in a case without them, but not all of them meet at once.
    """
    tests: dict[tuple[Any, ...], list[Any]] = {}
    for item in items:
        if item.get_closest_marker("pairs"):
            tests.setdefault((item.path, item.originalname), []).append(item)  # type: ignore[attr-defined]
    for cases in tests.values():
        pairs = [
            set(itertools.combinations(sorted((name, id(x)) for name, x in case.callspec.params.items()), 2))
            for case in cases
        ]
        unmet, left = set().union(*pairs), list(range(len(cases)))
        while unmet:
            best = max(left, key=lambda number: len(pairs[number] & unmet))  # the first of them, on every worker
            left.remove(best)
            unmet -= pairs[best]
        yield from (cases[number] for number in left)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not os.environ.get("MESHCOMM_ALL_CASES"):
        dropped = set(crossed(items))
        items[:] = [item for item in items if item not in dropped]
    for item in spared(items):
        item.add_marker("thorough")
    for item in items:
        if pool_of(item):
            item.add_marker("processes")
            if "compile" in item.nodeid:
                item.add_marker("compiled")
    rank = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: rank.get(group_of(item), len(FIRST)))
    if torch.accelerator.is_available():
        return
    skip = pytest.mark.skip(reason="needs an accelerator: torch.accelerator finds none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


MUCH = 100
"""So many modules more are torch's compiler, which comes with the first step of an optimizer."""
settled_with = [0]
"""How many modules there were when all was settled last."""


def settle() -> None:
    """What is there now stays, and is no longer looked at by each collection of garbage, which each dry run makes."""
    gc.collect()
    gc.freeze()
    settled_with[0] = len(sys.modules)


def pytest_collection_finish(session: pytest.Session) -> None:
    """All tests are there, and torch's modules."""
    settle()
    programs = {item.module.__name__ for item in session.items if isinstance(item, pytest.Function) and pool_of(item)}
    # Only thorough tests compile on ranks.
    compiler = ["warm_compiler"] * any(pool_of(x) and x.get_closest_marker("thorough") for x in session.items)
    if programs and not session.config.option.collectonly:
        serve([*sorted(programs), "warm", *compiler])


@pytest.hookimpl(trylast=True)  # after the fixtures' own ends
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ranks that wait for a program that does not come are ended with the group of tests that was theirs: each process
    group of theirs has a thread that wakes a hundred times a second.
    """
    if nextitem is None or group_of(nextitem) != group_of(item):
        for pool in list(Pool.all):
            pool.close()
    if len(sys.modules) > settled_with[0] + MUCH:
        settle()
    asked = forgotten()
    if asked:
        pytest.fail(
            f"{item.nodeid} has left what it asked of mc.init, which those after it get: {asked}", pytrace=False
        )


def forgotten() -> dict[str, Any]:
    """What ``init`` was asked for in this process, if that is still so; no longer then."""
    state = world._state
    asked = {} if state is None else state.request.given()
    if asked:
        mc.shutdown()
    return asked


@pytest.fixture(scope="module", autouse=True)
def settled() -> Iterator[None]:
    """What is left of a file's tests stays too: what torch has imported for them meanwhile. No group of one does."""
    yield
    mc.shutdown()
    settle()


def meshes_made() -> list[tuple[str, int]]:
    """How many of each kind this process has made."""
    return sorted((repr(kind), count) for made in groups._meshes.values() for kind, count in made.items())


def groups_kept() -> int:
    """How many process groups this process has."""
    return sum(len(pool._groups) for pool in groups._pools.values()) + sum(
        family.base not in family.pool._groups.values() for family in groups._families.values()
    )


def and_what_was_made(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, list[tuple[str, int]], int]:
    """Its result, the meshes and the number of process groups."""
    return fn(*args, **kwargs), meshes_made(), groups_kept()


class Pool(WorkerPool):
    """New workers after a program whose ranks have not made the same meshes: a mesh is known by how many of its kind
    were made before, which would differ from then on. And new ones when they have many process groups, for each time-out
    and each choice of ranks its own: 30 of them take 4 % of a core from each rank that does nothing.
    """

    all: ClassVar[weakref.WeakSet[Pool]] = weakref.WeakSet()
    most_groups = 16

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self.all.add(self)

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        task = workers._pack(fn, args, kwargs, functools.partial(and_what_was_made, fn))
        made, kept = None, 0
        try:
            told = self.do(task, workers._name(fn), workers._POOL_PROMPT)
            made, kept = [meshes for _, meshes, _ in told], max(number for _, _, number in told)
            return [result for result, _, _ in told]
        finally:
            if made is None and self._crews:  # ranks have failed
                made = super().run(meshes_made)
            if kept > self.most_groups or (made is not None and any(each != made[0] for each in made)):
                self.close()


@pytest.fixture(scope="session")
def pool4() -> Iterator[WorkerPool]:
    """Four gloo ranks in processes of their own, started by the first test that asks and kept to the end of the run."""
    with Pool(4) as pool:
        yield pool


@pytest.fixture(scope="session")
def pool2() -> Iterator[WorkerPool]:
    """Two of them, for what costs much on each rank and is no other on four: compiling."""
    with Pool(2) as pool:
        yield pool


class PoolWith(Pool):
    """A pool whose workers see these variables, those that are started again too."""

    def __init__(self, ranks: int, **variables: str) -> None:
        super().__init__(ranks)
        self.variables = variables

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.variables.items():
                patch.setenv(name, value)
            return super().run(fn, *args, **kwargs)


@pytest.fixture(scope="session")
def guarded4() -> Iterator[WorkerPool]:
    """Four ranks under guard that share memory."""
    with PoolWith(4, MESHCOMM_GUARD="1") as pool:
        yield pool


@pytest.fixture(scope="module")
def guarded4_at_the_store() -> Iterator[WorkerPool]:
    """Four ranks under guard that write what they call to the store."""
    with PoolWith(4, MESHCOMM_GUARD="1", MESHCOMM_SHARED_MEMORY="0") as pool:
        yield pool


@pytest.fixture(scope="session")
def gloo4() -> Iterator[WorkerPool]:
    """Four ranks that share no memory."""
    with PoolWith(4, MESHCOMM_SHARED_MEMORY="0") as pool:
        yield pool


@pytest.fixture(params=["in-process", "processes"])
def run4(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """``run4(fn, *args)`` runs ``fn`` on four ranks of either runtime, and gives what each rank returns."""
    if request.param == "in-process":
        return lambda fn, *args: mc.launch(fn, ranks=4, args=args)
    run: Callable[..., list[Any]] = request.getfixturevalue("pool4").run
    return run
