"""Does speculation pay: accepted tokens against the time of a round.

    E(d)     tokens that a request gains per round of draft length d, the bonus token included; E(0) = 1
    T(d)     milliseconds of that round; T(0) = F(B, K), an ordinary step
    goodput  B E(d) / T(d)        TPOT  T(d) / E(d)        speedup  E(d) F(B, K) / T(d)

A draft length pays where the round costs fewer ordinary steps than it yields tokens: T(d) / F(B, K) < E(d).  The
latency that a model answers is that of a whole round; it is divided by E(d) here and nowhere else.

E(d) is the user's own measurement, and two mistakes with it are common.  A rate per position is either unconditional
(of all rounds, as serving engines log it) or conditional (of the rounds that came so far); the two constructors have
different names, and neither is a default.  And the i.i.d. curve through one measured point is biased, in a direction
that depends on the drafter: learned drafters tire along the draft and fall below it (2 to 11 % at depths 2 to 5 in
public measurements of one EAGLE head), n-gram drafters that matched once go on matching and rise above it.

An error in T(d) is uneven too: a predicted speedup is too high without bound where rounds were predicted too short, and
too low by 100 % at most where too long.  The published rule leans to the second at large batches: by measured rounds of
a public engine a batch of 64 speculates best with one draft token, by the rule with none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from fpmjax.errors import refuse_option
from fpmjax.estimate import estimate
from fpmjax.given import integer, integers, word
from fpmjax.metrics import show
from fpmjax.rule import SpeculativeRule
from fpmjax.status import Status
from fpmjax.work import Work

MOST = 8  # draft length looked up to by default where the acceptance is known at every depth
MOST_EVER = 1 << 16  # draft length that is looked up to at all
NONE = -1
SOURCES = ("iid", "unconditional", "conditional", "measured")
TOKENS_HINT = "tokens per round lie from 1 to draft length + 1, and are 1 at draft length 0"
RATE_HINT = "an acceptance rate is a number from 0 to 1"


@dataclass(frozen=True, eq=False)
class Acceptance:
    """Tokens per request and round at each draft length; made by `iid`, `unconditional`, `conditional` or `measured`.

    source: which of the four.
    tokens: float64 [m + 1], E(0) .. E(m), NaN where it is not known; None for `iid`, which knows every depth.
    rate:   of `iid`, else None.

    Raises OptionError, the code being the field.
    """

    source: str
    tokens: np.ndarray | None = None
    rate: float | None = None

    def __post_init__(self):
        if word("source", self.source, SOURCES) == "iid":
            if self.tokens is not None:
                refuse_option("tokens", "an i.i.d. rate knows every draft length", "leave tokens out")
            object.__setattr__(self, "rate", float(rates_of("rate", [self.rate])[0]))
            return
        if self.rate is not None:
            refuse_option("rate", f"{self.source} tokens have no rate", "leave rate out")
        object.__setattr__(self, "tokens", tokens_of(self.tokens))

    @classmethod
    def iid(cls, rate: float) -> Acceptance:
        """Every draft token is accepted with one probability, whatever came before (Leviathan et al., 2211.17192).

        E(d) = (1 - rate ** (d + 1)) / (1 - rate), its limit d + 1 at rate 1.  Biased for real drafters, see above.
        """
        return cls("iid", rate=rate)

    @classmethod
    def unconditional(cls, rates: Any) -> Acceptance:
        """rates[j]: the share of all rounds in which draft token j + 1 was accepted, and so every one before it.

        What vLLM logs as `acceptance_rate_per_pos`.  E(d) = 1 + rates[0] + .. + rates[d - 1]; such rates never rise.
        """
        q = rates_of("rates", rates)
        rising = np.flatnonzero(np.diff(q) > 0)
        if rising.size:
            j = int(rising[0])
            refuse_option(
                "rates",
                f"rates[{j + 1}]={q[j + 1]} exceeds rates[{j}]={q[j]}, but a token is accepted only after those before",
                "shares of the rounds that came so far are Acceptance.conditional(rates)",
            )
        return cls("unconditional", 1 + np.concatenate([[0.0], np.cumsum(q)]))

    @classmethod
    def conditional(cls, rates: Any) -> Acceptance:
        """rates[j]: the share of accepted tokens j + 1 among the rounds in which all tokens before it were accepted.

        E(d) = 1 + sum over j <= d of rates[0] * .. * rates[j - 1].
        """
        c = rates_of("rates", rates)
        return cls("conditional", 1 + np.concatenate([[0.0], np.cumsum(np.cumprod(c))]))

    @classmethod
    def measured(cls, tokens: Mapping[int, float]) -> Acceptance:
        """E(d) itself at some draft lengths, e.g. {1: 1.7, 3: 2.4}; every other one is not known, and no candidate.

        Pool counts as `pooled_tokens_per_round` does.  Nothing is interpolated.
        """
        hint = "give tokens per round by draft length, e.g. {1: 1.7, 3: 2.4}: from 1 to draft length + 1 each"
        if not isinstance(tokens, Mapping) or not tokens:
            refuse_option("tokens", f"tokens is {show(tokens)}", hint)
        depths = [int(integers("tokens", d, 0)) for d in tokens]
        if max(depths) > MOST_EVER:
            refuse_option("tokens", f"tokens holds draft length {max(depths)}", f"draft lengths up to {MOST_EVER:,}")
        out = np.full(max(depths) + 1, np.nan)
        for d, value in zip(depths, tokens.values(), strict=True):
            if not is_number(value) or not 1 <= value <= d + 1:
                refuse_option("tokens", f"tokens at draft length {d} is {show(value)}", hint)
            out[d] = float(value)
        out[0] = 1.0
        return cls("measured", out)

    @property
    def most(self) -> int | None:
        """The largest draft length that is known; None where every one is."""
        return None if self.tokens is None else len(self.tokens) - 1

    def tokens_per_round(self, draft_length: Any) -> np.ndarray:
        """float64 of the shape of `draft_length`, integers from 0; NaN where the acceptance is not known."""
        d = integers("draft_length", draft_length, 0)
        if self.tokens is not None:
            known = d < len(self.tokens)
            return np.where(known, self.tokens[np.where(known, d, 0)], np.nan)
        missed = 1.0 - float(self.rate or 0.0)
        if missed == 0:
            return d + 1.0
        with np.errstate(divide="ignore"):  # log(0) at rate 0, and exp of it is 0
            return -np.expm1((d + 1) * np.log1p(-missed)) / missed


def pooled_tokens_per_round(accepted: Any, rounds: Any) -> float:
    """1 + sum of accepted draft tokens / sum of rounds, over requests or log intervals of one draft length.

    A mean of per-request means weighs a short request like a long one, and is not this number.  Count as accepted what
    was emitted: the last round of a request ends at its stop token or its limit.

    Raises OptionError (`accepted`, `rounds`) for what is no count, and where there is no round.
    """
    total, turns = (int(integers(name, x, 0).sum()) for name, x in (("accepted", accepted), ("rounds", rounds)))
    if not turns:
        refuse_option("rounds", "there is no round to take a mean over", "give the rounds of each request")
    return 1 + total / turns


@dataclass(frozen=True, eq=False)
class Payoff:
    """What rounds of a draft length bring, NumPy arrays of one shape.

    draft_length:     int64; -1 where no draft length can be answered, and every number is NaN there.
    tokens_per_round: float64, E(d).
    round_ms:         float64, T(d).
    goodput_per_ms:   float64, tokens of all requests together per millisecond.
    tpot_ms:          float64, milliseconds per token of one request.
    speedup:          float64, against ordinary decoding; NaN where that is not covered.
    break_even:       float64, T(d) / F(B, K): tokens per round from which this draft length pays; NaN likewise.
    calibrated:       bool, inside the study of the published rule; ordinary decoding always is.
    """

    draft_length: Any
    tokens_per_round: Any
    round_ms: Any
    goodput_per_ms: Any
    tpot_ms: Any
    speedup: Any
    break_even: Any
    calibrated: Any


@dataclass(frozen=True, eq=False)
class BestDraft:
    """The draft length of the largest goodput, and every candidate; the smaller one where two are equal.

    best:      Payoff [n...], ordinary decoding (draft length 0) among the candidates.
    by_depth:  Payoff [n..., m]: every draft length that was looked at, along the last axis.
    status:    int8 [n..., m], a `Status`: why a draft length has no latency.
    candidate: bool [n..., m]: it has a latency, and its tokens per round are known.
    """

    best: Payoff
    by_depth: Payoff
    status: np.ndarray
    candidate: np.ndarray


def best_draft_length(
    model: Any,
    requests: Any,
    kv: Any,
    tokens_per_round: Acceptance,
    rule: SpeculativeRule | None = None,
    most: int | None = None,
) -> BestDraft:
    """Which draft length gives the most tokens per second, 0 being ordinary decoding; one rank, pure decode.

    requests, kv: integers or arrays of them that broadcast: requests in the batch, and past KV tokens of all together.
    rule: factor of a round; None is the published one.  most: the largest draft length looked at, at most 65,536; None
    is all that `tokens_per_round` knows, and 8 for an i.i.d. rate.

    A draft length that the model does not cover is no candidate: `status` says why, `candidate` which ones were.  The
    rule was calibrated up to 8 requests and 4 draft tokens; `calibrated` says which answers lie outside.

    Raises OptionError (`requests`, `kv`, `tokens_per_round`, `most`), and what `estimate` raises for the model and the
    rule.
    """
    acceptance = checked(tokens_per_round)
    depths = np.arange(most_of(acceptance, most) + 1)
    b, k = integers("requests", requests, 1), integers("kv", kv, 0)
    try:
        b, k = np.broadcast_arrays(b, k)
    except ValueError:
        refuse_option("kv", f"kv {k.shape} does not broadcast against requests {b.shape}", "give one shape, or scalars")
    work = Work.decode(b.astype(np.uint32), k.astype(np.uint32))
    plain: Any = estimate(model, work, check=False)
    ms, status = (np.empty((*b.shape, len(depths)), dtype) for dtype in (np.float64, np.int8))
    calibrated = np.ones(ms.shape, bool)
    ms[..., 0], status[..., 0] = plain.latency_ms, plain.status
    if len(depths) > 1:
        wide = Work.decode(b[..., None].astype(np.uint32), k[..., None].astype(np.uint32))
        rounds: Any = estimate(model, wide, draft_length=depths[1:], rule=rule, check=False)
        ms[..., 1:], status[..., 1:], calibrated[..., 1:] = rounds.latency_ms, rounds.status, rounds.calibrated
    return weigh(depths, ms, status, calibrated, b, acceptance)


def best_measured_draft_length(
    draft_lengths: Any, round_ms: Any, requests: Any, tokens_per_round: Acceptance
) -> BestDraft:
    """The same of measured rounds: round_ms [n..., m] at draft_lengths [m], 0 (an ordinary step) among them or not.

    A time that is NaN was not measured, and is no candidate.  requests: [n...].  `calibrated` is True throughout, for
    no rule is used.

    Raises OptionError (`draft_lengths`, `round_ms`, `requests`, `tokens_per_round`).
    """
    acceptance = checked(tokens_per_round)
    d, b = integers("draft_lengths", draft_lengths, 0), integers("requests", requests, 1)
    if d.ndim != 1 or not d.size or (np.diff(d) <= 0).any():
        refuse_option(
            "draft_lengths", f"draft_lengths is {show(draft_lengths)}", "give rising integers, e.g. [0, 1, 3]"
        )
    ms = np.asarray(round_ms)
    if ms.dtype.kind not in "iuf" or ms.shape[-1:] != d.shape or not (np.isnan(ms) | (ms > 0) & np.isfinite(ms)).all():
        refuse_option("round_ms", f"round_ms is {show(round_ms)}", "positive milliseconds, one for each draft length")
    try:
        b = np.broadcast_to(b, ms.shape[:-1])
    except ValueError:
        refuse_option("requests", f"requests {b.shape} does not go with round_ms {ms.shape}", "one for each row")
    status = np.where(np.isnan(ms), np.int8(Status.NO_ROWS), np.int8(Status.OK))
    return weigh(d, ms.astype(np.float64), status, np.ones(ms.shape, bool), b, acceptance)


def weigh(
    depths: np.ndarray, ms: np.ndarray, status: np.ndarray, calibrated: np.ndarray, b: np.ndarray, known: Acceptance
) -> BestDraft:
    """Every draft length [m] of round times [n..., m], and the best one; times that are not positive are none."""
    tokens = np.broadcast_to(known.tokens_per_round(depths), ms.shape)
    candidate = (ms > 0) & np.isfinite(tokens)
    ms = np.where(ms > 0, ms, np.nan)
    ordinary = ms[..., :1] if depths[0] == 0 else np.full((*ms.shape[:-1], 1), np.nan)
    ratio = ms / ordinary
    every = Payoff(
        draft_length=np.broadcast_to(depths, ms.shape),
        tokens_per_round=tokens,
        round_ms=ms,
        goodput_per_ms=b[..., None] * tokens / ms,
        tpot_ms=ms / tokens,
        speedup=tokens / ratio,
        break_even=ratio,
        calibrated=calibrated,
    )
    at = np.where(candidate, every.goodput_per_ms, -np.inf).argmax(-1, keepdims=True)
    found = candidate.any(-1)

    def take(x: np.ndarray) -> np.ndarray:
        nothing = {"f": np.nan, "i": NONE, "b": False}[x.dtype.kind]
        return np.where(found, np.take_along_axis(x, at, -1)[..., 0], nothing).astype(x.dtype)

    best = Payoff(**{f.name: take(getattr(every, f.name)) for f in fields(Payoff)})
    return BestDraft(best, every, status, candidate)


def checked(acceptance: Any) -> Acceptance:
    """OptionError for bare rates, which do not say what they are rates of."""
    if not isinstance(acceptance, Acceptance):
        refuse_option(
            "tokens_per_round",
            f"tokens_per_round is {show(acceptance)}, which does not say what it counts",
            "Acceptance.iid(rate), .unconditional(rates) as engines log them, .conditional(rates) or .measured({...})",
        )
    return acceptance


def most_of(acceptance: Acceptance, most: Any) -> int:
    """The largest draft length to look at; OptionError where the acceptance says nothing that far."""
    known = acceptance.most
    if most is None:
        return MOST if known is None else known
    top = integer("most", most, 0, MOST_EVER)
    if known is not None and top > known:
        refuse_option(
            "most", f"most={top}, but tokens per round are known up to draft length {known}", f"most={known}, or none"
        )
    return top


def tokens_of(value: Any) -> np.ndarray:
    """float64 [m + 1], a copy: 1 at draft length 0, from 1 to d + 1 at d, or NaN; OptionError (`tokens`) otherwise."""
    try:
        found = np.asarray(value)
        if found.ndim != 1 or not found.size or found.dtype.kind not in "iuf" or np.ma.is_masked(value):
            raise ValueError
    except ValueError:
        refuse_option("tokens", f"tokens is {show(value)}", TOKENS_HINT)
    found = found.astype(np.float64)
    wrong = ~(np.isnan(found) | (found >= 1) & (found <= np.arange(1, len(found) + 1)))
    wrong[0] = found[0] != 1
    if wrong.any():
        d = int(wrong.argmax())
        refuse_option("tokens", f"tokens at draft length {d} is {found[d]}", TOKENS_HINT)
    return found


def rates_of(name: str, value: Any) -> np.ndarray:
    """float64 [m], each from 0 to 1; OptionError otherwise."""
    try:
        found = np.asarray(value)
    except ValueError:  # lists of unequal lengths
        found = np.empty((0, 0))
    if found.ndim != 1 or not found.size or found.dtype.kind not in "iuf" or np.ma.is_masked(value):
        refuse_option(name, f"{name} is {show(value)}", RATE_HINT)
    outside = ~((found >= 0) & (found <= 1))
    if outside.any():
        j = int(outside.argmax())
        refuse_option(name, f"{name} holds {found[j]} at {j}", RATE_HINT + "; a percentage is divided by 100")
    return found.astype(np.float64)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
