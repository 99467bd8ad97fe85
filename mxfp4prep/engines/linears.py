"""What an engine does with a linear, alone or fused from parts: how it is cut, then how it runs."""

from __future__ import annotations

from collections.abc import Sequence

from mxfp4prep.engines.dense import floored, run_dense
from mxfp4prep.engines.outcomes import Outcome
from mxfp4prep.engines.rules import SchemeWord
from mxfp4prep.engines.setting import Setting
from mxfp4prep.errors import CannotShard
from mxfp4prep.parallel import SCALE_GROUP, Cut, shard
from mxfp4prep.survey import LayerSurvey


def run_linear(
    setting: Setting,
    parts: Sequence[LayerSurvey],
    word: SchemeWord,
    tp: int,
    *,
    whole: bool = False,
) -> Outcome:
    """The outcome of a linear that the engine builds from `parts`, concatenated along rows.

    word    the scheme it is built by
    whole   every rank holds all of it
    """
    engine = setting.engine
    runs = engine.schemes.get(("linear", word))
    if runs is None:
        return Outcome("crash", None, f"{engine.no_scheme['linear']} ({word})")
    if runs.path is None:
        return Outcome("crash", None, runs.message)
    if tp > 1 and not whole and any(item.role.parallel == "unknown" for item in parts):
        return Outcome("unknown", None, "not known how the engine cuts a module of this name")
    rows, k = 0, parts[0].layer.k
    for item in parts:
        cut = Cut("none") if whole else item.cut
        try:
            piece = shard(cut, item.layer.n, item.layer.k, tp)
        except CannotShard as error:
            return _uncut(setting, item, word, tp, error)
        rows += piece.n
        k = piece.k
    if k % SCALE_GROUP:
        if engine.dense.partial_groups == "refused":
            return Outcome("crash", None, _refused(k))
        return Outcome("unknown", None, f"{k} columns are not whole groups of 32")
    if runs.path:
        return Outcome("ok", runs.path, runs.message)
    made = run_dense(engine, setting.on, rows, k, setting.tuned)
    return made if made.message else made._replace(message=runs.message)


def _uncut(
    setting: Setting, item: LayerSurvey, word: SchemeWord, tp: int, error: CannotShard
) -> Outcome:
    """What the engine makes of a cut that does not come out even."""
    rule = setting.engine.dense
    k = item.layer.k
    width = k // tp
    if error.reason == "split_rows" and any(b.units == 1 < b.rows for b in item.cut.blocks):
        return Outcome("unknown", None, "config.json does not say where the rows may be cut")
    if error.reason != "split_groups":
        return Outcome("crash", None, f"AssertionError: {error.what}")
    how = "floored" if word in rule.floored else rule.partial_groups
    if how == "refused":
        return Outcome("crash", None, _refused(width))
    if how == "overrun":
        columns, total = -(-width // SCALE_GROUP), k // SCALE_GROUP
        first = (tp - 1) * columns
        return Outcome(
            "crash",
            None,
            f"RuntimeError in narrow on the last rank: scale columns {first} to {first + columns} "
            f"of {total} ({k} / {tp} = {width})",
        )
    if any(path == "bf16" and switch in setting.on for switch, path in rule.instead):
        groups = width // SCALE_GROUP
        return Outcome(
            "crash", None, f"RuntimeError in view: {width} columns are not {groups} groups of 32"
        )
    path = "triton" if word == "w4a4" else "triton-a8w4"
    return Outcome("corrupt", path, floored("the layer", k, tp))


def _refused(width: int) -> str:
    return (
        f"ValueError: input size per partition of {width} must be divisible by the OCP MX group "
        f"size {SCALE_GROUP}"
    )
