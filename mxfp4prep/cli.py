"""The `mxfp4prep` command: runs one command line and turns however it ends into an exit code.

Nothing imports this module, and the environment is read here alone.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from mxfp4prep import bench_command, commands, diff_command, io, prepared_commands
from mxfp4prep import options as o
from mxfp4prep.errors import IN, IOFailed, Mxfp4PrepError, UsageError
from mxfp4prep.report import streams
from mxfp4prep.report.voice import Voice
from mxfp4prep.stopping import INTERRUPTED, Stop

EXIT_USAGE = 2
EXIT_INTERNAL = 70
"""EX_SOFTWARE of sysexits.h: a bug of ours, not an answer."""

app = typer.Typer(
    name="mxfp4prep",
    help="Prepare AMD Quark MXFP4 checkpoints for AITER's GEMMs: audit, convert, prove, undo.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,  # plain help: Rich's cuts the names of options on narrow terminals
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code; never raises, whatever happens inside."""
    streams.prepare()
    stop = Stop()
    try:
        with stop, warnings.catch_warnings():
            warnings.showwarning = _show_warning
            # torch says so where numpy is missing, which nothing here needs
            warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
            code = _run(list(sys.argv[1:] if argv is None else argv))
        streams.emit("")  # what Typer printed may still wait in the buffer
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except Exception as error:
        # an interrupted import may end as another error: of the module that was cut short
        code = INTERRUPTED if stop.asked else _failed(error)
    if code == INTERRUPTED:
        streams.tell("interrupted")
    streams.settle()
    return code


def _run(words: list[str]) -> int:
    try:
        code = app(args=words, standalone_mode=False, prog_name="mxfp4prep")
    except SystemExit as stop:  # completion, or help whose reader has gone
        if isinstance(stop.__context__, BrokenPipeError):
            return 0
        code = stop.code
    return code if isinstance(code, int) else 0


def _failed(error: Exception) -> int:
    """Says what went wrong on stderr and returns the exit code for it."""
    if os.environ.get("MXFP4PREP_DEBUG"):
        for line in traceback.format_exc().splitlines():
            streams.tell(line)
    known = _known(error)
    if known is None:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        streams.tell(f"error: internal: {text}")
        streams.tell("hint: this is a bug; MXFP4PREP_DEBUG=1 shows where it happened")
        return EXIT_INTERNAL
    streams.tell(f"error: {known}")
    for note in getattr(known, "__notes__", ()):
        if note.startswith(IN):
            streams.tell(f"in: {note.removeprefix(IN)}")
    if known.hint is not None:
        streams.tell(f"hint: {known.hint}")
    return known.exit_code


def _known(error: Exception) -> Mxfp4PrepError | None:
    """`error` as one of ours, or None for one that nobody expected."""
    if isinstance(error, Mxfp4PrepError):
        return error
    # Typer's own errors: only its documented methods, their classes moved between its versions.
    message = getattr(error, "format_message", None)
    if callable(message):
        where = getattr(getattr(error, "ctx", None), "command_path", None) or "mxfp4prep"
        text = " ".join(str(message()).split()).rstrip(".").replace("Value error, ", "")
        return UsageError(where, text, hint=f"{where} --help")
    if isinstance(error, MemoryError):
        return IOFailed("memory", "not enough of it", hint="use fewer workers: --workers 1")
    if isinstance(error, OSError):
        return io.failed(error.filename or "output", error)
    return None


def _show_warning(message: Warning | str, *_where: object, **_more: object) -> None:
    streams.tell(f"warning: {' '.join(str(message).split())}")


def _version(wanted: bool) -> None:
    if wanted:
        from mxfp4prep import __version__

        streams.emit(f"mxfp4prep {__version__}\n")
        raise typer.Exit


@app.callback(
    invoke_without_command=True,
    epilog="Exit codes: 0 done, 1 the answer is no, 2 usage, 3 invalid checkpoint, 4 unsupported, "
    "5 output exists or unsafe, 6 I/O failed or memory too small, 70 internal error, "
    "130 interrupted. Treat any other as a failure.",
)
def _root(
    ctx: typer.Context,
    version: Annotated[  # noqa: ARG001 - its callback acts
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Tell more on stderr; give it before the verb.")
    ] = False,
) -> None:
    ctx.obj = Voice(verbose, os.environ)
    if ctx.invoked_subcommand is None:
        streams.emit(ctx.get_help() + "\n")
        raise typer.Exit(EXIT_USAGE)


def demo(directory: o.DemoArg = None) -> None:
    """Make a tiny Quark checkpoint with aligned and misaligned layers, and try every verb on it."""
    import tempfile

    from mxfp4prep.demo import walk

    def say(line: str) -> None:
        streams.emit(line + "\n")

    if directory is not None:
        code = walk(directory, main, say)
    else:
        with tempfile.TemporaryDirectory(prefix="mxfp4prep-demo-") as temporary:
            code = walk(Path(temporary), main, say)
    if code:
        raise typer.Exit(code)


_EXAMPLES: dict[Callable[..., None], tuple[str, ...]] = {  # the commands, in the order of --help
    commands.audit: (
        "audit Qwen3-MXFP4",
        "audit amd/Qwen3-235B-A22B-Instruct-2507-MXFP4",
        "audit Qwen3-MXFP4 --tp 3,6 --ep",
        "audit Qwen3-MXFP4 --engine vllm-0.33 --html audit.html",
        "audit Qwen3-MXFP4 --values --format json",
    ),
    diff_command.diff: diff_command.EXAMPLES,
    commands.convert: (
        "convert Qwen3-MXFP4",
        "convert Qwen3-MXFP4 /data/prepared --tp 1,2",
        "convert Qwen3-MXFP4 --dry-run",
        "convert Qwen3-MXFP4 --keep 'model.layers.0.*' --layout triton",
        "convert Qwen3-MXFP4 --for sglang --tp 8 --dry-run",
    ),
    prepared_commands.verify: (
        "verify Qwen3-MXFP4-mxfp4prep",
        "verify Qwen3-MXFP4-mxfp4prep --quick",
        "verify Qwen3-MXFP4-mxfp4prep --source Qwen3-MXFP4",
    ),
    prepared_commands.restore: ("restore Qwen3-MXFP4-mxfp4prep Qwen3-MXFP4-again",),
    prepared_commands.show: (
        "show Qwen3-MXFP4-mxfp4prep",
        "show Qwen3-MXFP4-mxfp4prep --layers '*.down_proj'",
    ),
    prepared_commands.selfcheck: (
        "selfcheck Qwen3-MXFP4-mxfp4prep",
        "selfcheck Qwen3-MXFP4-mxfp4prep --device cuda --m 1,16,256 --layers '*.down_proj'",
    ),
    bench_command.bench: bench_command.EXAMPLES,
    demo: ("demo", "demo mxfp4-demo"),
}
for _command, _lines in _EXAMPLES.items():
    _summary = (_command.__doc__ or "").partition("\n")[0]
    app.command(short_help=_summary, epilog=o.examples(*_lines))(_command)
