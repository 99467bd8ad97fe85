"""What Triton's compiler makes of every shipped kernel, without the GPUs: a table or JSON.

    python bench/compile_report.py [--target gfx950,gfx942,sm_90,sm_100] [--kernel few,many,...]
                                   [--jobs 2] [--json]

Registers, spills, LDS or shared memory, and matrix instructions per step of K, of all that
mxfp4prep/runtime/kernels/shipped.py lists. Nothing is launched and no driver is needed. What does
not compile is listed with its error.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from mxfp4prep.runtime.kernels.compilation import TARGETS, Compilation
from mxfp4prep.runtime.kernels.shipped import shipped

MATRIX = {
    "scaled MFMA": r"^\s*v_mfma_scale",
    "MFMA": r"^\s*v_mfma_(?!scale)",
    "scaled conversion": r"^\s*v_cvt_scalef32",
    "wgmma": r"^\s*wgmma\.mma_async",
    "mma": r"^\s*mma\.sync",
    "tcgen05 MXFP4": r"^.*\btcgen05\.mma\S*mxf",
    "tcgen05": r"^.*\btcgen05\.mma(?!\S*mxf)",
}
"""Instructions that are counted, and how they look in assembly."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """What one compilation takes. Registers are per thread, of all kinds that the target has.

    spilled     registers, or bytes of stack on NVIDIA's
    shared      bytes of LDS or shared memory
    per_step    instructions of MATRIX in the loop over K, those of one wave or warp group
    total       the same in the whole kernel
    """

    target: str
    name: str
    kernel: str
    registers: dict[str, int]
    spilled: dict[str, int]
    shared: int
    per_step: dict[str, int]
    total: dict[str, int]
    error: str = ""


def compiled(what: Compilation, target: str) -> Compiled:
    """Compiles one for a target of TARGETS."""
    import triton
    from triton.compiler import ASTSource

    kernel = getattr(
        importlib.import_module(f"mxfp4prep.runtime.kernels.{what.module}"), what.kernel
    )
    try:
        signature, attributes = {}, {}
        for place, parameter in enumerate(kernel.params):
            argument = parameter.name
            signature[argument] = what.types.get(argument, "constexpr")
            if (
                argument in what.types
                and argument not in what.unaligned
                and not parameter.do_not_specialize
            ):
                attributes[(place,)] = [["tt.divisibility", 16]]
            if (
                target.startswith("gfx")
                and argument not in what.large
                and signature[argument].startswith("*")
            ):
                attributes.setdefault((place,), []).append(["tt.pointer_range", 32])
        source = ASTSource(kernel, signature, dict(what.constants), attrs=attributes)
        binary = triton.compile(source, target=gpu(target), options=dict(what.options))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return Compiled(target, what.name, what.kernel, {}, {}, 0, {}, {}, text)
    assembly = binary.asm["amdgcn" if target.startswith("gfx") else "ptx"]
    read = _of_amdgcn if target.startswith("gfx") else partial(_of_cubin, binary.asm.get("cubin"))
    registers, spilled = read(assembly)
    loop = max(loops(assembly), key=lambda body: sum(counted(body).values()), default="")
    return Compiled(
        target,
        what.name,
        what.kernel,
        registers,
        spilled,
        binary.metadata.shared,
        counted(loop),
        counted(assembly),
    )


def gpu(target: str) -> Any:
    """The target as Triton names it."""
    from triton.backends.compiler import GPUTarget

    if target.startswith("gfx"):
        return GPUTarget("hip", target, 64)
    return GPUTarget("cuda", int(target.removeprefix("sm_")), 32)


def _of_amdgcn(assembly: str) -> tuple[dict[str, int], dict[str, int]]:
    def value(key: str) -> int:
        return int(re.findall(rf"\.{key}:\s+(\d+)", assembly)[0])

    return (
        {"VGPR": value("vgpr_count"), "AGPR": value("agpr_count"), "SGPR": value("sgpr_count")},
        {
            "VGPR": value("vgpr_spill_count"),
            "SGPR": value("sgpr_spill_count"),
            "scratch": value("private_segment_fixed_size"),
        },
    )


def _of_cubin(cubin: bytes, _: str) -> tuple[dict[str, int], dict[str, int]]:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    usage = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", done.stdout))
    return {"registers": int(usage["REG"])}, {
        "stack": int(usage["STACK"]),
        "local": int(usage["LOCAL"]),
    }


def loops(assembly: str) -> Iterator[str]:
    """The bodies of the loops of amdgcn or PTX, outer ones with their inner ones."""
    lines = assembly.splitlines()
    labels = {}
    for number, line in enumerate(lines):
        if label := re.match(r"^(\.LBB\w+|\$L__BB\w+):", line):
            labels[label[1]] = number
        jump = re.search(r"\b(?:s_c?branch\w*|bra(?:\.uni)?)\s+(\.LBB\w+|\$L__BB\w+)", line)
        if jump and jump[1] in labels:
            yield "\n".join(lines[labels[jump[1]] : number])


def counted(assembly: str) -> dict[str, int]:
    """Instructions of MATRIX that occur, with their number."""
    found = {name: len(re.findall(form, assembly, re.MULTILINE)) for name, form in MATRIX.items()}
    return {name: count for name, count in found.items() if count}


def prepare(settings: dict[str, str]) -> None:
    """Sets the environment of a process before it imports Triton."""
    os.environ.update(settings)


def report(targets: list[str], kernels: list[str], jobs: int, every: int = 1) -> list[Compiled]:
    """What is shipped for these targets, compiled by `jobs` processes with a fresh cache.

    every   compiles the first, and each so-manieth after it, of a kernel's compilations
    """
    work = []
    for target in targets:
        asked = [what for what in shipped(target) if not kernels or what.kernel in kernels]
        for kernel in dict.fromkeys(what.kernel for what in asked):
            of_kernel = [what for what in asked if what.kernel == kernel]
            work += [(what, target) for what in of_kernel[::every]]
    with tempfile.TemporaryDirectory() as cache:
        settings = {
            "TRITON_CACHE_DIR": cache,
            "TRITON_INTERPRET": "0",
            "TRITON_DEFAULT_FP_FUSION": "1",
        }
        if jobs == 1 and "triton" not in sys.modules:
            prepare(settings)
            return [compiled(*one) for one in work]
        with ProcessPoolExecutor(jobs, get_context("spawn"), prepare, (settings,)) as pool:
            return list(pool.map(compiled, *zip(*work, strict=True), chunksize=4))


def table(found: list[Compiled]) -> Iterator[str]:
    """Markdown: a line per target, kernel and tile, each with its compilations' extremes."""
    yield "| target | kernel | compiled | registers | spilled | LDS, shared: KiB | per step of K |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    rows: dict[tuple[str, str], list[Compiled]] = {}
    for one in found:
        words = one.name.split()[: 2 if one.per_step else 1]
        rows.setdefault((one.target, " ".join([*words, *one.per_step])), []).append(one)
    for (target, _), members in rows.items():
        words = members[0].name.split()[: 2 if members[0].per_step else 1]
        cells = [
            target,
            " ".join(words),
            str(len(members)),
            _extremes([one.registers for one in members]),
            _extremes([one.spilled for one in members]) or "0",
            _range([round(one.shared / 1024, 1) for one in members]),
            _extremes([one.per_step for one in members]),
        ]
        yield "| " + " | ".join(cells) + " |"


def _extremes(counts: list[dict[str, int]]) -> str:
    names = dict.fromkeys(name for count in counts for name in count)
    values = {name: [count.get(name, 0) for count in counts] for name in names}
    return ", ".join(f"{_range(held)} {name}" for name, held in values.items() if any(held))


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", default=",".join(TARGETS))
    parser.add_argument("--kernel", default="")
    parser.add_argument(
        "--every", type=int, default=1, help="compile each N-th of a kernel only", metavar="N"
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    kernels = [*filter(None, given.kernel.split(","))]
    results = report(given.target.split(","), kernels, given.jobs, given.every)
    if given.json:
        print(json.dumps([asdict(one) for one in results], indent=1))
    else:
        print("\n".join(table(results)))
    failed = [one for one in results if one.error]
    for one in failed:
        print(f"{one.target}: {one.name}: {one.error}", file=sys.stderr)
    sys.exit(1 if failed else 0)
