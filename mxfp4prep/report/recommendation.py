"""One paragraph of advice, computed from the audit: where to serve, what misses, the way out.

Nothing is said that the audit does not say: each sentence stands only where its fact holds, and
another deployment is named only after it has been tried on the checkpoint's shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mxfp4prep.collector import collector_paused
from mxfp4prep.cost import TRIED, Shapes, counts_all_experts, worst_path
from mxfp4prep.decisions import distinct
from mxfp4prep.deployment import Deployment
from mxfp4prep.errors import printable
from mxfp4prep.report.cost_text import flops_share, nbytes_share, percent
from mxfp4prep.report.joining import listed
from mxfp4prep.report.screen import Screen, counted, human
from mxfp4prep.report.shortfalls import Shortfall, arithmetic, shortfalls, spelled, why_not_asm
from mxfp4prep.report.tally import ASM_ONLY, POSSIBLE, degrees_of

if TYPE_CHECKING:
    from mxfp4prep.auditing import Audit
    from mxfp4prep.engines import Outcome
    from mxfp4prep.survey import Survey

MOST_QUOTED = 120
"""Characters of an engine's message that are quoted."""

MOST_WHOLE = 0.1
"""Part of the MXFP4 bytes that every rank might as well hold whole; more would be no way out."""

AS_GOOD = 0.005
"""Shares of FLOPs no further apart than this are as good: replicated KV heads alone do as much."""


def recommendation_lines(audit: Audit, screen: Screen) -> list[str]:
    """The paragraph in lines that fit the screen, each sentence beginning one."""
    return [
        line
        for sentence in _sentences(audit)
        for line in screen.wrap(screen.name(sentence), "- ", "  ")
    ]


def best_degree(audit: Audit) -> int | None:
    """The degree that the paragraph recommends; None where no asked degree splits every layer."""
    return _degrees(audit, audit.shapes).best


def recommend(audit: Audit) -> str:
    """The paragraph. Unprintable characters of names and of engines' messages are escaped."""
    return " ".join(_sentences(audit))


@collector_paused()
def _sentences(audit: Audit) -> list[str]:
    shapes = audit.shapes
    degrees = _degrees(audit, shapes)
    families = [] if degrees.clean == degrees.asked else shortfalls(audit)
    sentences = [
        *_engine(audit, degrees),
        *_where(audit, degrees, shapes),
        *_misses(families, degrees),
        *_stuck(families, degrees),
        *_ways(audit, degrees, shapes),
        *_conversion(audit, degrees),
    ]
    return [printable(sentence) for sentence in sentences]


@dataclass(frozen=True, slots=True)
class _Degrees:
    """The degrees that were asked about, by what is true there.

    clean      every layer is asm
    possible   every layer can be split
    troubled   the engine that was asked about crashes or answers wrongly
    best       where to serve, None where no degree is possible
    """

    asked: tuple[int, ...]
    clean: tuple[int, ...]
    possible: tuple[int, ...]
    troubled: tuple[int, ...]
    best: int | None

    @property
    def stuck(self) -> tuple[int, ...]:
        """Where some layer cannot be split."""
        return tuple(tp for tp in self.asked if tp not in self.possible)


def _degrees(audit: Audit, shapes: Shapes) -> _Degrees:
    deployment = audit.survey.deployment
    asked = audit.survey.tp
    clean = tuple(degrees_of(audit.decisions, asked, ASM_ONLY))
    possible = tuple(degrees_of(audit.decisions, asked, POSSIBLE))
    bad = {tp for outcome in ("crash", "corrupt") for tp in _outcome_degrees(audit, outcome)}
    candidates: Sequence[int] = clean
    if not clean and possible:
        shares = {tp: _asm_share(audit, tp) for tp in possible}
        candidates = [tp for tp in possible if shares[tp] >= max(shares.values()) - AS_GOOD]
    if deployment.expert_parallel:
        staffed = [tp for tp in candidates if shapes.has_experts_for(tp, deployment)]
        candidates = staffed or candidates
    quiet = [tp for tp in candidates if tp not in bad] or candidates
    return _Degrees(asked, clean, possible, tuple(sorted(bad)), max(quiet, default=None))


def _asm_share(audit: Audit, tp: int) -> float:
    """Of FLOPs per token; of bytes where a token passes no MXFP4 layer."""
    cost = audit.costs[tp]
    counted = any(part.flops for part in cost.paths.values())
    return flops_share(cost, "asm") if counted else nbytes_share(cost, "asm")


