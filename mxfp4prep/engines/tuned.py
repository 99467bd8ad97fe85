"""AITER's tuned tables: for which shapes the ASM GEMM and Triton's preshuffle GEMM were tuned.

Two kinds of files, both keyed by the shape that one rank hands to the kernel: rows of
`a4w4_blockscale_tuned_gemm.csv` (and of the per-model tables beside it), and one JSON per (N, K) of
the Triton kernel. Only rows for gfx950 with 256 compute units count: MI350X and MI355X, whole.

Source: AITER aiter/ops/gemm_op_a4w4.py, aiter/ops/triton/utils/gemm_config_utils.py and
aiter/configs; the JSON files moved to one folder per kernel in AITER PR 4379.
"""

from __future__ import annotations

import csv
import importlib.metadata
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mxfp4prep import io
from mxfp4prep.documents import parse_object
from mxfp4prep.errors import InvalidCheckpoint, UsageError

GFX = "gfx950"
COMPUTE_UNITS = 256
"""MI350X and MI355X, not partitioned; AITER looks rows up with the number it counts."""

FILE_LIMIT = 8 << 20
"""Largest table that is read, in bytes: AITER's are below 1 MB."""

_FLAG = "--aiter-configs"
_DISTRIBUTION = "amd-aiter"
_CSV = "a4w4_blockscale_tuned_gemm"
_SHAPE = re.compile(r"GEMM-AFP4WFP4_PRESHUFFLED-N=(\d+)-K=(\d+)\.json\Z")
_NESTED = "triton/gemm/gemm_afp4wfp4_preshuffled"
_COLUMNS = ("cu_num", "M", "N", "K")
_PROBED = 128
"""M at which vLLM asks whether Triton is tuned; _aiter_ops._triton_gemm_config_is_tuned."""
_BOUNDS = tuple(1 << i for i in range(2, 14))
"""The M that keys of a JSON may name: 4 to 8192; other keys are never looked up."""
_PROBED_KEYS = frozenset(
    [f"M_LEQ_{bound}" for bound in _BOUNDS if bound >= _PROBED]
    + [f"M_GEQ_{bound}" for bound in _BOUNDS if bound <= _PROBED]
)
_VLLM_M = (1024, 8192)
"""M at which vLLM 0.33 asks whether the ASM GEMM is tuned; _aiter_ops.is_asm_fp4_gemm_tuned."""
_SMALL_M = (16, 32, 64)
"""M that AITER pads any M up to 64 to, when it looks for a row."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """AITER's tuned shapes for gfx950 with 256 compute units.

    origin   where they were read
    gemm     (M, N, K) that have a row for gemm_a4w4
    triton   (N, K) whose preshuffle GEMM is tuned at M = 128
    """

    origin: str
    gemm: frozenset[tuple[int, int, int]]
    triton: frozenset[tuple[int, int]]

    def for_both(self, n: int, k: int) -> bool:
        """Whether vLLM 0.33 finds the (n, k) of one rank tuned for prefill and for decode."""
        return self.for_preshuffle(n, k) and all((m, n, k) in self.gemm for m in _VLLM_M)

    def for_preshuffle(self, n: int, k: int) -> bool:
        """Whether Triton's preshuffle GEMM is tuned for (n, k), as vLLM asks for it."""
        return (n, k) in self.triton

    def for_small_m(self, n: int, k: int) -> bool:
        """Whether every M up to 64 meets a tuned row, so that AITER does not choose by itself."""
        return all((m, n, k) in self.gemm for m in _SMALL_M)


def find_tuned(folder: Path | None) -> Tuned | None:
    """The tables in `folder`, or those of an installed amd-aiter; None where neither is there.

    folder   AITER's checkout, its package, or the `configs` folder in it

    Raises UsageError where `folder` holds no such tables or one that does not read.
    """
    if folder is None:
        return _installed()
    if not folder.is_dir():
        raise UsageError(f"{_FLAG} {folder}", "no such folder")
    tables, shapes = sorted(_tables_in(folder)), sorted(_shapes_in(folder))
    for found, what in ((tables, f"{_CSV}.csv"), (shapes, f"{_NESTED}/{_example()}")):
        if not found:
            raise UsageError(
                f"{_FLAG} {folder}",
                "not AITER's tuned tables",
                found=f"no {what}",
                expected="AITER's checkout or package: aiter/configs and aiter/ops/triton/configs",
            )
    return _read(str(folder), tables, shapes)


def _example() -> str:
    return "GEMM-AFP4WFP4_PRESHUFFLED-N=...-K=...json"


