"""The document of `bench`: times of a checkpoint's GEMMs on one device."""

from __future__ import annotations

from typing import Literal

# pydantic takes typing's own TypedDict from Python 3.12 on only
from typing_extensions import TypedDict

from mxfp4prep.report.contract.parts import SchemaVersion


class BenchDeviceDocument(TypedDict):
    """The device and what it was measured to do at most.

    bandwidth   bytes per second, read and written, of a large copy
    bf16_rate   operations per second of a large bfloat16 matrix product, two per multiply-add
    """

    device: str
    name: str
    torch: str
    bandwidth: float
    bf16_rate: float


class BenchRowDocument(TypedDict):
    """One shape on one backend at one m; times of one call in microseconds.

    layer, layers   the first layer of this shape, or a prefix of experts; how many there are
    n, k            of the matrix; for experts of gate and up together, down being (k, n / 2)
    experts, top_k  null for a plain matrix
    spread_us       from the first to the third quartile of `runs` runs
    fastest_us      of the fastest run
    method          graph: replays of a CUDA graph of many calls · events: many calls between CUDA
                    events · clock: single calls on the host's clock
    bf16_us         the same work in bfloat16, null where its weights do not fit into memory;
                    bf16_spread_us as spread_us
    bf16_by         linear (torch.nn.functional.linear), grouped_mm (torch's grouped product) or
                    loop (over the experts that are hit): the faster one for experts
    bf16_ratio      bf16_us / median_us: above 1, faster than bfloat16
    floor_us        the least time at the device's measured ceilings, and what sets it: the bytes
                    that must move (memory) or the operations (arithmetic)
    floor_share     floor_us / median_us: 1 is as fast as bfloat16 units or memory allow
    waited          time that the process's threads waited for a CPU over the runs' time, null on a
                    GPU or where the kernel does not tell
    steady          false where the runs of the layer or of bfloat16 were not alone on the machine
                    and the row is not to be trusted: the middle half over more than a quarter of
                    the median, the median above 1.5 times the fastest, or waited above a tenth
    """

    layer: str
    layers: int
    n: int
    k: int
    experts: int | None
    top_k: int | None
    path: str
    scheme: str
    backend: str
    m: int
    median_us: float
    spread_us: float
    fastest_us: float
    runs: int
    waited: float | None
    method: Literal["graph", "events", "clock"]
    bf16_us: float | None
    bf16_spread_us: float | None
    bf16_by: Literal["linear", "grouped_mm", "loop"] | None
    bf16_ratio: float | None
    floor_us: float
    floor_bound: Literal["memory", "arithmetic"]
    floor_share: float
    steady: bool


class BenchSkippedDocument(TypedDict):
    """A layer that did not run on a backend; m null: at no m."""

    layer: str
    backend: str
    m: int | None
    reason: str


class BenchDocument(TypedDict):
    """`mxfp4prep bench --format json`."""

    schema_version: SchemaVersion
    name: str
    device: BenchDeviceDocument
    rows: list[BenchRowDocument]
    skipped: list[BenchSkippedDocument]