def _where(audit: Audit, degrees: _Degrees, shapes: Shapes) -> Iterator[str]:
    best, largest, deployment = degrees.best, audit.largest_clean, audit.survey.deployment
    if best is None:
        yield f"Do not serve at {_at(degrees.asked)}: there some layers cannot be split."
        smaller = [tp for tp in TRIED if tp < degrees.asked[0]]
        possible = [tp for tp in smaller if worst_path(shapes, tp, deployment) != "impossible"]
        if possible:
            yield f"The next smaller degree that splits every layer is tp {possible[-1]}."
    else:
        holds = human(audit.costs[best].rank_nbytes)
        yield (
            f"{_subject(degrees, best)}{_with(audit.survey)}: {_asm_fact(audit, degrees, best)}, "
            f"and the fullest rank holds {holds}."
        )
        if deployment.expert_parallel and not shapes.has_experts_for(best, deployment):
            yield f"There are {shapes.experts} routed experts, so some of {best} ranks have none."
    if largest is None:
        yield f"No degree of {listed(sorted({*TRIED, *degrees.asked}))} puts every layer on ASM."
    elif largest != best:
        yield f"The largest degree that puts every layer on ASM is tp {largest}."


def _subject(degrees: _Degrees, best: int) -> str:
    if best in degrees.troubled:
        return f"By its shapes, tp {best} is best"
    if best in degrees.clean:
        return f"Serve at tp {best}"
    if len(degrees.asked) == 1:
        return f"tp {best} is possible"
    asked = f"Of tp {listed(degrees.asked)},"
    if len(degrees.possible) == 1:
        return f"{asked} only tp {best} is possible"
    return f"{asked} tp {best} is best"


def _asm_fact(audit: Audit, degrees: _Degrees, best: int) -> str:
    if best in degrees.clean:
        return "every MXFP4 layer takes the ASM path there"
    paths = audit.costs[best].paths
    if not paths["asm"].nbytes:
        return "every MXFP4 layer runs on Triton there"
    what = "FLOPs per token" if any(part.flops for part in paths.values()) else "bytes"
    return f"ASM takes {percent(_asm_share(audit, best))} of a rank's MXFP4 {what} there"


def _with(survey: Survey) -> str:
    """How the ranks share the model beyond tensor parallelism."""
    deployment = survey.deployment
    words = ["expert parallelism"] if deployment.expert_parallel else []
    words += ["sequence parallelism"] if deployment.sequence_parallel else []
    return f" with {' and '.join(words)}" if words else ""


def _misses(families: Sequence[Shortfall], degrees: _Degrees) -> Iterator[str]:
    unclean = [tp for tp in degrees.possible if tp not in degrees.clean]
    facts = [(family, family.degrees("triton", unclean)) for family in families]
    if any(at for _, at in facts):
        yield f"These run on Triton: {spelled(facts, why_not_asm)}."


def _stuck(families: Sequence[Shortfall], degrees: _Degrees) -> Iterator[str]:
    facts = [(family, family.degrees("impossible", degrees.stuck)) for family in families]
    if any(at for _, at in facts):
        start = "These" if degrees.best is None else f"Do not serve at {_at(degrees.stuck)}: these"
        yield f"{start} cannot be split: {spelled(facts, arithmetic)}."


def _ways(audit: Audit, degrees: _Degrees, shapes: Shapes) -> Iterator[str]:
    """Other deployments that do better at the degrees asked about."""
    survey = audit.survey
    if degrees.clean == degrees.asked:
        return
    helped: set[int] = set()
    found: dict[str, list[str]] = {}
    for words, deployment in _alternatives(survey):
        worst = {
            tp: worst_path(shapes, tp, deployment)
            for tp in degrees.asked
            if shapes.has_experts_for(tp, deployment)
        }
        clean = [tp for tp in worst if tp not in degrees.clean and worst[tp] == "asm"]
        freed = [tp for tp in worst if tp in degrees.stuck and worst[tp] == "triton"]
        helped |= {*clean, *freed}
        gains = [f"every layer is on ASM at {_at(clean)}"] if clean else []
        gains += [f"every layer can be split at {_at(freed)}"] if freed else []
        if gains:
            found.setdefault(" and ".join(gains), []).append(words)
    for gained, ways in found.items():
        yield f"With {' or '.join(ways)}, {gained}."
    left = [tp for tp in degrees.stuck if tp not in helped]
    if left and _stuck_part(audit, left) <= MOST_WHOLE:
        yield (
            f"At {_at(left)} it takes an engine that holds those layers whole on every rank "
            "(--parallel 'PATTERN=replicated')."
        )