def _tables_in(folder: Path) -> Iterator[Path]:
    for base in (folder, folder / "configs", folder / "aiter" / "configs"):
        yield from (path for path in base.glob(f"{_CSV}.csv"))
        yield from (path for path in base.glob(f"model_configs/*{_CSV}*.csv"))


def _shapes_in(folder: Path) -> Iterator[Path]:
    bases = (folder, folder / "ops/triton/configs", folder / "aiter/ops/triton/configs")
    for base in (*bases, folder.parent / "ops/triton/configs"):
        for place in (base / GFX / _NESTED, base / "gemm"):
            yield from (path for path in place.glob("*.json") if _shape_of(path.as_posix()))


def _shape_of(path: str) -> tuple[int, int] | None:
    """(N, K) of a preshuffle file for gfx950, of either layout; None for any other file."""
    match = _SHAPE.search(path)
    if match is None:
        return None
    before = path[: match.start()]
    if before.endswith((f"{GFX}/{_NESTED}/", f"gemm/{GFX}-")):
        return int(match.group(1)), int(match.group(2))
    return None


def _installed() -> Tuned | None:
    """The tables of an installed amd-aiter, found by its list of files: nothing is imported."""
    try:
        distribution = importlib.metadata.distribution(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None
    tables: list[Path] = []
    shapes: list[Path] = []
    for file in distribution.files or ():
        place = PurePosixPath(file)
        is_table = _is_table(place)
        if not is_table and _shape_of(place.as_posix()) is None:
            continue
        path = Path(str(distribution.locate_file(file)))
        if path.is_file():  # a list of files may outlive them
            (tables if is_table else shapes).append(path)
    if not tables:
        return None
    return _read(f"{_DISTRIBUTION} {distribution.version}", sorted(tables), sorted(shapes))


def _is_table(path: PurePosixPath) -> bool:
    parent = path.parent
    if parent.name == "model_configs":
        return parent.parent.name == "configs" and path.match(f"*{_CSV}*.csv")
    return parent.name == "configs" and path.name == f"{_CSV}.csv"


def _read(origin: str, tables: Sequence[Path], shapes: Sequence[Path]) -> Tuned:
    gemm = frozenset(row for path in tables for row in _rows(path))
    triton = {}
    for path in shapes:
        shape = _shape_of(path.as_posix())
        if shape is not None:
            triton[shape] = _is_tuned(path)
    return Tuned(origin, gemm, frozenset(shape for shape, tuned in triton.items() if tuned))


def _rows(path: Path) -> Iterator[tuple[int, int, int]]:
    """(M, N, K) of the rows for gfx950 with 256 compute units; older tables have no gfx column."""
    try:
        lines = io.read_bytes(path, limit=FILE_LIMIT).decode().splitlines()
    except UnicodeDecodeError as error:
        raise UsageError(f"{_FLAG}: {path}", f"not text: {error}") from None
    rows = csv.DictReader(lines)
    try:
        missing = [name for name in _COLUMNS if name not in (rows.fieldnames or ())]
        if missing:
            raise UsageError(
                f"{_FLAG}: {path}",
                "not a table of tuned GEMMs",
                found=f"no column {', '.join(missing)}",
                expected="cu_num, M, N, K and what was measured",
            )
        for row in rows:
            cu_num, m, n, k = _numbers(path, rows.line_num, (row[name] for name in _COLUMNS))
            if cu_num == COMPUTE_UNITS and (row.get("gfx") or GFX) == GFX:
                yield m, n, k
    except csv.Error as error:
        raise UsageError(f"{_FLAG}: {path}", f"not a table: {error}") from None


def _numbers(path: Path, line: int, words: Iterable[str | None]) -> tuple[int, ...]:
    texts = tuple(words)
    try:
        return tuple(int(text or "") for text in texts)
    except ValueError:
        raise UsageError(
            f"{_FLAG}: {path}, line {line}",
            "not a row of tuned GEMMs",
            found=", ".join(str(text) for text in texts),
            expected="whole numbers for cu_num, M, N and K",
        ) from None


def _is_tuned(path: Path) -> bool:
    """Whether the file has an entry of its own for M = 128, and not only one for any M."""
    try:
        entries = parse_object(io.read_bytes(path, limit=FILE_LIMIT), path.name)
    except InvalidCheckpoint as error:
        raise UsageError(f"{_FLAG}: {path}", error.what) from None
    return not _PROBED_KEYS.isdisjoint(entries)
