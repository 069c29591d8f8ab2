"""What looks wrong with a study's measurements, before anyone believes its numbers.

A diagnosis is a hint to look, not a refusal: nothing is left out because of one.  Thresholds come from public rounds
of engines whose timing is described, or from what the statistics need; each check says which.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fpmjax.study.columns import CONFIGURATION
from fpmjax.study.exclude import WARMUP
from fpmjax.study.identity import mismatches
from fpmjax.study.reading import config_name, group_name
from fpmjax.study.refit import PLAUSIBLE, plausible, ratio_of, refit
from fpmjax.study.rules import coded
from fpmjax.study.statistics import medians, partial, thin

if TYPE_CHECKING:
    from fpmjax.study.read import Study
    from fpmjax.study.scored import Scored

# The lowest line known of a loaded one-layer drafter whose rounds are timed whole: vLLM with asynchronous scheduling,
# Llama-3.1-8B and EAGLE at batches 1 to 16 (PR 32374), refitted.  What it costs above an ordinary pass is halved below.
LOWEST = (0.0749, 1.042)
LOW_INTERCEPT = 1.05  # just above it: published rules and other engines have 1.15 to 1.3
ROUNDS_ALIKE = 0.05  # of a multiple: how far from 2 or 3 medians a merged round lies; rounds scatter by a few per cent
CROWDED = 4  # times as many rounds at the multiple as half-way to it, where the tail of slow rounds would pass
MERGED_CONFIG, MERGED_GROUP = (0.1, 5), (0.02, 16)  # share of the rounds, and number: fewer are chance
LATENCIES = (1e-9, 1e12)  # milliseconds; what lies outside is no evidence for anything
SCOPES_APART = 0.08  # just below what two scopes differed by
WHOLE = 0.1  # of a multiple, between configurations of one model, method and draft length
LOWEST_RATIO = 0.5  # of the ordinary pass that a round contains
HIGHEST_INTERCEPT = 2.0  # what a round costs beside its drafts: published rules and other engines have 1.04 to 1.3
LEAST_DEPTHS = 3  # two fix a line, and only a third can contradict it
LEAST_CONFIGS, LEAST_ROUNDS = 2, 16  # in a cell: to draw from, and one run of rounds that are alike
SHOWN = 8  # places named
WITHOUT_DRAFTER = ("ngram", "draft_model", "other")  # drafts cost next to nothing, or a forward pass of another model


def diagnose(study: Study | None, scored: Scored, model: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Everything that applies, in a fixed order; an ordinary study has none.

    study: what was scored, for what the scored rounds do not say (None: runs are not compared with each other).
    model: what the document says of the model that the reference comes from.

    Every entry: `code`; `what` was seen, one sentence; `where`, at most eight places in words, and how many there are
    in `places`; `help`, what to do about it.
    """
    rounds = scored.where(plausible(ratio_of(scored)))  # one latency of 1e308 is one mistake, not five
    checks = (
        implausible_latencies(scored),
        other_reference(study, model),
        mixed_scopes(study),
        draft_time(rounds),
        other_drafters(scored),
        merged_rounds(rounds),
        few_depths(rounds),
        thin_configurations(scored),
        thin_cells(scored),
        partial_configurations(scored),
    )
    return [entry for found in checks for entry in found]


def told(code: str, what: str, where: Sequence[str], help: str) -> dict[str, Any]:
    return {"code": code, "what": what, "where": list(where[:SHOWN]), "places": len(where), "help": help}


def implausible_latencies(scored: Scored) -> Iterator[dict[str, Any]]:
    """Rounds whose T / F no mistake of units explains; nothing is fitted with them, and errors may be no numbers."""
    wrong = np.flatnonzero(~plausible(ratio_of(scored)))
    if len(wrong):
        found = [
            f"{config_name(scored.configs[scored.config[i]]._asdict())}, round {scored.round_index[i]}: "
            f"T = {scored.measured_ms[i]:.3g} ms, F = {scored.reference_ms[i]:.3g} ms"
            for i in wrong[:SHOWN]
        ]
        low, high = PLAUSIBLE
        yield told(
            "implausible_latencies",
            f"{len(wrong):,} {'rounds have' if len(wrong) > 1 else 'round has'} a T / F outside of {low:g}..{high:g}, "
            f"so nothing is fitted, and errors beyond float64 are null: {found[0]}",
            found,
            "See what wrote these latencies, the round's or those of the ordinary steps behind F; mark them invalid",
        ) | {"places": len(wrong)}