def _stuck_part(audit: Audit, degrees: Sequence[int]) -> float:
    """The part of the MXFP4 bytes that cannot be split, at the worst of the degrees."""
    return max(nbytes_share(audit.costs[tp], "impossible") for tp in degrees)


def _alternatives(survey: Survey) -> Iterator[tuple[str, Deployment]]:
    """Deployments one switch away that may matter to this checkpoint."""
    deployment = survey.deployment
    routed = any(item.role.parallel == "expert" for item in survey.layers)
    if not deployment.expert_parallel and (routed or survey.shared):
        yield "expert parallelism (--ep)", deployment._replace(expert_parallel=True)
    if not deployment.sequence_parallel and survey.shared:
        yield "sequence parallelism (--sp)", deployment._replace(sequence_parallel=True)
    if deployment.shared_experts == "separate" and survey.shared:
        fused = deployment._replace(shared_experts="auto")
        yield "shared experts fused (--shared-experts auto)", fused


def _conversion(audit: Audit, degrees: _Degrees) -> Iterator[str]:
    best = degrees.best
    if best is None:
        return
    ep = " --ep" if audit.survey.deployment.expert_parallel else ""
    command = f"`mxfp4prep convert --tp {best}{ep}`"
    unsure = (
        " (of every expert, since config.json does not say how many a token takes)"
        if counts_all_experts(audit.survey)
        else ""
    )
    if best in degrees.clean:
        yield f"{command} prepares them all for it."
    else:
        cost = audit.costs[best]
        yield (
            f"{command} stores each layer for its path: Triton gets "
            f"{percent(nbytes_share(cost, 'triton'))} of a rank's MXFP4 bytes and "
            f"{percent(flops_share(cost, 'triton'))} of its FLOPs{unsure}; padding those layers "
            f"for ASM would add {human(cost.padding_nbytes)}."
        )
    larger = [tp for tp in degrees.possible if tp > best]
    if larger:
        cost = audit.costs[larger[-1]]
        yield (
            f"If that is too much for a rank: at tp {larger[-1]} it holds "
            f"{human(cost.rank_nbytes)}, and Triton gets {percent(flops_share(cost, 'triton'))} of "
            f"its FLOPs{unsure}."
        )


def _engine(audit: Audit, degrees: _Degrees) -> Iterator[str]:
    """What the engine that was asked about does with the original checkpoint."""
    prediction = audit.prediction
    if prediction is None:
        return
    says = []
    unknown = _outcome_degrees(audit, "unknown")
    quiet = [tp for tp in degrees.asked if tp not in degrees.troubled and tp not in unknown]
    if quiet:
        says.append(f"runs at {_at(quiet)}")
    crashes = "refuses" if prediction.engine.own else "crashes"
    for outcome, verb in (("crash", crashes), ("corrupt", "answers wrongly without an error")):
        at = _outcome_degrees(audit, outcome)
        if at:
            first = f"at tp {at[0]}: " if len(at) > 1 else ""
            quoted = _quoted(prediction.outcomes, outcome, at[0])
            says.append(f"{verb} at {_at(at)} ({first}{quoted})")
    if unknown:
        says.append(f"has some layers at {_at(unknown)} of which nothing is known")
    which = "prepared" if prediction.engine.own else "original"
    yield f"{prediction.engine.name} with the {which} checkpoint: it {'; it '.join(says)}."
    if not prediction.engine.own:
        if not quiet and not unknown:
            yield f"It runs every layer rightly at none of {_at(degrees.asked)}."
        yield "The rest is about the checkpoint once prepared, which this engine does not load yet."


def _outcome_degrees(audit: Audit, outcome: str) -> list[int]:
    """The degrees at which the engine does that to some layer."""
    if audit.prediction is None:
        return []
    made = list(distinct(audit.prediction.outcomes.values()))
    return [tp for tp in audit.survey.tp if any(mapping[tp].outcome == outcome for mapping in made)]


def _quoted(outcomes: Mapping[str, Mapping[int, Outcome]], outcome: str, tp: int) -> str:
    """How many layers it befalls at `tp`, the first of them, and the engine's words about that."""
    names = [name for name, made in outcomes.items() if made[tp].outcome == outcome]
    message = outcomes[names[0]][tp].message
    if len(message) > MOST_QUOTED:
        message = message[: MOST_QUOTED - 3].rsplit(maxsplit=1)[0] + "..."
    count = counted(len(names), "layer")
    return f"{count}, first {names[0]}" + (f": {message}" if message else "")


def _at(degrees: Sequence[int]) -> str:
    return f"tp {listed(degrees)}"
