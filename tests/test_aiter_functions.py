"""How AITER's functions are found in a package that is not imported, release by release."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import aiter_recorder as recorder
import pytest
import torch
from aiter_stub import DATA, NEWEST, SIGNATURES, TOO_OLD, distribution, forget, install
from conftest import with_path
from prepared_factory import Layer, build

import mxfp4prep
from mxfp4prep.errors import BackendUnavailable
from mxfp4prep.runtime import backends as registry
from mxfp4prep.runtime.backends import Needs, availability, choose_backend
from mxfp4prep.runtime.backends.aiter_functions import read_functions
from mxfp4prep.runtime.backends.aiter_limits import objection, release, splits_k_wrongly

ROOT = Path(__file__).parent.parent
OLD_GEMMS, NEW_GEMMS = "aiter.ops.triton.gemm_afp4wfp4", "aiter.ops.triton.gemm.basic.gemm_afp4wfp4"
LINEAR = Needs(k=(512,))


@pytest.fixture(autouse=True)
def nothing_remembered():
    forget()
    yield
    forget()


def test_the_recorded_signatures_span_what_is_known():
    assert len(SIGNATURES) >= 8
    assert set(TOO_OLD) < set(SIGNATURES)
    assert all(record["source"] for record in SIGNATURES.values())


@pytest.mark.parametrize(
    ("version", "gemms", "preshuffle", "takes_out", "quant"),
    [
        ("0.1.7.post2.dev18", OLD_GEMMS, "gemm_afp4wfp4_preshuffled_weight_scales", True, "quant"),
        ("0.1.8", OLD_GEMMS, "gemm_afp4wfp4_preshuffle", True, "quant"),
        ("0.1.9", OLD_GEMMS, "gemm_afp4wfp4_preshuffle", False, "quant"),
        ("0.1.12.post1", NEW_GEMMS, "gemm_afp4wfp4_preshuffle", False, "quant"),
        ("0.1.16", NEW_GEMMS, "gemm_afp4wfp4_preshuffle", False, "quant.quant"),
        ("0.1.20.post1", NEW_GEMMS, "gemm_afp4wfp4_preshuffle", False, "quant.quant"),
        ("0.1.21.dev0", NEW_GEMMS, "gemm_afp4wfp4_preshuffle", False, "quant.quant"),
    ],
)
def test_each_release_is_read_right(tmp_path, version, gemms, preshuffle, takes_out, quant):
    found = read_functions(install(tmp_path, version, init="raise RuntimeError\n"), version)
    assert (found.plain.module, found.plain.name) == (gemms, "gemm_afp4wfp4")
    assert (found.preshuffle.module, found.preshuffle.name) == (gemms, preshuffle)
    assert ("out" in found.gemm_a4w4.parameters) == takes_out
    assert found.quantize.module == f"aiter.ops.triton.{quant}"
    for function, file in (
        (found.gemm_a4w4, "ops/gemm_op_a4w4.py"),
        (found.fused_moe, "fused_moe.py"),
    ):
        recorded = SIGNATURES[version]["functions"][file][function.name]
        assert list(function.parameters) == [text.partition("=")[0] for text in recorded]
        assert list(function.required) == [text for text in recorded if "=" not in text]
    assert "aiter" not in sys.modules


@pytest.mark.parametrize(
    ("version", "words"),
    [("0.1.4", "gemm_a4w4 wants bias"), ("0.1.5", "no gemm_afp4wfp4_preshuffle")],
)
def test_a_release_that_is_too_old_says_what_it_lacks(tmp_path, version, words):
    with pytest.raises(BackendUnavailable, match=f"amd-aiter {version}: .*{words}"):
        read_functions(install(tmp_path, version), version)


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("fused_moe.py", "", "has no fused_moe"),
        ("fused_moe.py", "def fused_moe(", "has no fused_moe"),
        ("fused_moe.py", "def fused_moe(a, b, c, d, e): ...", "has no activation, expert_mask"),
        ("ops/triton/quant/quant.py", "def dynamic_mxfp4_quant(x): ...", "has no scaling_mode"),
        (
            "ops/triton/quant/quant.py",
            "def dynamic_mxfp4_quant(x, *, scaling_mode='even', seed): ...",
            "wants seed, unknown",
        ),
        ("ops/gemm_op_a4w4.py", "def other(): ...", "has no gemm_a4w4"),
    ],
)
def test_a_release_that_changed_too_much_says_what_it_lacks(tmp_path, file, text, words):
    package = install(tmp_path, NEWEST, changes={file: text})
    with pytest.raises(BackendUnavailable, match=words):
        read_functions(package, NEWEST)


def test_functions_defined_under_a_condition_are_found(tmp_path):
    text = (
        "try:\n    import triton\nexcept ImportError:\n    pass\nelse:\n"
        "    if True:\n        def dynamic_mxfp4_quant(x, *, scaling_mode='even'): ...\n"
    )
    package = install(tmp_path, NEWEST, changes={"ops/triton/quant/quant.py": text})
    assert read_functions(package, NEWEST).quantize.parameters == ("x", "scaling_mode")


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.1.7.post2.dev18", (0, 1, 7, 2)),
        ("v0.1.12.post1", (0, 1, 12, 1)),
        ("0.1.13", (0, 1, 13)),
        ("0.1.21.dev5+g1234abc", (0, 1, 21)),
        ("unknown", (0,)),
    ],
)
def test_release(version, expected):
    assert release(version) == expected


def known(tmp_path, version: str, named: str | None = None):
    return read_functions(install(tmp_path, version), named or version)


@pytest.mark.parametrize(
    ("version", "named", "wrong"),
    [
        ("0.1.12.post1", None, False),
        ("0.1.12.post1", "0.1.15", False),
        ("0.1.12.post1", "0.1.16", True),
        ("0.1.16", None, True),
        ("0.1.16", "0.1.dev9", True),  # a build without a number, known by its parameter's name
        ("0.1.21.dev0", None, True),
    ],
)
def test_the_split_k_fault_by_version_or_name(tmp_path, version, named, wrong):
    assert splits_k_wrongly(known(tmp_path, version, named)) == wrong


@pytest.mark.parametrize(
    ("named", "k", "paths", "refused"),
    [
        ("0.1.12", 640, ("triton",), True),
        ("0.1.12", 640, ("kept",), True),
        ("0.1.12", 512, ("triton",), False),
        ("0.1.12.post1", 640, ("triton",), False),
        ("0.1.13", 544, ("triton",), False),
        ("0.1.20", 80, ("kept",), True),
        ("0.1.20", 96, ("triton",), False),
    ],
)
def test_objections_to_k(tmp_path, named, k, paths, refused):
    found = objection(known(tmp_path, "0.1.12.post1", named), Needs(k=(k,)), paths)
    assert (found is not None) == refused
    assert found is None or str(k) in found


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        ("gfx942", "needs an MI350-class GPU (gfx950): found gfx942"),
        ("gfx1250", "needs an MI350-class GPU (gfx950): found gfx1250"),
        ("none", "needs an MI350-class GPU (gfx950): found no AMD GPU"),
        ("no such folder", "found no AMD GPU"),
        ("gfx950", None),
    ],
)
def test_p86_one_function_says_whether_asm_runs_here(tmp_path, monkeypatch, machine, words):
    """Everything else being right, on recorded topologies."""
    install(tmp_path / "site", NEWEST, init="raise RuntimeError\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    obstacle = availability.aiter_obstacle(DATA / "sysfs" / machine)
    assert obstacle is None if words is None else words in obstacle
    assert "aiter" not in sys.modules


def test_recorded_topologies_name_every_gpu():
    counts = {
        machine: len(availability.gfx_targets(DATA / "sysfs" / machine))
        for machine in ("gfx942", "gfx950", "gfx1250", "none")
    }
    assert counts == {"gfx942": 8, "gfx950": 8, "gfx1250": 4, "none": 0}


def test_the_obstacle_names_what_a_release_lacks(tmp_path, monkeypatch):
    install(tmp_path / "site", "0.1.5")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    obstacle = availability.aiter_obstacle(DATA / "sysfs" / "gfx950")
    assert obstacle == "amd-aiter 0.1.5: it has no gemm_afp4wfp4_preshuffle"


@pytest.fixture
def on_gfx950(tmp_path, monkeypatch):
    """A machine with gfx950 and a release of AITER, as choose_backend sees it."""

    def machine(version: str = NEWEST, **changes):
        install(tmp_path / "site", version, **changes)
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        nodes = DATA / "sysfs" / "gfx950"
        entry = registry.BACKENDS["aiter"]._replace(
            obstacle=lambda: availability.aiter_obstacle(nodes)
        )
        monkeypatch.setitem(registry.BACKENDS, "aiter", entry)
        no_triton = registry.BACKENDS["triton"]._replace(obstacle=lambda: "not in this test")
        monkeypatch.setitem(registry.BACKENDS, "triton", no_triton)

    return machine


@pytest.mark.parametrize(
    ("paths", "needs", "expected"),
    [
        (("asm",), LINEAR, "aiter"),
        (("triton",), Needs(k=(640,)), "aiter"),
        (("kept",), LINEAR, "aiter"),
        (("kept",), Needs(k=(80,)), "torch"),
        (("asm", "asm"), Needs((256, 512), "concatenated", "silu"), "aiter"),
        (("asm", "asm"), Needs((256, 512), "concatenated", "swigluoai", 7.0, True), "aiter"),
        (("asm", "triton"), Needs((256, 640), "concatenated", "silu"), "torch"),
        (("asm", "asm"), Needs((256, 512), "interleaved", "silu"), "torch"),
        (("asm", "asm"), Needs((256, 512), "concatenated", "silu", None, True), "torch"),
        (("asm", "asm"), Needs((256, 512), "concatenated", "silu", 7.0), "torch"),
        (("asm", "asm"), Needs((256, 512), "concatenated", "gelu"), "torch"),
    ],
)
def test_layers_that_it_does_not_handle_go_to_another_backend(on_gfx950, paths, needs, expected):
    on_gfx950()
    assert choose_backend("cuda", None, paths, "mxfp4", needs) == expected
    if expected != "aiter":
        with pytest.raises(BackendUnavailable, match="backend aiter"):
            choose_backend("cuda", "aiter", paths, "mxfp4", needs)


def test_an_old_release_gets_only_what_it_answers_right(on_gfx950):
    on_gfx950("0.1.7.post2.dev18")
    assert choose_backend("cuda", None, ("triton",), "mxfp4", Needs(k=(512,))) == "aiter"
    assert choose_backend("cuda", None, ("triton",), "mxfp4", Needs(k=(640,))) == "torch"
    with pytest.raises(BackendUnavailable, match=r"0.1.7.post2.dev18 answers NaN .*0.1.13"):
        choose_backend("cuda", "aiter", ("triton",), "mxfp4", Needs(k=(640,)))


def test_listing_backends_imports_none_and_a_layer_imports_it_once(on_gfx950):
    on_gfx950(init="import aiter_recorder\naiter_recorder.calls.append('imported')\n")
    recorder.calls.clear()
    assert mxfp4prep.backends()[0] == ("aiter", True, "ROCm AITER on gfx950")
    assert choose_backend("cuda", "aiter") == "aiter"
    assert recorder.calls == []
    for _ in range(3):
        assert choose_backend("cuda", None, ("asm",), "mxfp4", LINEAR) == "aiter"
    assert recorder.calls == ["imported"]


@pytest.mark.parametrize(
    ("init", "words"),
    [
        (
            "raise RuntimeError('Unable to find gfx950\\nmore')",
            "RuntimeError: Unable to find gfx950",
        ),
        ("raise KeyError('gfx1036')", "KeyError: 'gfx1036'"),
        ("raise OSError", "OSError"),
        ("import no_such_module_anywhere", "ModuleNotFoundError"),
        ("assert False", "AssertionError"),
        ("import sys; sys.exit('no GPU')", "SystemExit: no GPU"),
        ("def broken(:", "SyntaxError"),
    ],
)
def test_p88_whatever_importing_raises_means_not_available(on_gfx950, init, words):
    on_gfx950(init=f"import aiter_recorder\naiter_recorder.calls.append('try')\n{init}\n")
    recorder.calls.clear()
    assert choose_backend("cuda", None, ("asm",), "mxfp4", LINEAR) == "torch"
    for _ in range(2):
        with pytest.raises(BackendUnavailable) as caught:
            choose_backend("cuda", "aiter", ("asm",), "mxfp4", LINEAR)
        assert words in str(caught.value)
        assert f"importing amd-aiter {NEWEST} fails" in str(caught.value)
        assert "more" not in str(caught.value)
    assert len(recorder.calls) <= 1, "tried again"


def test_p88_a_function_that_source_has_and_the_module_has_not(on_gfx950):
    text = (
        "def fused_moe(a, b, c, d, e, expert_mask, activation, quant_type, w1_scale, w2_scale):..."
    )
    on_gfx950(changes={"fused_moe.py": text})
    with pytest.raises(BackendUnavailable, match="ActivationType"):
        choose_backend("cuda", "aiter", ("asm",), "mxfp4", LINEAR)


FORCED = """
import sys
import mxfp4prep
names = {status.name: status for status in mxfp4prep.backends()}
assert not names["aiter"].available, names
assert names["torch"].available, names
assert "aiter" not in sys.modules
import torch
from mxfp4prep.runtime import ops
try:
    mxfp4prep.load(sys.argv[1], backend="aiter")
