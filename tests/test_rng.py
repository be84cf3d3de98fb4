"""Randomness over a mesh: sync_seed, fork_rng, rng, and the numbers under it."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import random
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import meshcomm as mc
from meshcomm.collectives.agree import fork_rng, sync_seed
from meshcomm.runtime.start.workers import WorkerPool
from meshcomm.spmd.random import distributions, philox
from meshcomm.spmd.random.formats import DOUBLE, SINGLE
from meshcomm.spmd.random.functions import handler_of
from meshcomm.spmd.random.parts import Part
from meshcomm.spmd.random.philox import Stream
from meshcomm.spmd.random.programs import Program
from meshcomm.spmd.random.rng import rng
from meshcomm.watch import here

Run = Callable[..., list[Any]]
CPU = torch.device("cpu")
F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
MESHES = [{"a": 2}, {"a": 4}, {"a": 2, "b": 2}, {"a": 2, "b": 2, "c": 2}]


@pytest.fixture
def alone() -> Iterator[mc.Mesh]:
    """A mesh of one rank, in this thread."""
    with mc.use_mesh(mc.make_mesh({"a": 1, "b": 1, "c": 1})) as mesh:
        yield mesh


# ------------------------------------------------------------------------------------------------ the numbers themselves

# Salmon et al.'s Random123, kat_vectors: philox4x32, 10 rounds. Counter, key, words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_gives_the_published_answers(counter: Any, key: Any, words: Any) -> None:
    both, ones = key[0] | key[1] << 32, 1 << 64 | 1
    for *ints, numpy in itertools.product((True, False), (True, False), (True, False), (True, False), (None, np)):
        given: list[Any] = [c if an_int else torch.tensor([c] * 2) for c, an_int in zip(counter, ints, strict=True)]
        spare = list(torch.zeros(2 + sum(ints), 2, dtype=torch.int64))
        got = philox.Rounds(both, numpy).words(given, spare)  # whichever of them are tensors
        if not all(ints):
            assert [(word & 0xFFFFFFFF).tolist() for word in got] == [[word] * 2 for word in words]
    assert philox._words_of_ints([c * ones for c in counter], both, ones) == [word * ones for word in words]
    assert slow_philox(counter, key) == words


def slow_philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    (a, b, c, d), (k, m), mask = counter, key, 0xFFFFFFFF
    for _ in range(10):
        p, q = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = q >> 32 ^ b ^ k, q & mask, p >> 32 ^ d ^ m, p & mask
        k, m = k + 0x9E3779B9 & mask, m + 0xBB67AE85 & mask
    return a, b, c, d


KEY, DRAW, ATTEMPT = 0x0123456789ABCDEF, 5, 2


def slow_words(index: int, per: int) -> list[int]:
    """Those of one element."""
    block, at = divmod(index, per)
    counter = (block & 0xFFFFFFFF, DRAW, block >> 32, ATTEMPT)
    words = slow_philox(counter, (KEY & 0xFFFFFFFF, KEY >> 32))
    return list(words[at * 4 // per : (at + 1) * 4 // per])


def slow_indices(part: Part) -> list[int]:
    found = []
    for place in itertools.product(*map(range, part.shape)):
        index = 0
        for at, start, whole in zip(place, part.start, part.whole, strict=True):
            index = index * whole + start + at
        found.append(index)
    return found


PARTS = [
    Part((), (), ()),
    Part((7,), (7,), (0,)),
    Part((5,), (15,), (5,)),
    Part((3, 4), (3, 12), (0, 4)),
    Part((3, 5), (3, 15), (0, 10)),
    Part((3, 1), (3, 9), (0, 4)),
    Part((2, 3, 2), (4, 6, 6), (2, 3, 4)),
    Part((2, 3, 5), (4, 3, 5), (2, 0, 0)),
    Part((2, 3, 4), (2, 6, 4), (0, 3, 0)),
    Part((2, 1, 4), (2, 6, 8), (0, 3, 4)),
    Part((2, 0, 4), (2, 0, 4), (0, 0, 0)),
    # More than 2**32 elements, and than 2**32 blocks.
    Part((6,), (2**33,), (2**32 - 3,)),
    Part((3, 5), (2**20, 2**21), (2**19 + 7, 2**20 + 1)),
    Part((2, 3), (2**40, 3), (2**39 + 1, 0)),
    Part((2, 2, 2), (2**21, 2**21, 2**20), (2**21 - 2, 5, 2**20 - 2)),
]


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_each_element_has_the_numbers_of_its_global_index(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(KEY, DRAW, ATTEMPT, CPU)
    indices = slow_indices(part)
    short, long = ([slow_words(i, per) for i in indices] for per in (4, 2))
    wanted = {
        F32: [(w >> 8) * 2.0**-24 for (w,) in short],
        BF16: [(w >> 24) * 2.0**-8 for (w,) in short],
        F16: [(w >> 21) * 2.0**-11 for (w,) in short],
        F64: [(w << 21 | v >> 11) * 2.0**-53 for w, v in long],
    }
    usual, limit = philox._ON_CPU, philox._FEW
    for chunk, few, threads in ((usual, limit, 2**10), (usual, 0, 2**10), (3, 0, 2**10), (usual, 0, 0), (3, 0, 0)):
        monkeypatch.setattr(philox, "_ON_CPU", chunk)
        monkeypatch.setattr(philox, "_BY_NUMPY", chunk)
        monkeypatch.setattr(philox, "_TORCHS_THREADS", threads)
        monkeypatch.setattr(philox, "_FEW", few)
        for dtype, numbers in wanted.items():
            got = distributions.uniform(stream, part, dtype)
            assert got.dtype == distributions.wide(dtype)
            assert got.shape == part.shape
            assert got.double().flatten().tolist() == numbers
        assert distributions.below(stream, part, 0.3).flatten().tolist() == [w * 2.0**-32 < 0.3 for (w,) in short]
        halves = distributions.below(stream, part, torch.full(part.shape, 0.3, dtype=F64))
        assert torch.equal(halves, distributions.below(stream, part, 0.3))
        for span in (1, 12, 2**20):
            small = [-5 + (w * span >> 32) for (w,) in short]
            assert distributions.integers(stream, part, -5, span - 5).flatten().tolist() == small
        for span in (2**20 + 1, 10**12, 2**63 - 1):
            wide = [-5 + ((w << 32 | v) & 2**63 - 1) % span for w, v in long]
            assert distributions.integers(stream, part, -5, span - 5).flatten().tolist() == wide
        every = [(w << 32 | v) - (w >> 31 << 64) for w, v in long]
        assert distributions.integers(stream, part, -(2**63), 2**63).flatten().tolist() == every


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_normal_and_exponential_numbers_are_those_of_their_formulas(part: Part) -> None:
    stream = Stream(KEY, DRAW, ATTEMPT, CPU)
    indices = slow_indices(part)

    def point(u: float, side: int, fraction: float, other: bool) -> float:
        angle = (fraction - 0.5) * math.pi
        return (-1) ** side * math.sqrt(-2 * math.log(u)) * (math.sin(angle) if other else math.cos(angle))

    def single(i: int) -> float:
        first, second = (slow_words(i // 4 * 4 + i % 4 // 2 + k, 4)[0] for k in (0, 2))
        return point((first + 0.5) / 2**32, second >> 31, (second % 2**31 + 0.5) / 2**31, bool(i % 2))

    def double(i: int) -> float:
        w = [*slow_words(i // 2 * 2, 2), *slow_words(i // 2 * 2 + 1, 2)]
        fraction = ((w[2] % 2**31 << 22 | w[3] >> 10) + 0.5) / 2**53
        return point(((w[0] << 21 | w[1] >> 11) + 0.5) / 2**53, w[2] >> 31, fraction, bool(i % 2))

    short = torch.tensor([single(i) for i in indices], dtype=F64).view(part.shape)
    assert_close(distributions.normal(stream, part, F32).double(), short, rtol=2e-6, atol=1e-6)
    assert torch.equal(distributions.normal(stream, part, BF16), distributions.normal(stream, part, F32))
    long = torch.tensor([double(i) for i in indices], dtype=F64).view(part.shape)
    assert_close(distributions.normal(stream, part, F64), long, rtol=1e-11, atol=1e-12)

    waits = [-math.log((slow_words(i, 4)[0] + 0.5) / 2**32) for i in indices]
    assert_close(
        distributions.exponential(stream, part, F32).double(),
        torch.tensor(waits, dtype=F64).view(part.shape),
        rtol=1e-6,
        atol=0,
    )
    waits = [-math.log(((w << 20 | v >> 12) + 0.5) / 2**52) for w, v in (slow_words(i, 2) for i in indices)]
    assert_close(
        distributions.exponential(stream, part, F64),
        torch.tensor(waits, dtype=F64).view(part.shape),
        rtol=1e-11,
        atol=0,
    )


ALL = {
    "uniform": lambda stream, part, dtype: distributions.uniform(stream, part, dtype),
    "normal": lambda stream, part, dtype: distributions.normal(stream, part, dtype),
    "exponential": lambda stream, part, dtype: distributions.exponential(stream, part, dtype),
    "integers": lambda stream, part, dtype: distributions.integers(stream, part, -7, 1000),
    "wide integers": lambda stream, part, dtype: distributions.integers(stream, part, -7, 10**12),
    "below": lambda stream, part, dtype: distributions.below(stream, part, 0.7),
}


@pytest.mark.parametrize("name", ALL)
def test_a_few_numbers_and_many_have_the_same_bits_and_memory_of_their_own(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whichever way their words are made, under modes and transforms that see each operation, and in chunks."""
    stream = Stream(KEY, DRAW, ATTEMPT, CPU)
    for dtype, part in itertools.product((F32, F64, BF16), PARTS):
        few = ALL[name](stream, part, dtype)
        assert few.is_contiguous()
        assert few._base is None
        assert few.untyped_storage().nbytes() == few.nbytes
        with monkeypatch.context() as patch:
            patch.setattr(philox, "_FEW", 0)
            patch.setattr(philox, "_TORCHS_THREADS", 2**10)
            many = ALL[name](stream, part, dtype)
            patch.setattr(philox, "numpy_now", lambda: None)
            patch.setattr(distributions, "numpy_now", lambda: None)
            without_numpy = ALL[name](stream, part, dtype)
            patch.setattr(philox, "_FEW", 2**9)
            few_without_numpy = ALL[name](stream, part, dtype)
            patch.setattr(philox, "plain_now", lambda: False)
            patch.setattr(distributions, "plain_now", lambda: False)
            seen = ALL[name](stream, part, dtype)
        for other in (many, without_numpy, few_without_numpy, seen):
            assert other.dtype == few.dtype
            assert other.flatten().view(torch.uint8).equal(few.flatten().view(torch.uint8))


