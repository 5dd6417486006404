"""What an ablation says: rows of policies, the groups of parameters that the bias falls on, and the whole."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from lsverify.evidence import HOLDS, Environment, Real, Status
from lsverify.limits import ORACLE_LIMIT
from lsverify.state_term import RECORD, StateTerm


class Group(BaseModel):
    """The parameters of one layer, or of one kind: distance to full autograd, and `lost`, their share of |bias|^2."""

    model_config = RECORD

    rel_l2: Real | None
    cosine: Real | None
    norm_ratio: Real | None
    lost: Real | None


class Row(BaseModel):
    """One policy on one problem.

    status: of the gradient against the claimed reference, as in a receipt; `not_applicable` with the reason in
    `detail`. to_claim, limit: relative L2 to that reference, and the largest allowed. rel_l2, cosine, norm_ratio: to
    full autograd, over all parameters; per_layer has "-" for what is outside the layers. tokens: forwarded, counted for
    the path and from lengths for full autograd. live bytes are over what was alive before the step; seconds are the
    fastest of a few runs of a tiny model, else of one; both follow from shapes and are taken at the first seed only.
    variance: of a policy with a coin, E |gradient - full|^2 / |full|^2; its bias is that of one draw.
    """

    model_config = RECORD

    arch: str
    policy: str
    length: int
    seed: int
    status: Status
    reference: str | None = None
    detail: str = ""
    to_claim: Real | None = None
    limit: Real | None = None
    rel_l2: Real | None = None
    cosine: Real | None = None
    norm_ratio: Real | None = None
    per_layer: dict[str, Group] = {}
    per_kind: dict[str, Group] = {}
    tokens: int | None = None
    tokens_full: int | None = None
    live_bytes: int | None = None
    live_bytes_full: int | None = None
    seconds: float | None = None
    seconds_full: float | None = None
    variance: Real | None = None

    @property
    def holds(self) -> bool:
        """Whether nothing speaks against it; a policy that does not fit the model shows nothing either way."""
        return self.status in HOLDS


class Ablation(BaseModel):
    """`DIR/ablation.json`, numbers at full precision."""

    model_config = RECORD

    schema_version: Literal[1] = 1
    environment: Environment
    command: tuple[str, ...]
    dtype: str
    objective: str
    rows: tuple[Row, ...]
    state_terms: tuple[StateTerm, ...]

    @property
    def exit_code(self) -> int:
        """0: every path that ran has its claimed gradient, at least one did, and the references agree; else 1."""
        shown = any(row.status in ("proven", "proven_zero") for row in self.rows)
        sound = not self.inconsistent
        return 0 if shown and sound and all(row.holds for row in self.rows) else 1

    @property
    def inconsistent(self) -> list[StateTerm]:
        """State terms that their parts do not sum to; at oracle precision only, where rounding has a known limit."""
        if self.dtype != "float64":
            return []
        return [term for term in self.state_terms if not term.left <= ORACLE_LIMIT]
