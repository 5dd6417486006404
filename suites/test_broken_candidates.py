"""A planted fault is refused, by the rung that stands for its kind and in words that point at it; an honest path is not.

Every other suite shows that what is right passes. Here every rung is seen to fail, and only where it should: the rungs
below it hold. Guards against checks that nothing trips, refusals that blame the wrong thing, and false alarms. With the
rungs' suites: a claim that is reached was not reached because nobody looked.

LSVERIFY_PROFILE=deep makes every fault on every architecture where it can be made, and runs every honest path on all.
"""

import gc

import pytest

from lsverify.cases import DEFAULT_ARCHS, QUICK
from lsverify.evidence import CaseConfig
from lsverify.faults import FAULTS
from lsverify.faults.honest import HONEST
from lsverify.ladder import judge
from lsverify.models import TINY
from lsverify.strategies import profile

DEEP = profile() == "deep"
SIZES = {} if DEEP else QUICK
# The other suites run LongStraw itself on every architecture.
EVERYWHERE = HONEST if DEEP else ("sharing",)


@pytest.fixture(scope="module", autouse=True)
def _imports_are_not_garbage():
    """The memory tracker collects garbage first, which costs a quarter of a small case unless imports are left out."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def planted():
    """Architecture and fault, in an order in which neighbours share a model."""
    pairs = [
        (arch, fault)
        for fault in FAULTS.values()
        for arch in (fault.architectures if DEEP else fault.architectures[:1])
    ]
    order = (*DEFAULT_ARCHS, *TINY)
    return sorted(pairs, key=lambda pair: (order.index(pair[0]), str(pair[1].options)))


def honest():
    return [
        (arch, name)
        for arch in DEFAULT_ARCHS
        for name in (HONEST if arch == DEFAULT_ARCHS[0] else EVERYWHERE)
    ]


@pytest.mark.parametrize(
    ("where", "fault"), planted(), ids=lambda value: getattr(value, "name", value)
)
def test_a_fault_is_refused_and_pointed_at(where, fault):
    missed = list(fault.missed(judge(fault.config(where, **SIZES))))
    assert not missed, "\n".join(missed)


@pytest.mark.parametrize(("where", "name"), honest())
def test_an_honest_path_reaches_its_claim(where, name):
    case = CaseConfig(arch=where, candidate=f"lsverify.faults.honest:{name}", **SIZES)
    refused = [rung for rung in judge(case).rungs if not rung.holds]
    assert not refused, "\n".join(f"{rung.name} {rung.status}: {rung.detail}" for rung in refused)