def run_of_draws() -> list[Tensor]:
    """Small draws in runs of one kind, broken off in many ways; what is drawn is changed afterwards."""
    found, x = [], torch.empty(3, 4)

    def draw(*makes: Callable[[], Tensor], times: int = 1) -> None:
        for make in makes * times:
            y = make()
            found.append(y.clone())
            y.zero_()

    draw(lambda: torch.randn(5), times=40)
    draw(lambda: torch.randn(5), lambda: torch.randn(5, dtype=F64), times=3)
    draw(lambda: torch.rand(3, 4), lambda: torch.rand(3, 4), lambda: torch.rand(4, 3), times=3)
    for n in (10, 11, 2**40):
        draw(lambda n=n: torch.randint(n, (2, 3)), times=5)
    draw(lambda: x.exponential_(), times=4)
    draw(lambda: nn.init.trunc_normal_(torch.empty(40), a=-0.5, b=0.5), times=3)
    draw(lambda: torch.randn(5, dtype=BF16), lambda: torch.randn(5), times=4)
    with torch.inference_mode():
        draw(lambda: torch.randn(7), times=3)
    draw(lambda: torch.randn(7), times=3)
    draw(lambda: torch.rand(0), lambda: torch.rand(()), times=3)
    draw(lambda: F.dropout(torch.ones(9)), times=4)
    draw(lambda: torch.bernoulli(torch.full((9,), 0.4)), times=4)
    draw(lambda: torch.rand(2000), times=3)
    with torch.no_grad():
        draw(lambda: torch.randn(5, requires_grad=True), times=3)
    return found