except mxfp4prep.BackendUnavailable as error:
    print("load:", error)
weight, scale = torch.zeros((4, 2048), dtype=torch.uint8), torch.zeros((2, 256), dtype=torch.uint8)
try:
    ops.gemm(torch.zeros(1, 256), weight, scale, 64, "asm", "mxfp4", backend="aiter")
except mxfp4prep.BackendUnavailable as error:
    print("gemm:", error)
assert mxfp4prep.load(sys.argv[1])["fc1"](torch.zeros(1, 256)).shape == (1, 64)
"""


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("absent", "amd-aiter is not installed"),
        ("pypi", "another one (asynchronous iterators, from PyPI)"),
        ("hidden", "hides the one of amd-aiter"),
        ("raises", "RuntimeError: unsupported GPU"),
    ],
)
def test_p87_p88_aiter_forced_where_it_cannot_run(tmp_path, kind, words):
    """Refused at load for the machine, and in the operator for the package; others go on."""
    build(tmp_path / "prepared", [Layer("fc1", 64, 256)])
    site = tmp_path / "site"
    site.mkdir()
    if kind == "raises":
        install(site, NEWEST, init="raise RuntimeError('unsupported GPU')\n")
    elif kind != "absent":
        distribution(site, "aiter" if kind == "pypi" else "amd-aiter")
        (site / "aiter").mkdir()
        (site / "aiter" / "__init__.py").write_text("def aiter(): ...\n")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORCED, str(tmp_path / "prepared")],
        env=with_path(site, ROOT, ROOT / "tests"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    load, gemm = done.stdout.splitlines()
    assert load.startswith("load: backend aiter")
    assert "gfx950" in load or "does not handle device cpu" in load
    assert words in gemm


def test_a_bank_of_experts_says_what_it_needs():
    from mxfp4prep.manifest import ActivationRecord
    from mxfp4prep.runtime.experts import PreparedExperts
    from mxfp4prep.runtime.linear import PreparedLinear

    activation = ActivationRecord(dtype="fp4", scale_mode="even", static=False)

    def zeros(*shape):
        return torch.zeros(shape, dtype=torch.uint8)

    more = {"scheme": "w4a4"}
    linear = PreparedLinear(
        zeros(16, 32), zeros(16, 2), n=16, k=64, path="kept", activation=activation, **more
    )
    assert linear.needs == Needs(k=(64,))
    experts = PreparedExperts(
        zeros(2, 64, 32), zeros(2, 64, 2), zeros(2, 64, 16), zeros(2, 64, 1), hidden=64,
        intermediate=32, w13_path="kept", w2_path="kept", input_activation=activation,
        activation="swigluoai", limit=7.0, gate_up="interleaved", bias2=torch.zeros(2, 64), **more,
    )  # fmt: skip
    assert experts.needs == Needs((64, 32), "interleaved", "swigluoai", 7.0, True)
