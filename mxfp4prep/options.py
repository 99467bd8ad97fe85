"""The words of the command line: what each argument and option is called, takes and means."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from mxfp4prep.errors import UsageError

MOST_ROWS = 999_999_999
"""Of --m: more than any memory holds."""

EXIT_NO = 1
"""The answer is no, which is not a failure to answer."""


class Format(StrEnum):
    """How a result is written to stdout."""

    text = "text"
    json = "json"


class AuditFormat(StrEnum):
    """How an audit is written to stdout."""

    text = "text"
    json = "json"
    csv = "csv"


class FailOn(StrEnum):
    """What makes `audit` answer with exit code 1."""

    impossible = "impossible"
    triton = "triton"
    never = "never"


class SharedExperts(StrEnum):
    """Whether an engine fuses a shared expert into the routed ones."""

    auto = "auto"
    fused = "fused"
    separate = "separate"


class EngineChoice(StrEnum):
    """The engines whose rules are known."""

    vllm_0_32 = "vllm-0.32"
    vllm_0_33 = "vllm-0.33"
    vllm_main = "vllm-main"
    sglang_0_5 = "sglang-0.5"
    atom = "atom"
    mxfp4prep = "mxfp4prep"


class LayoutChoice(StrEnum):
    """Which path `convert` takes."""

    auto = "auto"
    asm = "asm"
    triton = "triton"


class ForEngine(StrEnum):
    """The engines that `convert` can lay a checkpoint out for."""

    mxfp4prep = "mxfp4prep"
    vllm = "vllm"
    sglang = "sglang"
    atom = "atom"


SourceArg = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="Checkpoint directory as AMD Quark wrote it, or ORG/NAME[@REVISION] on the Hub.",
    ),
]
EpOpt = Annotated[
    bool,
    typer.Option(
        "--ep", help="Expert parallelism: whole routed experts are spread over the ranks."
    ),
]
SpOpt = Annotated[
    bool,
    typer.Option("--sp", help="Sequence parallelism: each rank's MoE block has its own tokens."),
]
SharedExpertsOpt = Annotated[
    SharedExperts,
    typer.Option(
        "--shared-experts",
        help="auto: fused into the routed experts where the quantization is the same; fused: the "
        "same, and a finding where it cannot be; separate: never fused.",
    ),
]
EngineOpt = Annotated[
    EngineChoice | None,
    typer.Option(
        "--engine",
        metavar="NAME",
        help="Say what an engine does with the original checkpoint on gfx950: vllm-0.32, "
        "vllm-0.33, vllm-main, sglang-0.5, atom or mxfp4prep.",
    ),
]
SwitchOpt = Annotated[
    list[str] | None,
    typer.Option(
        "--switch",
        metavar="NAME=VALUE",
        help="A switch of the engine, such as an environment variable, that is not at its default. "
        "May be given several times.",
    ),
]
TablesOpt = Annotated[
    Path | None,
    typer.Option(
        "--aiter-configs",
        metavar="DIR",
        help="AITER's tuned tables (aiter/configs); an installed amd-aiter's if left out.",
    ),
]
ValuesOpt = Annotated[
    bool,
    typer.Option(
        "--values",
        help="Read all scale bytes too (a 17th of the MXFP4 bytes), and report what is odd.",
    ),
]
HtmlOpt = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Write the audit as one HTML page as well."),
]
ModelArg = Annotated[
    Path,
    typer.Argument(metavar="MODEL_DIR", help="Checkpoint directory, as AMD Quark wrote it."),
]
OutArg = Annotated[
    Path | None,
    typer.Argument(
        metavar="OUT", help="Where to write; MODEL_DIR-mxfp4prep beside it if left out."
    ),
]
PreparedArg = Annotated[
    Path, typer.Argument(metavar="PREPARED", help="Directory that `mxfp4prep convert` wrote.")
]
RestoredArg = Annotated[
    Path, typer.Argument(metavar="OUT", help="Directory to make; it must not exist yet.")
]
DemoArg = Annotated[
    Path | None,
    typer.Argument(metavar="DIR", help="Keep the files here; a temporary directory if left out."),
]
OutputOpt = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="OUT", help="The same as the argument OUT.")
]
TpOpt = Annotated[
    list[str] | None,
    typer.Option(
        "--tp",
        metavar="N,...",
        help="Tensor-parallel degrees, separated by commas or given several times.",
    ),
]
ParallelOpt = Annotated[
    list[str] | None,
    typer.Option(
        "--parallel",
        metavar="PATTERN=KIND",
        help="How engines cut the layers that a glob matches: column, row, qkv, merged, "
        "replicated, expert or unknown. May be given several times; the first match wins.",
    ),
]
FormatOpt = Annotated[
    Format, typer.Option("--format", help="Text for people or JSON for programs.")
]
AuditFormatOpt = Annotated[
    AuditFormat,
    typer.Option("--format", help="Text for people, JSON for programs, CSV for spreadsheets."),
]
FailOnOpt = Annotated[
    FailOn,
    typer.Option(
        "--fail-on",
        help="Exit with 1 when a layer is this bad at any of the degrees; triton counts "
        "impossible in.",
    ),
]
LayoutOpt = Annotated[
    LayoutChoice,
    typer.Option(
        "--layout",
        help="auto: ASM where it is legal at every degree, else Triton; asm: refuse any other "
        "layer; triton: all layers.",
    ),
]
ForOpt = Annotated[
    ForEngine,
    typer.Option(
        "--for",
        metavar="NAME",
        help="The engine that is to take it: mxfp4prep or vllm, which take both paths; sglang or "
        "atom, for which layers that it does not run on the ASM GEMM stay as they were.",
    ),
]
KeepOpt = Annotated[
    list[str] | None,
    typer.Option(
        "--keep",
        metavar="GLOB",
        help="Leave the layers that match as they are. May be given several times.",
    ),
]
DryRunOpt = Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")]
WorkersOpt = Annotated[
    int | None,
    typer.Option(
        "--workers",
        metavar="N",
        envvar="MXFP4PREP_WORKERS",
        help="Files worked on at a time; one per core if left out.",
    ),
]
OverwriteOpt = Annotated[
    bool, typer.Option("--overwrite", help="Replace OUT if it is a prepared checkpoint.")
]
ResumeOpt = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Go on where a killed or failed run stopped: each file that it had finished is "
        "compared byte by byte with what would be written, and taken over. Should this run fail, "
        "it keeps what it has finished.",
    ),
]
NoProgressOpt = Annotated[bool, typer.Option("--no-progress", help="No bar and no progress lines.")]
QuietOpt = Annotated[
    bool, typer.Option("--quiet", "-q", help="Say nothing on stderr but errors; no summary either.")
]
QuickOpt = Annotated[
    bool, typer.Option("--quick", help="Sizes, headers and layouts; no byte read.")
]
FullOpt = Annotated[
    bool, typer.Option("--full", help="Every byte and every inverse by its digest. The default.")
]
DeepOpt = Annotated[
    bool, typer.Option("--deep", help="Every inverse against the source itself; needs --source.")
]
SourceOpt = Annotated[
    Path | None,
    typer.Option("--source", metavar="MODEL_DIR", help="The original checkpoint; implies --deep."),
]
LayersOpt = Annotated[
    str | None, typer.Option("--layers", metavar="GLOB", help="Only layers whose name matches.")
]
DeviceOpt = Annotated[
    str, typer.Option("--device", help="Where the layers run, for example cpu or cuda:0.")
]
RowsOpt = Annotated[
    list[str] | None,
    typer.Option("--m", metavar="N,...", help="Rows of activations to try, separated by commas."),
]
BackendOpt = Annotated[
    str | None,
    typer.Option("--backend", metavar="NAME", help="aiter, triton or torch; the best if left out."),
]
BackendsOpt = Annotated[
    list[str] | None,
    typer.Option(
        "--backend",
        metavar="NAME,...",
        help="aiter, triton or torch, separated by commas or given several times; all that can "
        "run if left out.",
    ),
]


def parse_words(texts: Sequence[str] | None) -> tuple[str, ...] | None:
    """The words of `--flag a,b --flag c`, in order and without repeats; None for no flag."""
    if texts is None or len(texts) == 0:
        return None
    return tuple(dict.fromkeys(word.strip() for text in texts for word in text.split(",")))


def parse_numbers(
    flag: str, texts: Sequence[str] | None, what: str, most: int | None = None
) -> tuple[int, ...] | None:
    """Whole numbers of `--flag 1,2 --flag 4`, in order and without repeats; None for no flag.

    most   the largest one, named in the error; by default nine digits

    Raises UsageError on anything else.
    """
    if texts is None or len(texts) == 0:
        return None
    words = [word.strip() for text in texts for word in text.split(",")]
    bounds = "from 1" if most is None else f"from 1 to {most}"
    for word in words:
        if not re.fullmatch(r"0{0,8}[1-9][0-9]{0,8}", word) or int(word) > (most or 10**9):
            raise UsageError(
                flag,
                f"not {what}",
                found=repr(word),
                expected=f"whole numbers {bounds}, separated by commas",
                hint=f"for example {flag} 1,2,4",
            )
    return tuple(dict.fromkeys(map(int, words)))


def parse_rows(texts: Sequence[str] | None) -> tuple[int, ...] | None:
    """The numbers of rows of --m; None for no flag. Raises UsageError on anything else."""
    return parse_numbers("--m", texts, "a number of rows", MOST_ROWS)


def examples(*commands: str) -> str:
    """An epilog with one example per line, which help is not to wrap."""
    return "\n".join(["\b", "Examples:", *(f"  mxfp4prep {command}" for command in commands)])