def other_reference(study: Study | None, model: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """A reference from a model of another deployment, or of another clock, by the names on both sides."""
    if study is None or model is None:
        return
    from fpmjax.study.parts import scope_of

    if found := mismatches(model, scope_of(study)):
        yield told(
            "other_reference",
            f"the reference is of something else than the rounds: {found[0]}",
            found,
            "Take a model of this deployment, timed by this clock; where only the spelling differs, all is well",
        )


def mixed_scopes(study: Study | None) -> Iterator[dict[str, Any]]:
    """Runs (study_id) of the same configurations that differ by 8 % or more in the median, as timing scopes do: one
    engine measured two ways differed by 9 to 12 % (B300, Qwen3-32B, vLLM 0.20.1), repeated runs by a few per cent.

    A file that names two scopes is refused when it is read; this finds one that is named wrongly.
    """
    if study is None or len(study.words["study_id"]) < 2:
        return
    c = study.columns
    rows = np.flatnonzero((c["round_index"] >= WARMUP) & (c["latency_ms"] > 0))
    config = coded([c[name][rows] for name in ("kind", *CONFIGURATION)])
    config = np.unique(config, return_inverse=True)[1]
    runs, size = len(study.words["study_id"]), int(config.max(initial=-1)) + 1
    place = config * runs + c["study_id"][rows]
    count = np.bincount(place, minlength=size * runs)
    middle = medians(c["latency_ms"][rows], place, count).reshape(size, runs)
    middle[(middle < LATENCIES[0]) | (middle > LATENCIES[1])] = np.nan  # told as implausible
    found = []
    for i in range(runs):
        for j in range(i + 1, runs):
            times = middle[:, j] / middle[:, i]
            times = times[np.isfinite(times)]
            if len(times) and abs(float(np.median(times)) - 1) >= SCOPES_APART:
                names = study.words["study_id"]
                told_apart = f"{names[j]} takes {100 * np.median(times):.1f} % of the time of {names[i]}"
                found.append(f"{told_apart} in {len(times)} configurations")
    if found:
        yield told(
            "mixed_scopes",
            f"runs of the same configurations differ as much as two timing scopes do: {found[0]}",
            found,
            "Check what latency_ms spans in each run, and make one study of each scope",
        )


def draft_time(scored: Scored) -> Iterator[dict[str, Any]]:
    """Ratios that leave no room for drafting, or far too much.

    ratios_too_low: at some draft length the median ratio is below one half: less than half of the ordinary pass that
    the round contains.  ratios_too_high: it is d + 1 or more, so that the round would lose against ordinary steps even
    if all its drafts were accepted, or the intercept is 2 or more.  Both are wrong units, or a reference of another
    machine, and then nothing else is said of the group.
    draft_time_missing: the median ratio at the deepest draft length exceeds 1 by less than half of what the lowest
    public line does.  baseline_loaded: there is room, but the intercept is below 1.05; ordinary steps of an engine
    with the drafter loaded took 6.6 to 21.6 % longer (vLLM issue 49548), which is divided out of every ratio.
    """
    low, high, missing, loaded = [], [], [], []
    for name, rounds in groups(scored):
        depths = np.unique(rounds.depth).tolist()
        middles = {d: float(np.median(config_ratios(rounds.where(rounds.depth == d)))) for d in depths}
        one_layer = scored.configs[rounds.config[0]].method not in WITHOUT_DRAFTER
        fit = refit(rounds, anchors=True)
        intercept = fit.unclipped[1] if one_layer else np.nan  # NaN, too, where nothing was fitted
        floor = 1 + (LOWEST[0] * depths[-1] + LOWEST[1] - 1) / 2
        if under := [d for d in depths if middles[d] < LOWEST_RATIO]:
            low.append(f"{name}: median T / F at d = {under[0]} is {middles[under[0]]:.3g}")
        elif over := [d for d in depths if middles[d] >= d + 1]:
            high.append(f"{name}: median T / F at d = {over[0]} is {middles[over[0]]:.3g}")
        elif intercept >= HIGHEST_INTERCEPT:
            high.append(f"{name}: intercept {intercept:.3g}")
        elif one_layer and (ratio := middles[depths[-1]]) < floor:
            missing.append(f"{name}: median T / F at d = {depths[-1]} is {ratio:.3f}, below {floor:.3f}")
        elif intercept < LOW_INTERCEPT:
            loaded.append(f"{name}: intercept {intercept:.3f}")
    units = "Check that all of latency_ms is in ms, and that F was measured on this machine, engine and timing scope"
    if low:
        yield told("ratios_too_low", f"rounds take less than half of the pass they contain: {low[0]}", low, units)
    if high:
        more = f"{units}; rounds with prefill or host work in them are slow, too"
        yield told("ratios_too_high", f"rounds cost more than their drafts can ever return: {high[0]}", high, more)
    if missing:
        yield told(
            "draft_time_missing",
            f"rounds cost hardly more than an ordinary pass of their width: {missing[0]}",
            missing,
            "Time the whole round: draft, verification and sampling; and check that F is of the same timing scope",
        )
    if loaded:
        yield told(
            "baseline_loaded",
            f"the intercept is near or below 1: {loaded[0]}",
            loaded,
            "Measure ordinary steps in an engine without a drafter; with asynchronous scheduling 1.04 has been seen",
        )


def other_drafters(scored: Scored) -> Iterator[dict[str, Any]]:
    """Methods that the form slope * d + intercept was not made for: it was calibrated for one-layer drafters."""
    found = sorted({group_name(config._asdict()) for config in scored.configs if config.method in WITHOUT_DRAFTER})
    if found:
        yield told(
            "other_drafter",
            f"the rule was calibrated for one-layer drafters, and this is another kind: {found[0]}",
            found,
            "Read the refit as a description: a draft model adds d passes of its own, whatever F is",
        )


def merged_rounds(scored: Scored) -> Iterator[dict[str, Any]]:
    """Two or three rounds reported as one, or one as two: ratios crowd at a multiple of the configuration's median, or
    a whole configuration lies at a multiple of the others of its depth.

    A tail of slow rounds thins out; it does not crowd at 2 and 3.  So a tenth of a configuration's rounds, or one in
    fifty of a (gpu, model, method), must lie there, four times as many as half-way between 1 and the multiple.
    """
    ratio, size = ratio_of(scored), len(scored.configs)
    middle = medians(ratio, scored.config, scored.count)
    relative = ratio / middle[scored.config]

    def crowded(unit: np.ndarray, units: int, share: float, least: int) -> np.ndarray:
        """bool [units]: of which too many rounds lie at a multiple; unit: int [n]."""
        enough = np.maximum(share * np.bincount(unit, minlength=units), least)
        found = np.zeros(units, bool)
        for multiple, between in ((2, 1.5), (3, 2.5), (1 / 2, 1 / 1.5), (1 / 3, 1 / 2.5)):
            near, half_way = (
                np.bincount(unit, np.abs(relative / x - 1) <= ROUNDS_ALIKE, units) for x in (multiple, between)
            )
            found |= (near >= enough) & (near >= CROWDED * half_way)
        return found

    suspect = crowded(scored.config, size, *MERGED_CONFIG)
    places = [f"{config_name(scored.configs[i]._asdict())}: some rounds" for i in np.flatnonzero(suspect)]
    for i in np.flatnonzero(crowded(scored.groups[scored.config], len(scored.group_keys), *MERGED_GROUP)):
        if not suspect[scored.groups == i].any():
            gpu, model, method = scored.group_keys[i]
            places.append(f"{gpu}, {model} + {method}: some rounds")
    kinds: dict[Any, list[int]] = {}
    for i in np.flatnonzero(scored.count > 0).tolist():
        kinds.setdefault((*scored.configs[i].cell[1:],), []).append(i)
    for alike in kinds.values():
        times = middle[alike] / np.median(middle[alike])
        for i, x in zip(alike, times.tolist(), strict=True):
            if not suspect[i] and min(abs(x / 2 - 1), abs(x / 3 - 1)) <= WHOLE:
                places.append(f"{config_name(scored.configs[i]._asdict())}: all rounds, {x:.2f} times the others")
    if places:
        yield told(
            "merged_rounds",
            f"rounds crowd at 2 or 3 times the others, as where two were timed as one: {places[0]}",
            places,
            "Check that the collector writes one row per round, and that nothing else ran in between",
        )


def few_depths(scored: Scored) -> Iterator[dict[str, Any]]:
    """Fewer than three draft lengths of a model + method: one fixes no slope, two cannot show that it is a line."""
    found = []
    for name, rounds in groups(scored):
        depths = np.unique(rounds.depth).tolist()
        if len(depths) < LEAST_DEPTHS:
            found.append(f"{name}: d = {', '.join(map(str, depths))}")
    if found:
        yield told(
            "few_draft_lengths",
            f"fewer than {LEAST_DEPTHS} draft lengths: {found[0]}",
            found,
            "Measure three or more: one fixes no slope, and two cannot contradict a line",
        )


def thin_configurations(scored: Scored) -> Iterator[dict[str, Any]]:
    """Configurations with no scored round, or one: the first enter no mean, the second have a full vote in theirs."""
    lean = np.flatnonzero(thin(scored))
    if len(lean):
        found = [f"{config_name(scored.configs[i]._asdict())}: {scored.count[i]} scored" for i in lean]
        yield told(
            "thin_configurations",
            f"{len(found)} of {len(scored.configs)} configurations have one scored round or none",
            found,
            "See why their rounds were left out or found no reference; longer runs and more ordinary batches help",
        )


def thin_cells(scored: Scored) -> Iterator[dict[str, Any]]:
    """Cells of fewer than two configurations, which have no interval, or of fewer than 16 rounds, the length of run
    inside which rounds count as alike."""
    found = []
    for i, (gpu, model, method, depth) in enumerate(scored.cell_keys):
        counts = scored.count[scored.cells == i]
        configs, rounds = int((counts > 0).sum()), int(counts.sum())
        if configs < LEAST_CONFIGS or rounds < LEAST_ROUNDS:
            found.append(f"{gpu}, {model} + {method}, d = {depth}: configurations {configs}, rounds {rounds}")
    if found:
        yield told(
            "thin_cells",
            f"{len(found)} of {len(scored.cell_keys)} cells rest on one configuration, or on fewer than 16 rounds",
            found,
            "Measure several batches and contexts at every draft length; a cell of one has no interval",
        )


def partial_configurations(scored: Scored) -> Iterator[dict[str, Any]]:
    """Configurations of which more than 5 % of the rounds have no reference."""
    lost = np.flatnonzero(partial(scored))
    if len(lost):
        found = [
            f"{config_name(scored.configs[i]._asdict())}: {scored.unmatched[i]:,} of "
            f"{scored.unmatched[i] + scored.count[i]:,} rounds"
            for i in lost
        ]
        yield told(
            "partial_configurations",
            f"{len(found)} of {len(scored.configs)} configurations have rounds without a reference, over 5 % of them",
            found,
            "Measure ordinary steps at batch (d + 1) B from shorter contexts, until their KV spans the round's",
        )


def groups(scored: Scored) -> Iterator[tuple[str, Scored]]:
    """(model + method, its rounds), sorted; without those that have no rounds."""
    names = np.array([group_name(config._asdict()) for config in scored.configs], object)
    for name in sorted(set(names[scored.count > 0].tolist())):
        yield name, scored.where((names == name)[scored.config])


def config_ratios(scored: Scored) -> np.ndarray:
    """float64, the median T / F of every configuration with a round."""
    return medians(ratio_of(scored), scored.config, scored.count)[scored.count > 0]
