"""What an engine does with the routed experts: how it cuts them, and what runs them."""

from __future__ import annotations

from mxfp4prep.engines.dense import floored
from mxfp4prep.engines.outcomes import Outcome
from mxfp4prep.engines.padding import pads_of
from mxfp4prep.engines.rules import Engine, ExpertRule, SchemeWord
from mxfp4prep.engines.setting import Setting
from mxfp4prep.parallel import SCALE_GROUP


def run_expert(
    setting: Setting,
    word: SchemeWord,
    *,
    part: str,
    width: int,
    hidden: int,
    ranks: int,
    spread: int = 1,
) -> Outcome:
    """The outcome of one part of the experts of a bank.

    word     their scheme
    part     gate, up, gate_up or down
    width    the experts' intermediate size; `hidden` their other size
    ranks    the ranks that share each expert; `spread` those that the experts are spread over
    """
    rule, family = setting.engine.experts, setting.family
    made = backend(setting.engine, setting.on, word)
    if made.outcome == "crash":
        return made
    if (
        made.path == "moe-aiter"
        and (setting.topology.experts, hidden, width, spread) in rule.emulated
    ):
        made = Outcome("ok", "moe-emulation", "this very bank is emulated at this degree")
    if part == "gate_up" and not (
        rule.stored_fused or family in rule.whole_groups or family in rule.floored_starts
    ):
        return Outcome(
            "unknown", None, "gate and up stored in one tensor: not known how they are loaded"
        )
    if width % ranks:
        return Outcome(
            "crash",
            None,
            f"AssertionError without a message: intermediate size {width} % {ranks} = "
            f"{width % ranks}",
        )
    columns = hidden if part != "down" else width
    if columns % SCALE_GROUP:
        return Outcome("unknown", None, f"{columns} columns are not whole groups of 32")
    if width // ranks % SCALE_GROUP and part == "down" and family not in rule.whole_groups:
        if rule.scales == "asserted":
            return Outcome(
                "crash",
                None,
                f"AssertionError without a message: {width // SCALE_GROUP} scale columns of w2 "
                f"are not {ranks} equal pieces ({width} / {ranks} = {width // ranks})",
            )
        starts = family in rule.floored_starts
        return Outcome("corrupt", made.path, floored("w2", width, ranks, starts))
    padding = _padding(rule, made.path, width // ranks, hidden)
    return made._replace(message="; ".join(filter(None, (made.message, padding))))


def backend(engine: Engine, on: frozenset[str], word: SchemeWord) -> Outcome:
    """What runs experts of scheme `word`: an ok with its path, an error, or unknown."""
    runs = engine.schemes.get(("expert", word))
    if runs is None:
        return Outcome("crash", None, f"{engine.no_scheme['expert']} ({word})")
    if runs.path is None:
        return Outcome("crash", None, runs.message)
    path = runs.path or "moe-aiter"
    if path.startswith("moe-aiter") and not on.issuperset(engine.experts.needs):
        if word != "w4a4":
            return Outcome("unknown", None, f"not known what runs {word} experts without AITER")
        without, message = engine.experts.without
        return Outcome("ok" if without else "crash", without, message)
    return Outcome("ok", path, runs.message)


def _padding(rule: ExpertRule, path: str | None, width: int, hidden: int) -> str:
    """What is said about the zeros that fill a rank's experts up; "" where there are none."""
    pads = pads_of(rule, path)
    if pads is None:
        return ""
    wide, deep = (-(-size // pad) * pad for size, pad in zip((width, hidden), pads, strict=True))
    words = []
    if wide != width:
        words.append(f"{width} a rank, padded to {wide} with zeros")
    if deep != hidden:
        words.append(f"hidden {hidden} padded to {deep}")
    return "; ".join(words)