def test_draws_that_are_made_ahead_are_those_that_are_made_alone(
    alone: mc.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mc.rng("...", seed=3):
        ahead = run_of_draws()
    monkeypatch.setattr(philox, "_AHEAD", 0)
    with mc.rng("...", seed=3):
        each = run_of_draws()
    assert len(ahead) == len(each) > 100
    assert all(map(torch.equal, ahead, each))


# Of a known key, as this library has drawn them ever since: sums of the bits of 1000 numbers, and of 10007.
BITS = {
    ("uniform", F32): (53469371, 530211085),
    ("uniform", F64): (130468551, 1312899448),
    ("normal", F32): (63056105, 636132006),
    ("normal", F64): (138238892, 1392764402),
    ("exponential", F32): (54621759, 543814158),
    ("exponential", F64): (126278762, 1285152323),
    ("integers", F32): (18542613, 172296930),  # since they are made of one word
    ("integers", F64): (18542613, 172296930),
    ("wide integers", F32): (78253988, 789678865),
    ("wide integers", F64): (78253988, 789678865),
    ("below", F32): (88059, 885082),
    ("below", F64): (88059, 885082),
}


@pytest.mark.parametrize("name", ALL)
def test_the_numbers_of_a_seed_stay_what_they_were(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few, and of many on one thread of torch's and on several."""
    stream, parts = (
        Stream(KEY, DRAW, ATTEMPT, CPU),
        (Part((1000,), (2000,), (1000,)), Part((10007,), (30021,), (10007,))),
    )
    for threads in (2**10, 0):
        monkeypatch.setattr(philox, "_TORCHS_THREADS", threads)
        for dtype in (F32, F64):
            for part, bits in zip(parts, BITS[name, dtype], strict=True):
                y = ALL[name](stream, part, dtype).contiguous()
                assert int(y.view(torch.uint8).long().mul(torch.arange(y.nbytes) % 251 + 1).sum()) == bits


def test_a_draw_that_another_thread_breaks_in_on_has_its_own_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    part, run, inside = Part((5,), (5,), (0,)), Program.run, list[Any]()

    def draw(key: int) -> Tensor:
        return distributions.normal(Stream(key, DRAW, ATTEMPT, CPU), part, F32)

    def broken_in(program: Program) -> None:
        if not inside:
            inside.append(program)
            inside.append(draw(2))
        run(program)

    first, second = draw(1), draw(2)
    monkeypatch.setattr(Program, "run", broken_in)
    assert draw(1).equal(first)
    assert inside[1].equal(second)


def test_dynamo_leaves_the_arrays_of_numpy_alone() -> None:
    """Of which it would make tensors of its own, where it begins anew inside of a draw."""
    stream, part = Stream(KEY, DRAW, ATTEMPT, CPU), Part((5,), (5,), (0,))
    wanted = distributions.normal(stream, part, F32)
    which = (("normal",), part, F32)
    plan = philox._plans[which]
    assert torch.compile(plan.draw, backend="eager")(stream, which).equal(wanted)


def test_a_context_is_entered_again_and_decorates(alone: mc.Mesh) -> None:
    context = mc.rng("...", seed=3)
    drawn = []
    for _ in range(2):
        with context:
            drawn.append(torch.rand(5))

    @mc.rng("...", seed=3)
    def draw(depth: int) -> Tensor:
        first = torch.rand(5)
        if depth:
            draw(depth - 1)
        return torch.cat([first, torch.rand(5)])

    with context:
        both = torch.cat([torch.rand(5), torch.rand(5)])
    assert drawn[0].equal(drawn[1])
    assert draw(2).equal(both)
    assert not torch.rand(5).equal(drawn[0])


@pytest.mark.parametrize("with_numpy", [True, False])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_roots_are_rounded_as_every_device_rounds_them(
    dtype: torch.dtype, with_numpy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a vector library have another last bit in some: here in a number out of seven."""
    if not with_numpy:
        monkeypatch.setattr(distributions, "numpy_now", lambda: None)
    numbers = torch.Generator("cpu").manual_seed(0)
    near_one = 1 + torch.arange(-5000, 5000, dtype=F64) * torch.finfo(dtype).eps
    x = torch.cat([torch.rand(20000, dtype=F64, generator=numbers) * scale + 1e-12 for scale in (1e-9, 1, 40)])
    x = torch.cat([x, near_one]).to(dtype)
    exact = torch.tensor([math.sqrt(each) for each in x.tolist()], dtype=F64).to(dtype)
    assert torch.equal(distributions._root(x.clone()), exact)


def test_logarithm_and_circle_to_the_ends_of_their_ranges() -> None:
    for form, tolerance in ((DOUBLE, 1e-14), (SINGLE, 3e-7)):
        x = torch.cat(
            [torch.logspace(-19, 0, 999, base=10.0, dtype=F64), 1 - torch.logspace(-9, 0, 99, dtype=F64)[:-1]]
        )
        x = x.to(form.dtype)
        assert_close(
            distributions._log(x.clone(), 0, form, 1.0).double(), x.double().log(), rtol=tolerance, atol=tolerance
        )
        assert torch.equal(
            distributions._log(x * 2.0**5, 5, form, -2.0), distributions._log(x.clone(), 0, form, 1.0) * -2
        )
        angle = torch.linspace(-math.pi / 2, math.pi / 2, 999, dtype=form.dtype)
        cosine, sine = distributions._cosine_and_sine((angle * angle)[None], form)
        sine = sine * angle
        assert_close(sine.double(), angle.double().sin(), rtol=tolerance, atol=tolerance)
        assert_close(cosine.double(), angle.double().cos(), rtol=tolerance, atol=tolerance)


# --------------------------------------------------------------------------------------------------------- distributions

N = 100_000


def kolmogorov_smirnov(x: Tensor, cdf: Callable[[Tensor], Tensor]) -> float:
    """The largest distance of the empirical distribution from the true one, in units in which 1.95 is 1 in 1000."""
    at = cdf(x.double().flatten().sort().values)
    n = len(at)
    steps = torch.arange(n + 1, dtype=F64) / n
    return float(torch.maximum((steps[1:] - at).max(), (at - steps[:-1]).max()) * math.sqrt(n))


def normal_cdf(x: Tensor) -> Tensor:
    return torch.special.ndtr(x)


@pytest.mark.parametrize("dtype", [F32, F64])
def test_distributions(alone: mc.Mesh, dtype: torch.dtype) -> None:
    with rng("n", seed=11):
        assert kolmogorov_smirnov(torch.rand(N, dtype=dtype), lambda x: x) < 1.95
        assert kolmogorov_smirnov(torch.empty(N, dtype=dtype).uniform_(-3, 1), lambda x: (x + 3) / 4) < 1.95
        assert kolmogorov_smirnov(torch.empty(N, dtype=dtype).exponential_(2.0), lambda x: 1 - (-2 * x).exp()) < 1.95
        assert kolmogorov_smirnov(torch.empty(N, dtype=dtype).normal_(3, 2), lambda x: normal_cdf((x - 3) / 2)) < 1.95
        x = torch.randn(N, dtype=dtype)
        assert kolmogorov_smirnov(x, normal_cdf) < 1.95
        assert kolmogorov_smirnov(x[::2].square() + x[1::2].square(), lambda x: 1 - (-x / 2).exp()) < 1.95
        cut = nn.init.trunc_normal_(torch.empty(N, dtype=dtype), a=-1, b=2)
        low, high = normal_cdf(torch.tensor([-1.0, 2.0], dtype=F64))
        assert kolmogorov_smirnov(cut, lambda x: (normal_cdf(x) - low) / (high - low)) < 1.95
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3), (6, 15)):
        spread = math.sqrt(math.prod(range(1, 4 * power, 2)) / math.prod(range(1, 2 * power, 2)) * moment + 20)
        assert abs(float((x.double() ** power).mean()) - moment) < 4 * max(spread, 100.0 * (power == 6)) / math.sqrt(N)


def test_discrete_distributions(alone: mc.Mesh) -> None:
    with rng("n", seed=12):
        counts = torch.bincount(torch.randint(3, 10, (N,)), minlength=12)
        assert counts[:3].sum() == counts[10:].sum() == 0
        expected = N / 7
        assert float(((counts[3:10] - expected) ** 2 / expected).sum()) < 22.5  # chi-squared, 6 degrees, 1 in 1000
        for p in (0.0, 0.1, 0.9, 1.0):
            share = float(torch.bernoulli(torch.full((N,), p)).mean())
            assert abs(share - p) <= 4 * math.sqrt(p * (1 - p) / N)
        y = F.dropout(torch.ones(N, dtype=F64), 0.3)
        assert set(y.tolist()) == {0.0, 1 / 0.7}
        assert abs(float((y == 0).double().mean()) - 0.3) < 4 * math.sqrt(0.21 / N)


def test_elements_draws_seeds_and_shards_are_independent() -> None:
    def draw(seed: Any) -> list[Tensor]:
        with mc.use_mesh(mc.make_mesh({"a": 4})), rng("(a n)", seed=seed):
            return [torch.rand(N // 16, dtype=F64) for _ in range(2)]

    seeds: list[Any] = [0, 1, 2**32, -1, (0, 1), (1, 0), (0, 0, 1)]
    streams = [x for seed in seeds for parts in mc.launch(draw, ranks=4, args=(seed,)) for x in parts]
    assert len(streams) == 56
    together = torch.cat(streams)
    assert together.unique().numel() == together.numel()
    assert kolmogorov_smirnov(together, lambda x: x) < 1.95
    correlation = torch.corrcoef(torch.stack(streams)).fill_diagonal_(0)
    assert float(correlation.abs().max()) * math.sqrt(N // 16) < 4.5
    whole = torch.cat(streams[::2][:4])
    for lag in (1, 2, 3, 4, 8):
        pairs = torch.stack([whole[:-lag], whole[lag:]])
        assert abs(float(torch.corrcoef(pairs)[0, 1])) * math.sqrt(len(whole)) < 4


def test_short_floats_are_below_one_and_round_down(alone: mc.Mesh) -> None:
    def draw(dtype: torch.dtype) -> Tensor:
        with rng("n", seed=4):
            return torch.rand(N, dtype=dtype)

    full = draw(F32)
    for dtype, bits in ((F16, 11), (BF16, 8)):
        assert torch.equal(draw(dtype).float(), (full * 2**bits).floor() / 2**bits)
        with rng("n", seed=4):
            x = torch.empty(N, dtype=dtype).uniform_(-1, 1.5)
            z = torch.randn(N, dtype=dtype)
            e = torch.empty(N, dtype=dtype).exponential_()
        assert (float(x.min()), float(x.max()) < 1.5, float(e.min()) > 0) == (-1, True, True)
        with rng("n", seed=4):
            torch.rand(1)
            assert torch.equal(z, torch.randn(N).to(dtype))


# ------------------------------------------------------------------------------------- the same on every mesh and layout

X, Y = 16, 24
Make = Callable[[int, int], Tensor]
DRAWS: dict[str, Make] = {
    **{
        f"{name}-{str(dtype)[6:]}": lambda x, y, make=make, dtype=dtype: make(torch.empty(x, y, dtype=dtype))
        for dtype in (F32, F64, F16, BF16)
        for name, make in {
            "rand_like": torch.rand_like,
            "normal_": lambda x: x.normal_(1, 3),
            "dropout": lambda x: F.dropout(torch.ones_like(x), 0.25),
        }.items()
    },
    **{
        f"{name}-{str(dtype)[6:]}": lambda x, y, make=make, dtype=dtype: make(torch.empty(x, y, dtype=dtype))
        for dtype in (F32, F64)
        for name, make in {
            "randn_like": torch.randn_like,
            "uniform_": lambda x: x.uniform_(-2, 5),
            "exponential_": lambda x: x.exponential_(0.5),
            "bernoulli_": lambda x: x.bernoulli_(0.3),
            "random_": lambda x: x.random_(),
            "random_to": lambda x: x.random_(100),
        }.items()
    },
    "rand": lambda x, y: torch.rand(x, y),
    "rand-size": lambda x, y: torch.rand(size=(x, y), dtype=F64),
    "randn": lambda x, y: torch.randn((x, y)),
    "rand-out": lambda x, y: torch.rand(x, y, out=torch.empty(0, dtype=F64)),
    "randint": lambda x, y: torch.randint(50, (x, y)),
    "randint-low": lambda x, y: torch.randint(-50, 50, (x, y), dtype=torch.int8),
    "randint-names": lambda x, y: torch.randint(low=3, high=2**60, size=(x, y)),
    "randint_like": lambda x, y: torch.randint_like(torch.empty(x, y), 3, 50),
    "random_-all": lambda x, y: torch.empty(x, y, dtype=torch.int64).random_(-(2**63), None),
    "random_-bool": lambda x, y: torch.empty(x, y, dtype=torch.bool).random_(),
    "random_-byte": lambda x, y: torch.empty(x, y, dtype=torch.uint8).random_(),
    "normal-floats": lambda x, y: torch.normal(2.0, 3.0, (x, y)),
    "normal-mean": lambda x, y: torch.normal(torch.ones(x, y, dtype=F64), 2.0),
    "normal-std": lambda x, y: torch.normal(1.0, torch.full((x, y), 2.0)),
    "normal-both": lambda x, y: torch.normal(torch.ones(x, 1), torch.full((1, y), 2.0)),
    "bernoulli": lambda x, y: torch.bernoulli(torch.full((x, y), 0.4)),
    "bernoulli-p": lambda x, y: torch.empty(x, y).bernoulli(0.4),
    "bernoulli_-tensor": lambda x, y: torch.empty(x, y, dtype=torch.int64).bernoulli_(torch.tensor(0.4)),
    "strided": lambda x, y: torch.empty(y, x).t().normal_(),
    "nn.Dropout": lambda x, y: nn.Dropout(0.4)(torch.ones(x, y)),
    "init.uniform_": lambda x, y: nn.init.uniform_(torch.empty(x, y), -1, 1),
    "init.normal_": lambda x, y: nn.init.normal_(torch.empty(x, y), 1, 2),
    "init.trunc_normal_": lambda x, y: nn.init.trunc_normal_(torch.empty(x, y), a=-0.5, b=0.1),
    "init.trunc_normal_-wide": lambda x, y: nn.init.trunc_normal_(torch.empty(x, y), std=0.9),
    "init.xavier_uniform_": lambda x, y: nn.init.xavier_uniform_(torch.empty(x, y)),
    "init.xavier_normal_": lambda x, y: nn.init.xavier_normal_(torch.empty(x, y)),
    "init.kaiming_uniform_": lambda x, y: nn.init.kaiming_uniform_(torch.empty(x, y), a=2, mode="fan_out"),
    "init.kaiming_normal_": lambda x, y: nn.init.kaiming_normal_(torch.empty(x, y), nonlinearity="relu"),
    "Linear": lambda x, y: nn.Linear(y, x, bias=False).weight.detach(),
    "distributions": lambda x, y: torch.distributions.Normal(torch.ones(x, y), 2.0).sample(),
    "after-all": lambda x, y: torch.rand(x, y),
}
ONE = ["x y", "(a x) y", "x (a y)"]
TWO = ["x y", "(a x) y", "(a x) (b y)", "(b x) (a y)", "(b a x) y"]
THREE = ["(a b x) y", "x (c a b y)", "(c x) (b a y)"]


def parts_of(shape: dict[str, int], layout: str) -> dict[str, Tensor]:
    """What this rank draws."""
    with mc.use_mesh(mc.make_mesh(shape)):
        x, y = mc.local_shape(layout, (X, Y))
        with rng(layout, seed=7):
            return {name: make(x, y) for name, make in DRAWS.items()}


def joined(parts: list[Tensor], shape: dict[str, int], layout: str) -> Tensor:
    """The global tensor of the parts of all ranks; where several hold one, they must be equal."""
    rows, columns = (re.findall(r"[abc]", group) for group in re.findall(r"\([^)]*\)|[xy]", layout))
    cells: dict[tuple[int, int], Tensor] = {}
    for place, part in zip(itertools.product(*map(range, shape.values())), parts, strict=True):
        at = dict(zip(shape, place, strict=True))
        row, column = 0, 0
        for axis in rows:
            row = row * shape[axis] + at[axis]
        for axis in columns:
            column = column * shape[axis] + at[axis]
        assert torch.equal(cells.setdefault((row, column), part), part)
    height, width = (math.prod(shape[axis] for axis in axes) for axes in (rows, columns))
    return torch.cat([torch.cat([cells[i, j] for j in range(width)], 1) for i in range(height)])


@pytest.fixture(scope="module")
def whole() -> dict[str, Tensor]:
    """What one rank alone draws."""
    return parts_of({"a": 1, "b": 1, "c": 1}, "x y")


CUTS = [(mesh, layout) for mesh, layouts in zip(MESHES, (ONE, ONE, TWO, THREE), strict=True) for layout in layouts]


@pytest.mark.one_in(2, alike=True)
@pytest.mark.parametrize(("mesh", "layout"), CUTS, ids=str)
def test_every_mesh_and_layout_draws_the_same(mesh: dict[str, int], layout: str, whole: dict[str, Tensor]) -> None:
    ranks = mc.launch(parts_of, ranks=math.prod(mesh.values()), args=(mesh, layout))
    for name, wanted in whole.items():
        got = joined([parts[name] for parts in ranks], mesh, layout)
        assert got.dtype == wanted.dtype, name
        assert torch.equal(got, wanted), name


def test_processes_draw_the_same(pool4: WorkerPool, whole: dict[str, Tensor]) -> None:
    mesh = {"a": 2, "b": 2}
    ranks = pool4.run(drawn_by_a_process, mesh)
    for name, got in {name: joined([parts[name] for parts in ranks], mesh, "(b x) (a y)") for name in ranks[0]}.items():
        assert torch.equal(got, whole[name]), name


def drawn_by_a_process(shape: dict[str, int]) -> dict[str, Tensor]:
    return parts_of(shape, "(b x) (a y)")


def test_the_numbers_of_a_draw_are_all_different(whole: dict[str, Tensor]) -> None:
    for name in ("rand_like-float32", "rand_like-float64", "randn_like-float64", "exponential_-float64"):
        assert whole[name].unique().numel() == X * Y, name
    assert not torch.equal(whole["rand"], whole["after-all"])


def test_modules_are_initialised_as_the_global_ones() -> None:
    """A weight that is cut, with its bias, and convolutions; by fans of the global tensors."""

    def make(size: int) -> dict[str, Tensor]:
        with mc.use_mesh(mc.make_mesh({"a": size})):
            with rng("(a o) ...", seed=1):
                column, kernel = nn.Linear(6, 8 // size), nn.Conv2d(3, 8 // size, 2)
                embedding = nn.Embedding(8 // size, 3)
            with rng("o (a i)", seed=2):
                row = nn.Linear(8 // size, 6, bias=False)
        named = {"column": column, "kernel": kernel, "embedding": embedding, "row": row}
        return {f"{k}.{n}": p.detach() for k, module in named.items() for n, p in module.named_parameters()}

    parts = mc.launch(make, ranks=4, args=(4,))
    for name, wanted in make(1).items():
        got = torch.cat([each[name] for each in parts], dim=1 if name == "row.weight" else 0)
        assert torch.equal(got, wanted), name
        assert float(wanted.abs().max()) <= (
            10 if name.startswith("embedding") else 1 / math.sqrt(wanted[0].numel() or 1) + 0.41
        )


def test_fans_are_torchs_on_one_rank(alone: mc.Mesh) -> None:
    for fill in (nn.init.xavier_uniform_, nn.init.kaiming_uniform_):
        with rng("o i h w", seed=0):
            x = fill(torch.empty(30, 20, 5, 5))
        fan = (20 + 30) * 25 if fill is nn.init.xavier_uniform_ else 20 * 25
        assert 0.99 < float(x.abs().max()) / math.sqrt(6 / fan) <= 1


def test_what_needs_as_many_attempts_as_a_rank_has_bad_luck_counts_as_one_draw(alone: mc.Mesh) -> None:
    """trunc_normal_ draws again where it has rejected numbers: with one element as often as with many."""
    after = []
    for n in (1, 1000):
        with rng("n", seed=5):
            nn.init.trunc_normal_(torch.empty(n), a=-0.1, b=0.1)
            nn.init.trunc_normal_(torch.empty(n), a=-0.1, b=0.1)
            after.append(torch.rand(1).item())
    assert after[0] == after[1]


# ------------------------------------------------------------------------------------------------------------- the mode


def test_a_draw_depends_on_the_seed_and_its_number_and_on_nothing_else(alone: mc.Mesh) -> None:
    def draw(seed: Any) -> list[float]:
        with rng("n", seed=seed):
            return [torch.rand(1).item() for _ in range(3)]

    before = torch.get_rng_state()
    first = draw(3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert draw(3) == draw((3,)) == first
    seeds: list[Any] = [3, 4, 3 + 2**64 - 1, (3, 0), (0, 3), (3, 0, 0), (3, 1), (4, 0)]
    assert len({number for seed in seeds for number in draw(seed)}) == 24

    @rng("n", seed=3)
    def decorated() -> list[float]:
        return [torch.rand(1).item() for _ in range(3)]

    assert decorated() == decorated() == first
    with rng("n", seed=3):
        outer = [torch.rand(1).item()]
        assert draw(4) == draw(4)
        outer += [torch.rand(1).item() for _ in range(2)]
    assert outer == first


def test_arguments_are_those_of_torch(alone: mc.Mesh) -> None:
    with rng("...", seed=0):
        x = torch.rand(2, 3, dtype=F64, requires_grad=True)
        assert (x.shape, x.dtype, x.requires_grad, x.is_leaf, x.is_contiguous()) == ((2, 3), F64, True, True, True)
        image = torch.empty(2, 3, 4, 4, memory_format=torch.channels_last)
        assert torch.rand_like(image).is_contiguous(memory_format=torch.channels_last)
        assert torch.rand_like(torch.ones(2, dtype=torch.int64), dtype=F64).dtype == F64
        out = torch.empty(3)
        assert torch.randn(3, out=out) is out
        assert torch.bernoulli(torch.ones(3), out=out) is out
        assert out.tolist() == [1, 1, 1]
        weight = nn.Parameter(torch.zeros(3))
        assert nn.init.uniform_(weight) is weight
        with pytest.raises(RuntimeError, match="leaf Variable"):
            weight.uniform_()
        assert torch.rand(()).ndim == 0
        assert torch.rand(0, 3).shape == (0, 3)
        assert torch.rand(2**20, 2**20, device="meta").is_meta
        assert F.dropout(torch.ones(2, dtype=BF16, device="meta")).dtype == BF16
        assert torch.empty(3).uniform_(2, 2).tolist() == [2, 2, 2]
        assert torch.empty(3).normal_(2, 0).tolist() == [2, 2, 2]
        assert torch.randint(5, 6, (3,)).tolist() == [5, 5, 5]


def test_dropout(alone: mc.Mesh) -> None:
    x = torch.randn(40, 50, dtype=F64, requires_grad=True)

    def drop(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with rng("n d", seed=1):
            return F.dropout(x, *args, **kwargs)

    y = drop(x, 0.25)
    kept = y != 0
    assert 0.7 < float(kept.double().mean()) < 0.8
    assert_close(y, x * kept / 0.75, rtol=1e-15, atol=0)
    (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    assert_close(g, 2 * x * kept / 0.75**2)
    (h,) = torch.autograd.grad(g.sum(), x)
    assert_close(h, 2 * kept.double() / 0.75**2)
    again = x.detach().clone()
    assert drop(again, 0.25, inplace=True) is again
    assert torch.equal(again, y)
    assert drop(x, 0.25, False) is x
    assert drop(x, 0.0) is x
    nothing = drop(x, 1.0)
    assert not nothing.any()
    assert not torch.autograd.grad(nothing.sum(), x)[0].any()
    module = nn.Dropout(0.25)
    with rng("n d", seed=1):
        assert torch.equal(module(x), y)
        assert module.eval()(x) is x
    half = drop(torch.ones(40, 50, dtype=BF16), 0.25)
    assert half.dtype == BF16
    assert torch.equal(half != 0, kept)
    with rng("n d", seed=1):
        assert torch.equal(torch.dropout(x, 0.25, True), y)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_computes_again_with_the_same_numbers(reentrant: bool) -> None:
    def loss(x: Tensor, layer: int) -> Tensor:
        with rng("(a n) d", seed=(5, layer)):
            return F.dropout(torch.tanh(x), 0.5) + torch.randn_like(x) * x

    def run(checkpointed: bool) -> tuple[Tensor, Tensor]:
        with mc.use_mesh(mc.make_mesh({"a": 2})):
            x = torch.linspace(-1, 1, 12, dtype=F64).view(3, 4).requires_grad_()
            y = x
            for layer in range(2):
                y = checkpoint(loss, y, layer, use_reentrant=reentrant) if checkpointed else loss(y, layer)
            total = mc.all_reduce(y.square().sum(), "a")
            total.backward()
            return total.detach(), x.grad

    for plain, again in zip(mc.launch(run, 2, (False,)), mc.launch(run, 2, (True,)), strict=True):
        assert torch.equal(plain[0], again[0])
        assert torch.equal(plain[1], again[1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_inside_of_the_context_is_refused(alone: mc.Mesh, reentrant: bool) -> None:
    x = torch.ones(3, requires_grad=True)
    with rng("n", seed=0):
        with pytest.raises(mc.MeshError, match="the context stands around the checkpoint"):
            checkpoint(F.dropout, x, use_reentrant=reentrant)
        assert checkpoint(torch.sin, x, use_reentrant=reentrant).shape == (3,)
        F.dropout(x)

    @rng("n", seed=0)
    def inner(x: Tensor) -> Tensor:
        return checkpoint(rng("n", seed=1)(F.dropout), F.dropout(x), use_reentrant=False)

    y = checkpoint(inner, x, use_reentrant=reentrant)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())  # type: ignore[arg-type]


def test_under_transforms_the_numbers_are_the_same(alone: mc.Mesh) -> None:
    def drop(x: Tensor) -> Tensor:
        with rng("n", seed=2):
            return F.dropout(x, 0.5)

    x = torch.ones(50, dtype=F64)
    y = drop(x)
    assert torch.equal(torch.func.vmap(drop)(torch.stack([x, x])), torch.stack([y, y]))
    assert torch.equal(torch.func.grad(lambda x: drop(x).sum())(x), y)
    assert torch.equal(torch.func.jvp(drop, (x,), (x,))[1], y)


REFUSED: dict[str, Callable[[], Any]] = {
    "torch.randperm": lambda: torch.randperm(4),
    "torch.multinomial": lambda: torch.multinomial(torch.ones(4), 1),
    "Tensor.multinomial": lambda: torch.ones(4).multinomial(1),
    "torch.poisson": lambda: torch.poisson(torch.ones(4)),
    "torch.binomial": lambda: torch.binomial(torch.ones(4), torch.ones(4)),
    "Tensor.cauchy_": lambda: torch.ones(4).cauchy_(),
    "Tensor.log_normal_": lambda: torch.ones(4).log_normal_(),
    "Tensor.geometric_": lambda: torch.ones(4).geometric_(0.5),
    "F.rrelu": lambda: F.rrelu(torch.ones(4), training=True),
    "F.alpha_dropout": lambda: F.alpha_dropout(torch.ones(4), training=True),
    "F.feature_alpha_dropout": lambda: F.feature_alpha_dropout(torch.ones(4, 4), training=True),
    "F.dropout2d": lambda: F.dropout2d(torch.ones(4, 4, 4)),
    "F.gumbel_softmax": lambda: F.gumbel_softmax(torch.ones(4)),
    "F.scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(*[torch.ones(1, 4, 4)] * 3, dropout_p=0.1),
    "F.multi_head_attention_forward": lambda: nn.MultiheadAttention(4, 1, dropout=0.1)(*[torch.ones(1, 4, 4)] * 3),
    "torch.lstm": lambda: nn.LSTM(4, 4, num_layers=2, dropout=0.1)(torch.ones(1, 4, 4)),
    "torch.lstm, packed": lambda: nn.LSTM(4, 4, num_layers=2, dropout=0.1)(
        nn.utils.rnn.pack_sequence([torch.ones(4, 4)])
    ),
    "torch.gru": lambda: nn.GRU(4, 4, num_layers=2, dropout=0.1)(torch.ones(1, 4, 4)),
    "F.fractional_max_pool2d": lambda: F.fractional_max_pool2d(torch.ones(1, 4, 4), 2, output_size=2),
    "Tensor.rand": lambda: torch.ops.aten.rand([4]),
    "Tensor.rand_like.default": lambda: torch.ops.aten.rand_like.default(torch.ones(4)),
    "torch.native_dropout": lambda: torch.native_dropout(torch.ones(4), 0.5, True),
    "torch._standard_gamma": lambda: torch.distributions.Gamma(torch.ones(4), 1.0).sample(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_random_functions_are_refused(alone: mc.Mesh, name: str) -> None:
    before = torch.get_rng_state()
    with (
        rng("...", seed=0),
        pytest.raises(mc.MeshError, match=re.escape(f"meshcomm.rng: {name.split(',')[0]}")) as error,
    ):
        REFUSED[name]()
    assert "cannot draw a part of a global tensor" in str(error.value)
    assert "fix:" in str(error.value)
    assert torch.equal(torch.get_rng_state(), before)


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "generator": (lambda: torch.rand(4, generator=torch.Generator()), "torch.rand has a generator of its own"),
    "method's generator": (lambda: torch.ones(4).normal_(generator=torch.Generator()), "normal_ has a generator"),
    "complex": (lambda: torch.randn(4, dtype=torch.complex64), "torch.randn in torch.complex64"),
    "integer": (lambda: torch.ones(4, dtype=torch.int64).normal_(), "normal_ in torch.int64"),
    "low": (lambda: torch.randint(5, 5, (4,)), "from 5 to below 5"),
    "dtype": (lambda: torch.randint(300, (4,), dtype=torch.int8), "from 0 to below 300 in torch.int8"),
    "p": (lambda: torch.ones(4).bernoulli_(1.5), "probability that is not from 0 to 1"),
    "tensor p": (lambda: torch.bernoulli(torch.tensor([0.5, -1, 0, 0])), "probability that is not from 0 to 1"),
    "nan": (lambda: torch.bernoulli(torch.tensor([0.5, math.nan, 0, 0])), "probability that is not from 0 to 1"),
    "dropout": (lambda: F.dropout(torch.ones(4), 1.5), "F.dropout with p=1.5"),
    "std": (lambda: torch.ones(4).normal_(0, -1), "standard deviation -1"),
    "ends": (lambda: torch.ones(4).uniform_(1, 0), "from 1 to 0"),
    "lambd": (lambda: torch.ones(4).exponential_(0), "lambd=0"),
    "sparse": (lambda: torch.rand_like(torch.ones(4).to_sparse()), "not one dense tensor"),
    "dims": (lambda: torch.rand(4, 4), r"has 1 dim, the tensor 2(.|\n)*in: torch.rand(.|\n)*or: draw it under an rng"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(alone: mc.Mesh, name: str) -> None:
    call, text = WRONG[name]
    with rng("(a n)", seed=0), pytest.raises(mc.MeshError, match=text):
        call()


def test_orthogonal_matrices_are_made_whole(alone: mc.Mesh) -> None:
    with rng("n d", seed=0):
        x = nn.init.orthogonal_(torch.empty(4, 4, dtype=F64))
    assert_close(x @ x.T, torch.eye(4, dtype=F64))

    def cut() -> None:
        with mc.use_mesh(mc.make_mesh({"a": 2})), rng("(a n) d", seed=0):
            nn.init.orthogonal_(torch.empty(4, 4))

    with pytest.raises(mc.MeshError, match="orthogonal_ makes the part of each rank orthogonal"):
        mc.launch(cut, ranks=2)


def test_what_draws_nothing_passes(alone: mc.Mesh) -> None:
    x = torch.ones(2, 4, 4)
    before = torch.get_rng_state()
    with rng("(a n) ...", seed=0):
        F.alpha_dropout(x)
        F.dropout1d(x, training=False)
        F.dropout3d(x[None], p=0.0)
        F.rrelu(x)
        torch.rrelu(x)
        torch.alpha_dropout(x, 0.5, False)
        F.scaled_dot_product_attention(x, x, x)
        nn.MultiheadAttention(4, 1, dropout=0.1).eval()(x, x, x)
        nn.LSTM(4, 4, num_layers=2)(x)
        nn.LSTM(4, 4, num_layers=2, dropout=0.5).eval()(x)
        nn.GRU(4, 4)(nn.utils.rnn.pack_sequence([x[0], x[1]]))
        nn.RReLU().eval()(x)
        torch.native_dropout(x, 0.5, False)
        torch.native_dropout(x, train=False, p=0.5)
        torch.ops.aten.native_dropout(x, 0.5, False)
        nn.LSTM(4, 4, num_layers=2, dropout=0.5).eval()(nn.utils.rnn.pack_sequence([x[0], x[1]]))
    assert torch.equal(torch.get_rng_state(), before)


RANDOM = re.compile(r"(?<!ope)rand|dropout|normal_|uniform_|bernoulli|exponential_|multinomial|poisson|rrelu|gumbel")
HARMLESS = {"poisson_nll_loss"}


def test_every_random_function_of_torch_has_an_answer() -> None:
    overridable = [f for found in torch.overrides.get_overridable_functions().values() for f in found]
    found = set()
    for func in {*overridable, *torch.overrides.get_ignored_functions()}:  # of these modes see some all the same
        name = getattr(func, "__name__", "")
        packet = None if name.startswith("__") else getattr(torch.ops.aten, name, None)
        overloads = getattr(packet, "overloads", list)
        seeded = any(torch.Tag.nondeterministic_seeded in getattr(packet, each).tags for each in overloads())
        if isinstance(func, types.FunctionType) and func in overridable and not seeded and name not in HARMLESS:
            with contextlib.suppress(TypeError):  # a wrapper of what is not written in Python
                seeded = bool(RANDOM.search(re.sub(r'"""(.|\n)*?"""', "", inspect.getsource(func))))
        if seeded:
            found.add(name)
            assert handler_of(func) is not None, name
    assert {"rand", "dropout", "normal_", "multinomial", "gumbel_softmax", "lstm", "randperm", "rrelu"} <= found
    assert handler_of(nn.init.xavier_uniform_) is not None
    for func in (
        nn.init.constant_,
        torch.relu,
        Tensor.add,
        F.linear,
        F.softmax,
        torch.empty,
        torch.einsum,
        Tensor.view,
        len,
    ):
        assert handler_of(func) is None


@pytest.mark.gpu
def test_the_accelerator_draws_what_the_cpu_draws(alone: mc.Mesh) -> None:
    device = torch.accelerator.current_accelerator()
    widest = (F32,) if device.type == "mps" else (F32, F64)  # Metal has no float64

    def draw(device: Any) -> list[Tensor]:
        with rng("x y", seed=0):
            found = [
                make(100, 30, dtype=dtype, device=device)
                for make in (torch.rand, torch.randn)
                for dtype in (*widest, BF16)
            ]
            found += [
                torch.randint(-9, 9, (100, 30), device=device),
                F.dropout(torch.ones(100, 30, device=device), 0.3),
            ]
            return [*found, torch.empty(100, 30, dtype=widest[-1], device=device).exponential_(2.0)]

    for here_, there in zip(draw("cpu"), draw(device), strict=True):
        assert there.device.type != "cpu"
        assert torch.equal(here_, there.cpu())


@pytest.mark.gpu
def test_the_accelerators_state_is_forked_too(alone: mc.Mesh) -> None:
    device = torch.accelerator.current_accelerator()
    torch.manual_seed(0)
    wanted = [torch.rand(3, device=device) for _ in range(2)]
    torch.manual_seed(0)
    assert torch.equal(torch.rand(3, device=device), wanted[0])
    inner = []
    for _ in range(2):
        with fork_rng("a", seed=1):
            inner.append(torch.rand(3, device=device))
    assert torch.equal(*inner)
    assert not torch.equal(inner[0], wanted[1])
    assert torch.equal(torch.rand(3, device=device), wanted[1])


# ------------------------------------------------------------------------------------------------- what the checker reads


class Listener:
    """Stands where the checker of varying types stands."""

    def __init__(self) -> None:
        self.heard: list[tuple[Tensor, frozenset[str] | None]] = []

    def drawn(self, x: Tensor) -> None:
        self.heard.append((x, here.draws_along))


def test_the_checker_hears_of_each_draw_and_of_its_axes() -> None:
    def body() -> None:
        with mc.use_mesh(mc.make_mesh({"a": 2, "b": 2})):
            listener: Any = Listener()
            assert here.draws_along is None
            here.watcher = listener
            try:
                with rng("(a n)", seed=0):
                    x = torch.rand(4)
                    y = torch.empty(4).normal_()
                    with rng("n", seed=0):
                        z = torch.bernoulli(torch.ones(4))
                    dropped = F.dropout(x, 0.5)
                    assert here.draws_along == {"a"}
            finally:
                here.watcher = None
            heard = listener.heard
            assert [axes for _, axes in heard] == [{"a"}, {"a"}, frozenset(), {"a"}]
            assert all(told is mine for (told, _), mine in zip(heard, (x, y, z), strict=False))
            assert heard[3][0].dtype == torch.bool
            assert torch.equal(dropped != 0, heard[3][0] & (x != 0))
            with fork_rng(("b", "a"), seed=0):
                assert here.draws_along == {"a", "b"}
                with fork_rng((), seed=0):
                    assert here.draws_along == frozenset()
                assert here.draws_along == {"a", "b"}
            with contextlib.suppress(ZeroDivisionError), rng("(b n)", seed=0):
                raise ZeroDivisionError
            with contextlib.suppress(ZeroDivisionError), fork_rng("a", seed=0):
                raise ZeroDivisionError
            assert here.draws_along is None

    mc.launch(body, ranks=4)


def test_a_fork_inside_has_the_say(alone: mc.Mesh) -> None:
    with fork_rng((), seed=1):
        wanted = torch.rand(3)
    with rng("n", seed=0):
        first = torch.rand(3)
        with fork_rng((), seed=1):
            assert torch.equal(torch.rand(3), wanted)
            torch.randperm(4)
            with rng("n", seed=0):
                assert torch.equal(torch.rand(3), first)
        second = torch.rand(3)
    with rng("n", seed=0):
        assert torch.equal(torch.rand(3), first)
        assert torch.equal(torch.rand(3), second)


# ----------------------------------------------------------------------------------------------------------------- seeds


def agreed_seeds() -> Any:
    mesh = mc.make_mesh({"a": 2, "b": 2})
    torch.manual_seed(100 + mesh.rank)
    seeds = [sync_seed(axis, mesh=mesh) for axis in ("a", "b", ("a", "b"), ("b", "a"))]
    return mesh.coordinate, seeds


def test_sync_seed_agrees_along_its_axis(run4: Run) -> None:
    first, again = run4(agreed_seeds), run4(agreed_seeds)
    assert first == again
    seeds = {(at["a"], at["b"]): found for at, found in first}
    # The value of index 0 along the axis, on all that share it.
    assert seeds[0, 0][0] == seeds[1, 0][0] != seeds[0, 1][0] == seeds[1, 1][0]
    assert seeds[0, 0][1] == seeds[0, 1][1] != seeds[1, 0][1] == seeds[1, 1][1]
    torch.manual_seed(100)
    drawn = [int(torch.empty(1, dtype=torch.int64).random_()) for _ in range(4)]
    assert seeds[0, 0] == drawn
    assert all(found[2:] == drawn[2:] for found in seeds.values())
    assert len({seed for found in seeds.values() for seed in found}) == 6
    assert all(0 <= seed < 2**63 for found in seeds.values() for seed in found)


def test_sync_seed_keeps_generators_alike_that_are_alike() -> None:
    def body() -> tuple[float, float]:
        with mc.use_mesh(mc.make_mesh({"a": 4})), fork_rng(()):
            sync_seed("a")
            with fork_rng("a"):
                pass
            return torch.rand(1).item()

    assert len(set(mc.launch(body, ranks=4))) == 1


def three_draws() -> tuple[float, float, float]:
    return torch.rand(1).item(), float(np.random.rand()), random.random()


CHOICES: list[Any] = ["a", "b", "c", ("a", "b"), ("c", "a"), ("a", "b", "c"), ()]


@pytest.mark.parametrize("seed", [None, 5])
def test_fork_rng_differs_along_its_axes_and_along_no_other(seed: int | None) -> None:
    mesh = mc.make_mesh({"a": 2, "b": 2, "c": 2})

    def body() -> Any:
        found = {}
        for axis in CHOICES:
            with fork_rng(axis, seed=seed, mesh=mesh):
                found[axis] = [three_draws() for _ in range(2)]
        return mesh.coordinate, found

    ranks = mc.launch(body, ranks=8)
    for axis in CHOICES:
        by_index: dict[Any, set[Any]] = {}
        for at, found in ranks:
            numbers = tuple(itertools.chain(*found[axis]))
            by_index.setdefault(tuple(at[name] for name in axis), set()).add(numbers)
        assert len(by_index) == 2 ** len(axis)
        assert all(len(numbers) == 1 for numbers in by_index.values()), axis
        every = [number for numbers in by_index.values() for number in next(iter(numbers))]
        assert len(set(every)) == len(every) == 6 * 2 ** len(axis)


def test_successive_forks_differ_and_follow_from_torchs_seed() -> None:
    def body() -> list[float]:
        with mc.use_mesh(mc.make_mesh({"a": 2, "b": 2})):
            found = []
            for _ in range(3):
                with fork_rng("a"):
                    found.append(torch.rand(1).item())
            return found

    torch.manual_seed(7)
    first = mc.launch(body, ranks=4)
    torch.manual_seed(7)
    assert mc.launch(body, ranks=4) == first
    torch.manual_seed(8)
    assert mc.launch(body, ranks=4) != first
    assert len({number for numbers in first for number in numbers}) == 6


def test_a_given_seed_needs_nobody_and_restores_everything() -> None:
    """One rank alone forks; nobody else is waited for."""

    def body() -> None:
        with mc.use_mesh(mc.make_mesh({"a": 2, "b": 2})) as mesh:
            if mesh.rank != 1:
                return
            np.random.randn()  # numpy keeps the second of two
            torch.randn(3)
            states = torch.get_rng_state(), random.getstate(), np.random.get_state()
            with fork_rng(("b", "a"), seed=3):
                inner = three_draws()
                with fork_rng("b", seed=4):
                    three_draws()
                after = three_draws()
            assert torch.equal(torch.get_rng_state(), states[0])
            assert random.getstate() == states[1]
            assert repr(np.random.get_state()) == repr(states[2])
            with contextlib.suppress(ZeroDivisionError), fork_rng(("b", "a"), seed=3):
                assert three_draws() == inner
                assert three_draws() == after
                raise ZeroDivisionError
            assert torch.equal(torch.get_rng_state(), states[0])

    mc.launch(body, ranks=4)


def forked_program() -> Any:
    """Collectives inside, where in-process ranks change over."""
    with mc.use_mesh(mc.make_mesh({"a": 2, "b": 2})) as mesh:
        before = torch.get_rng_state()
        with fork_rng("a", seed=9):
            numbers = []
            for _ in range(3):
                x = torch.rand(2)
                numbers.append(x)
                rows = mc.all_gather(x[None], ("a", "b"))
                numbers.append(torch.rand(2) + float(np.random.rand()) + random.random())
            with fork_rng("b"):
                mc.all_reduce(torch.rand(2), "a")
                numbers.append(torch.rand(2))
        assert torch.equal(torch.get_rng_state(), before) or mesh.size == 1
        return rows, torch.stack(numbers)


def test_collectives_inside_a_fork(run4: Run) -> None:
    ranks = run4(forked_program)
    for rows, _ in ranks:
        assert torch.equal(rows, ranks[0][0])
        assert torch.equal(rows[0], rows[1])
        assert not torch.equal(rows[0], rows[2])
    numbers = [each for _, each in ranks]
    assert torch.equal(numbers[0][:6], numbers[1][:6])
    assert torch.equal(numbers[2][:6], numbers[3][:6])
    assert not (numbers[0][:6] == numbers[2][:6]).any()
    assert torch.equal(numbers[0][6], numbers[2][6])
    assert not torch.equal(numbers[0][6], numbers[1][6])


def test_both_runtimes_fork_alike(pool4: WorkerPool) -> None:
    for one, other in zip(mc.launch(forked_program, ranks=4), pool4.run(forked_program), strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1][:6], other[1][:6])


def test_checkpoint_inside_a_fork_computes_again_with_the_same_numbers() -> None:
    def layer(x: Tensor) -> Tensor:
        x = mc.shift(F.dropout(x, 0.5), "a")
        return F.dropout(x.sin(), 0.5)

    def forked(x: Tensor) -> Tensor:
        with fork_rng("a"):
            return F.dropout(x.cos(), 0.5)

    def run(checkpointed: bool) -> Tensor:
        with mc.use_mesh(mc.make_mesh({"a": 2, "b": 2})), fork_rng("a", seed=1):
            x = torch.linspace(0, 1, 32, dtype=F64).requires_grad_()
            for fn in (layer, forked):
                y = checkpoint(fn, x, use_reentrant=False) if checkpointed else fn(x)
                y.square().sum().backward()
            return x.grad

    for plain, again in zip(mc.launch(run, 4, (False,)), mc.launch(run, 4, (True,)), strict=True):
        assert torch.equal(plain, again)
        assert plain.any()


def test_a_fork_has_other_numbers_than_the_program_with_that_seed() -> None:
    def body() -> tuple[float, float]:
        with mc.use_mesh(mc.make_mesh({"a": 2})):
            own = torch.rand(1).item()
            with fork_rng("a", seed=3):
                return own, torch.rand(1).item()

    torch.manual_seed(3)
    numbers = mc.launch(body, ranks=2)
    assert len({number for pair in numbers for number in pair}) == 4


# ---------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: sync_seed("x"), "meshcomm.sync_seed: no axis 'x'"),
        (lambda: sync_seed(()), "meshcomm.sync_seed: no axis is named"),  # type: ignore[arg-type]
        (lambda: fork_rng("x").__enter__(), "meshcomm.fork_rng: no axis 'x'"),
        (lambda: fork_rng(("a", "a")).__enter__(), "meshcomm.fork_rng: an axis is named twice"),
        (lambda: fork_rng("a", seed=1.5).__enter__(), "meshcomm.fork_rng: seed=1.5 is not an int"),
        (lambda: fork_rng("a", seed=True).__enter__(), "meshcomm.fork_rng: seed=True is not an int"),
        (lambda: rng("(x n)", seed=0).__enter__(), "meshcomm.rng: 'x' is not an axis of the mesh"),
        (lambda: rng(3, seed=0).__enter__(), "meshcomm.rng: a layout is a string"),  # type: ignore[arg-type]
        (lambda: rng("n", seed=None).__enter__(), "meshcomm.rng: seed=None is not an int"),  # type: ignore[arg-type]
        (lambda: rng("n", seed=()).__enter__(), r"meshcomm.rng: seed=\(\) is not an int"),
        (lambda: rng("n", seed=(1, "2")).__enter__(), "meshcomm.rng: seed=.* is not an int"),  # type: ignore[arg-type]
    ],
)
def test_errors_on_every_rank(call: Callable[[], Any], text: str) -> None:
    def body() -> None:
        with mc.use_mesh(mc.make_mesh({"a": 2, "b": 2})), pytest.raises(mc.MeshError, match=text):
            call()
        assert here.draws_along is None

    mc.launch(body, ranks=4)


def test_outside_of_ranks_and_without_a_mesh() -> None:
    mesh = mc.make_mesh({"a": 2})
    for call in (lambda mesh: fork_rng("a", seed=0, mesh=mesh), lambda mesh: rng("n", seed=0, mesh=mesh)):
        with pytest.raises(mc.MeshError, match="outside a rank"):
            call(mesh).__enter__()
        with pytest.raises(mc.MeshError, match="there is no mesh"):
            call(None).__enter__()
    with pytest.raises(mc.MeshError, match="outside a rank"):
        sync_seed("a", mesh=mesh)


SIZES: list[Callable[[], Tensor]] = [
    lambda: torch.rand(2, 3), lambda: torch.rand((2, 3)), lambda: torch.rand([2]), lambda: torch.rand(torch.Size((4, 1))),
    lambda: torch.rand(()), lambda: torch.rand(0), lambda: torch.rand(2, dtype=F64), lambda: torch.rand(2, dtype=None),
    lambda: torch.randn(size=(2, 3)), lambda: torch.randint(3, (2, 2)), lambda: torch.randint(1, 3, [5]),
    lambda: torch.randint(3, (2,), dtype=torch.uint8), lambda: torch.randint(3, (2,), dtype=None),
    lambda: torch.randint(1, 3, size=(2,)), lambda: torch.rand(torch.tensor(2), 3), lambda: torch.rand(2, layout=torch.strided),
]  # fmt: skip


def test_sizes_and_dtypes_are_those_that_torch_reads_from_the_arguments(alone: mc.Mesh) -> None:
    for make in SIZES:
        wanted = make()
        with mc.rng("...", seed=0):
            got = make()
        assert (got.shape, got.dtype, got.stride()) == (wanted.shape, wanted.dtype, wanted.stride())
    wrong: list[Callable[[], Tensor]] = [
        lambda: torch.rand(-1), lambda: torch.rand((2,), 3), lambda: torch.rand("2"), lambda: torch.rand(2.0),
        lambda: torch.randint(3, 2),
    ]  # fmt: skip
    for make in wrong:
        with pytest.raises((RuntimeError, TypeError)):
            make()
        with mc.rng("...", seed=0), pytest.raises((RuntimeError, TypeError)):
            make()
