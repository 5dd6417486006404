"""Cases judged once for all tests that ask, on the smallest problem, and receipts made up by hand."""

import functools
import gc

from lsverify import evidence, ladder
from lsverify.cases import QUICK
from lsverify.evidence import CaseConfig, CaseReceipt, Distance, Parameter, Receipt, Rung
from lsverify.ladder import judge
from lsverify.precision import deterministic

# The memory tracker collects garbage first. What is imported by now stays, and need not be searched each time.
gc.collect()
gc.freeze()
# Every setting that a test asks for is built once: the models are tiny.
ladder._referee = functools.cache(ladder._referee.__wrapped__)


@functools.cache
def judged(arch="llama", **fields):
    """The receipt of a quick case; `candidate` names a path of candidates.py."""
    if "candidate" in fields:
        fields["candidate"] = f"candidates:{fields['candidate']}"
    return judge(CaseConfig(arch=arch, **{**QUICK, **fields}))


def rung(receipt, name):
    return next(found for found in receipt.rungs if found.name == name)


def statuses(receipt):
    return {found.name: found.status for found in receipt.rungs}


def made_up(status="proven", measure=1.5e-15, **fields):
    """A case's receipt with every rung at one status, nothing run."""
    config = fields.pop("config", CaseConfig(arch="llama", policy="exact"))
    number = fields.pop("number", 0.1)
    distance = Distance(
        rel_l2=number, cosine=number, norm_ratio=number, worst_parameter="w", worst_rel_l2=number
    )
    parameter = Parameter(
        name="w",
        status="match",
        rel_l2=number,
        cosine=None,
        norm_ratio=number,
        limit=1e-12,
        bias_rel_l2=number,
        slices={"q": number, "k": None},
    )
    given = {
        "arch": config.arch,
        "policy": config.policy,
        "candidate": config.candidate,
        "reference": "full",
        "dtype": config.dtype,
        "prompt_length": config.prompt_length,
        "group_size": config.group_size,
        "response_lengths": (3, 1, 3),
        "objective": config.objective,
        "seed": config.seed,
        "rungs": tuple(
            Rung(name=name, status=status, measure=measure, limit=1e-12, detail="so it is")
            for name in evidence.RUNGS
        ),
        "gradient": distance,
        "bias": distance,
        "paper_gate": True,
        "parameters": (parameter,),
        "accounting": {"tokens_forwarded": 41, "seconds": 0.25, "live_bytes_peak": None},
        "config": config,
        "problem": "00ff",
    }
    return CaseReceipt(**(given | fields))


def receipt_of(*cases, command=("gate",)):
    with deterministic():
        here = evidence.environment()
    return Receipt(environment=here, command=command, cases=cases)
