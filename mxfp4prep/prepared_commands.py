"""The commands on a prepared checkpoint: verify, restore, show and selfcheck."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mxfp4prep import options as o
from mxfp4prep.errors import BackendUnavailable, UsageError

if TYPE_CHECKING:
    import torch

    from mxfp4prep.report.voice import Voice
    from mxfp4prep.verify import Level


def verify(
    ctx: typer.Context,
    prepared: o.PreparedArg,
    quick: o.QuickOpt = False,
    full: o.FullOpt = False,
    deep: o.DeepOpt = False,
    source: o.SourceOpt = None,
    format: o.FormatOpt = o.Format.text,
    workers: o.WorkersOpt = None,
    no_progress: o.NoProgressOpt = False,
    quiet: o.QuietOpt = False,
) -> None:
    """Prove that a prepared checkpoint is what was prepared, and that nothing was lost.

    Exits with 1 and names every file and tensor that is not.
    """
    from mxfp4prep.prepared import open_prepared
    from mxfp4prep.report import payload
    from mxfp4prep.verify import verify as check

    voice: Voice = ctx.obj
    level = _level(quick, full, deep, source)

    def total() -> int:
        return sum(record.nbytes for record in open_prepared(prepared).manifest.files)

    silent = quiet or no_progress or level == "quick"
    with voice.progress("verifying", total, silent=silent) as advance:
        report = check(prepared, level, source, workers=workers, progress=advance)
    document = payload.verify(report)
    if format is o.Format.json:
        voice.print_json(document)
    elif not (quiet and document["ok"]):
        from mxfp4prep.report.outcome_text import verify_text

        voice.print_text(lambda screen: verify_text(document, screen, str(prepared)))
    if not document["ok"]:
        raise typer.Exit(o.EXIT_NO)


def _level(quick: bool, full: bool, deep: bool, source: Path | None) -> Level:
    levels: dict[str, Level] = {}
    if quick:
        levels["--quick"] = "quick"
    if full:
        levels["--full"] = "full"
    if deep:
        levels["--deep"] = "deep"
    elif source is not None:
        levels["--source"] = "deep"
    if deep and source is None:
        raise UsageError("--deep", "needs the source", hint="add --source MODEL_DIR")
    if len(levels) > 1:
        raise UsageError(
            " ".join(levels),
            "are different levels",
            expected="one of --quick, --full, --deep; --source means --deep",
        )
    return next(iter(levels.values()), "full")


def restore(
    ctx: typer.Context,
    prepared: o.PreparedArg,
    out: o.RestoredArg,
    workers: o.WorkersOpt = None,
    format: o.FormatOpt = o.Format.text,
    no_progress: o.NoProgressOpt = False,
    quiet: o.QuietOpt = False,
) -> None:
    """Write the original checkpoint back, byte for byte."""
    from mxfp4prep.prepared import open_prepared
    from mxfp4prep.report import payload
    from mxfp4prep.restore import restore as carry_out
    from mxfp4prep.restore import restored_nbytes

    voice: Voice = ctx.obj

    def total() -> int:
        return restored_nbytes(open_prepared(prepared))

    silent = quiet or no_progress
    with voice.notes(), voice.progress("restoring", total, silent=silent) as advance:
        report = carry_out(prepared, out, workers=workers, progress=advance)
    document = payload.restore(report)
    if format is o.Format.json:
        voice.print_json(document)
    elif not quiet:
        from mxfp4prep.report.outcome_text import restore_text

        voice.print_text(lambda screen: restore_text(document, screen))


def show(
    ctx: typer.Context,
    prepared: o.PreparedArg,
    layers: o.LayersOpt = None,
    format: o.FormatOpt = o.Format.text,
) -> None:
    """Print the manifest: where the checkpoint comes from and how each layer is stored."""
    from mxfp4prep.prepared import open_prepared
    from mxfp4prep.report import payload

    voice: Voice = ctx.obj
    manifest = open_prepared(prepared).manifest
    if layers is not None:
        chosen = set(matching(layers, [record.name for record in manifest.layers]))
        kept = [record for record in manifest.layers if record.name in chosen]
        manifest = manifest.model_copy(update={"layers": kept})
    if format is o.Format.json:
        voice.print_json(manifest.model_dump(mode="json"))
    else:
        from mxfp4prep.report.stored_text import show_text

        shares = payload.manifest_shares(manifest)
        voice.print_text(lambda screen: show_text(manifest, shares, screen))


def selfcheck(
    ctx: typer.Context,
    prepared: o.PreparedArg,
    device: o.DeviceOpt = "cpu",
    layers: o.LayersOpt = None,
    m: o.RowsOpt = None,
    backend: o.BackendOpt = None,
    format: o.FormatOpt = o.Format.text,
    no_progress: o.NoProgressOpt = False,
) -> None:
    """Run layers on a device and compare them with float64; print error and speed.

    One layer of each shape and layout, unless --layers says which. Exits with 1 when one is wrong.
    """
    from mxfp4prep import load
    from mxfp4prep.report import payload
    from mxfp4prep.runtime.devices import load_device
    from mxfp4prep.runtime.selfcheck import TOKENS, one_of_each
    from mxfp4prep.runtime.selfcheck import selfcheck as check

    voice: Voice = ctx.obj
    tokens = o.parse_rows(m) or TOKENS
    target = device_of(device)
    loaded = load(prepared, device=load_device(target), backend=backend)
    if layers is None:
        names = one_of_each(loaded)
    else:
        names = matching(layers, [*loaded, *loaded.expert_prefixes])
    rows = []
    with voice.steps("checking", len(names) * len(tokens), silent=no_progress) as advance:
        for row in check(loaded, names, device=target, backend=backend, m=tokens):
            rows.append(row)
            advance(1)
    document = payload.selfcheck(loaded.manifest.source.name, device, rows)
    if format is o.Format.json:
        voice.print_json(document)
    else:
        from mxfp4prep.report.outcome_text import selfcheck_text

        voice.print_text(lambda screen: selfcheck_text(document, screen, str(prepared)))
    if not document["ok"]:
        raise typer.Exit(o.EXIT_NO)


def matching(pattern: str, names: Sequence[str]) -> list[str]:
    """The names that the glob matches. Raises UsageError when there is none."""
    chosen = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
    if not chosen:
        raise UsageError(
            f"--layers {pattern}",
            "matches no layer of this checkpoint",
            hint="`mxfp4prep show PREPARED` lists them",
        )
    return chosen


def device_of(word: str) -> torch.device:
    """The device that --device names.

    Raises UsageError for a word that names none, BackendUnavailable for a device that is not here.
    """
    import torch

    from mxfp4prep.runtime.devices import LOADABLE, usable_device

    try:
        named = torch.device(word)
    except RuntimeError:
        named = None
    if named is None or str(named) != word:  # to torch, cuda:300 is cuda:44
        raise UsageError(
            "--device",
            "names no device",
            found=repr(word),
            expected="cpu, cuda, cuda:N, or another type that torch knows, as xpu or xpu:N",
            hint="--device cuda:0 is the first GPU",
        )
    try:
        return usable_device(word, "--device")
    except BackendUnavailable as error:
        if named.type in LOADABLE:
            raise
        what = f"this build of torch ({torch.__version__}) has no such device"
        raise BackendUnavailable(error.where, what, hint=error.hint) from error
