"""What an engine's table may say: the rules that the shared functions of this package interpret.

Every field is a fact of an engine's source. What a table cannot say is not known, and comes out as
"unknown".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Kind = Literal["linear", "expert"]
SchemeWord = Literal["w4a4", "w4a16", "w4a6", "w4a8 static", "w4a8 dynamic"]
PartialGroups = Literal["refused", "floored", "overrun"]
"""What becomes of a row-parallel linear whose columns per rank are not whole groups of 32.

refused   an error when the model is built
floored   columns / 32 is floored: ranks load scales that belong to other weights, and no error
overrun   columns / 32 is rounded up: the last rank asks for scales that are not there, an error
"""


class Switch(NamedTuple):
    """An environment variable of an engine; `on` is its default, `says` what it does when on.

    usual   what is taken unless the user says otherwise, where that is not the default: nobody
            serves MXFP4 on an MI350 with AITER off
    """

    name: str
    on: bool
    says: str
    usual: bool | None = None

    @property
    def taken(self) -> bool:
        """What is taken unless the user says otherwise."""
        return self.on if self.usual is None else self.usual


@dataclass(frozen=True, slots=True)
class DenseRule:
    """How an engine runs a W4A4 linear on gfx950.

    asm             switched: where all of `needs` are on; tuned: where AITER is tuned for the
                    shape, too; always: whatever the shape
    needs           switches without which there is no ASM
    instead         (switch, path): where the switch is on, every linear takes that path; the first
    guarded         a scale that does not fill tiles of 32 x 8 goes to Triton
    triton_rows     rows that go to Triton although they fill the tiles
    triton_up_to    as many rows or fewer go to Triton
    small_m_triton  M <= 64 goes to the Triton GEMM for shuffled weights where AITER is tuned for
                    (rows, small_m_triton * k) there, else to the ASM GEMM as any M; 0: never
    small_m_asm     switch that takes `small_m_triton` back, or ""
    partial_groups  see PartialGroups
    floored         schemes whose linears are floored whatever `partial_groups` says
    """

    asm: Literal["switched", "tuned", "always"]
    needs: tuple[str, ...] = ()
    instead: tuple[tuple[str, str], ...] = ()
    guarded: bool = True
    triton_rows: frozenset[int] = frozenset()
    triton_up_to: int = 0
    small_m_triton: int = 0
    small_m_asm: str = ""
    partial_groups: PartialGroups = "refused"
    floored: frozenset[SchemeWord] = frozenset()


class Emulated(NamedTuple):
    """A bank of experts that an engine computes by emulation, under expert parallelism only."""

    experts: int
    hidden: int
    width: int
    ranks: int


@dataclass(frozen=True, slots=True)
class ExpertRule:
    """How an engine cuts and runs routed experts on gfx950.

    needs           switches without which AITER's fused MoE is not used
    without         what W4A4 experts come to then: (path, message), path None for an error
    pad             AITER's MXFP4 path pads a rank's intermediate size to a multiple of this
    pad_hidden      and the hidden size to a multiple of this; 1: not at all
    other_pads      the same two for other paths
    scales          floored: the scale columns of w2 are cut by columns // ranks, and no error;
                    asserted: unequal pieces fail an assertion
    whole_groups    model families whose own loader cuts whole groups of 32, unequal ones too
    floored_starts  model families whose own loader floors where a rank's scales start
    stored_fused    gate and up in one tensor per expert are loaded, whatever the family
    emulated        banks that are emulated
    """

    needs: tuple[str, ...]
    without: tuple[str | None, str]
    pad: int
    pad_hidden: int
    scales: Literal["floored", "asserted"]
    whole_groups: frozenset[str] = frozenset()
    floored_starts: frozenset[str] = frozenset()
    stored_fused: bool = False
    other_pads: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    emulated: tuple[Emulated, ...] = ()


@dataclass(frozen=True, slots=True)
class NameRule:
    """How an engine reads `exclude` and `layer_quant_config`, and what it calls its modules.

    globs        exclude entries with * or ? are globs; else they are names like any other
    regex        re: entries match at the start of a name, or search in it
    parents      an entry excludes what is below it
    keys         globs: every key of layer_quant_config is a glob; within: a key without * matches
                 the names that are part of it (the name in the key, not the key in the name)
    bank_keys    keys below "<bank>.experts." speak for the bank
    fused        leaf of a fused projection, as parallel names it -> leaf of the engine's module
    fused_plain  what replaces entries of `fused` where global_quant_config quantizes nothing
    unsettled    model family -> leaf of the engine's module -> why it is not known what is built
    unmapped     leaf of the engine's module -> families whose model class does not say what it is
                 made of: entries that name the parts do not match
    mixed        refused: parts of one projection that differ are an error; unknown: not known
    bare         where modules are renamed, an entry below this root speaks for the name without it
    renames      model_type -> (prefix on disk, prefix of the module), applied in turn
    doubtful     model_type -> why nothing can be said about its names
    required     (path in quantization_config, the error where it is missing or null)
    kv_keys      what kv_cache_group has to find among the keys of layer_quant_config: same: its
                 own entries, alike in all; globs: names that its globs match; "": not looked at
    """

    globs: bool
    regex: Literal["match", "search"]
    parents: bool
    keys: Literal["globs", "within"]
    bank_keys: bool
    fused: Mapping[str, str]
    mixed: Literal["refused", "unknown"]
    fused_plain: Mapping[str, str] = field(default_factory=dict)
    unsettled: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    unmapped: Mapping[str, frozenset[str]] = field(default_factory=dict)
    bare: str = ""
    renames: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    doubtful: Mapping[str, str] = field(default_factory=dict)
    required: tuple[tuple[str, str], ...] = ()
    kv_keys: Literal["same", "globs", ""] = ""


class Runs(NamedTuple):
    """How a scheme is run. path "" leaves it to the dense or expert rule; None is an error."""

    path: str | None
    message: str = ""


@dataclass(frozen=True, slots=True)
class SharedRule:
    """What an engine does with shared experts.

    fusion            switches that fuse them into the routed experts; None: not known
    replicates        model families that hold a misaligned one whole under expert or sequence
                      parallelism, and refuse it without
    whole_under_sp    model families that hold every one whole under sequence parallelism
    """

    fusion: tuple[str, ...] | None
    replicates: frozenset[str] = frozenset()
    whole_under_sp: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine at one version.

    label     what it is called in messages
    sources   URLs, or file@version, that the table was read from
    schemes   (linear or expert, scheme) -> how it is run; what is missing is an error
    no_scheme the error for a scheme that is missing, by kind
    scale_names   what a scale named weight_quantizer.scale leads to: (outcome, message)
    outputs   whether a quantized output or bias is an error
    symmetric whether a static FP8 input has to be said to be symmetric
    heads     error where the attention heads do not divide by the ranks, "{heads}" and "{tp}" in
              it; "" where nothing is checked for the model as a whole
    read      model families whose files in the engine were read; empty: the table does not
              depend on them
    unread    model family -> what is said of it instead of that it is assumed to be built alike
    own       mxfp4prep's runtime on the prepared checkpoint: the decided verdicts, no rules
    """

    name: str
    label: str
    version: str
    sources: tuple[str, ...]
    switches: tuple[Switch, ...]
    dense: DenseRule
    experts: ExpertRule
    names: NameRule
    schemes: Mapping[tuple[Kind, SchemeWord], Runs]
    no_scheme: Mapping[Kind, str]
    shared: SharedRule
    scale_names: tuple[Literal["crash", "unknown"], str]
    outputs: bool
    symmetric: bool = False
    heads: str = ""
    read: frozenset[str] = frozenset()
    unread: Mapping[str, str] = field(default_factory=dict)
    own: bool = False
