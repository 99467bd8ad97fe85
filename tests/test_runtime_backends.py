"""Which backends there are, why one cannot run, and what is looked at to find out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from aiter_stub import NEWEST, distribution, forget, install
from prepared_factory import Layer, build

import mxfp4prep
from mxfp4prep.errors import BackendUnavailable, UsageError
from mxfp4prep.runtime.backends import (
    BACKENDS,
    Needs,
    availability,
    backends,
    choose_backend,
    implementation,
)

ROOT = Path(__file__).parent.parent


def kfd(root: Path, *versions: int | None) -> Path:
    """A KFD topology: one node per version, 0 for a CPU, None for a node without properties."""
    for number, version in enumerate(versions):
        node = root / str(number)
        node.mkdir(parents=True)
        if version is not None:
            lines = ["cpu_cores_count 0", f"gfx_target_version {version}", "simd_count 1024", ""]
            (node / "properties").write_text("\n".join(lines))
    return root


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ((0, 90402), ("gfx942",)),
        ((0, 0, 90500, 90500), ("gfx950", "gfx950")),
        ((0, 120500), ("gfx1250",)),
        ((0, 110000), ("gfx1100",)),
        ((0, 90010), ("gfx90a",)),
        ((None, 90500), ("gfx950",)),
        ((0,), ()),
        ((), ()),
    ],
)
def test_gfx_targets(tmp_path, versions, expected):
    assert availability.gfx_targets(kfd(tmp_path / "nodes", *versions)) == expected


def test_nodes_are_in_numeric_order(tmp_path):
    versions = [0] * 9 + [90402, 90500]
    assert availability.gfx_targets(kfd(tmp_path / "n", *versions)) == ("gfx942", "gfx950")


@pytest.mark.parametrize("content", ["", "gfx_target_version\n", "gfx_target_version x\n", "\xff"])
def test_odd_properties_are_no_gpu(tmp_path, content):
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "properties").write_text(content, encoding="latin-1")
    assert availability.gfx_targets(tmp_path) == ()


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        ((0, 90402), ["gfx950", "found gfx942"]),
        ((0, 120500, 120500), ["gfx950", "found gfx1250"]),
        ((0,), ["gfx950", "found no AMD GPU"]),
        ((), ["gfx950", "found no AMD GPU"]),
    ],
)
def test_p86_aiter_needs_gfx950(tmp_path, versions, words):
    obstacle = availability.aiter_obstacle(kfd(tmp_path / "nodes", *versions))
    for word in words:
        assert word in obstacle


def package(folder: Path, *files: str, content: str = "raise RuntimeError('unsupported GPU')\n"):
    """A module aiter that raises when it is imported, as ROCm's does on a GPU it does not know."""
    for file in ("__init__.py", *files):
        path = folder / "aiter" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


@pytest.fixture
def site(tmp_path, monkeypatch):
    forget()
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    forget()


def test_aiter_that_is_not_installed(tmp_path, site):
    obstacle = availability.aiter_obstacle(kfd(tmp_path / "n", 90500))
    assert "amd-aiter is not installed" in obstacle
    assert "pip install amd-aiter" in obstacle


def test_p87_the_aiter_of_pypi_is_another_package(tmp_path, site):
    package(site, content="def map(): ...\n")
    distribution(site, "aiter")
    obstacle = availability.aiter_obstacle(kfd(tmp_path / "n", 90500))
    assert "another one" in obstacle
    assert "pip install amd-aiter" in obstacle
    assert "aiter" not in sys.modules


def test_a_stray_module_named_aiter(tmp_path, site):
    (site / "aiter.py").write_text("raise RuntimeError\n")
    obstacle = availability.aiter_obstacle(kfd(tmp_path / "n", 90500))
    assert str(site / "aiter.py") in obstacle
    assert "not ROCm's" in obstacle


def test_amd_aiter_hidden_by_another_module(tmp_path, site):
    distribution(site, "amd-aiter")
    package(site)
    obstacle = availability.aiter_obstacle(kfd(tmp_path / "n", 90500))
    assert "hides" in obstacle


def test_amd_aiter_without_its_module(tmp_path, site):
    distribution(site, "amd-aiter")
    obstacle = availability.aiter_obstacle(kfd(tmp_path / "n", 90500))
    assert "its module aiter is not found" in obstacle


def test_amd_aiter_is_found_without_importing_it(tmp_path, site):
    install(site, NEWEST, init="raise RuntimeError('unsupported GPU')\n")
    assert availability.aiter_obstacle(kfd(tmp_path / "n", 0, 90500)) is None
    assert "aiter" not in sys.modules


def test_amd_aiter_without_the_functions_is_not_enough(tmp_path, site):
    distribution(site, "amd-aiter", "9.9")
    package(site, "ops/__init__.py", "ops/shuffle.py")
    obstacle = availability.aiter_obstacle(kfd(tmp_path / "n", 0, 90500))
    assert obstacle == "amd-aiter 9.9: it has no gemm_a4w4"


def test_a_half_loaded_module_is_no_module(monkeypatch):
    module = type(sys)("aiter")
    module.__spec__ = None
    monkeypatch.setitem(sys.modules, "aiter", module)
    assert "not installed" in availability.aiter_package_obstacle()


def test_triton_says_why_not(monkeypatch, site):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "triton", None)
        assert "triton is not installed" in availability.triton_obstacle()
    (site / "triton.py").write_text("raise RuntimeError\n")
    assert "no GPU" in availability.triton_obstacle()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert availability.triton_obstacle() is None


def test_backends_lists_three(monkeypatch):
    monkeypatch.setattr(availability, "aiter_obstacle", lambda: "no gfx950")
    monkeypatch.setattr(availability, "triton_obstacle", lambda: "no triton")
    listed = mxfp4prep.backends()
    assert [status.name for status in listed] == ["aiter", "triton", "torch"]
    assert [status.available for status in listed] == [False, False, True]
    assert [status.reason for status in listed[:2]] == ["no gfx950", "no triton"]
    assert all(isinstance(s.available, bool) and s.reason for s in listed)


def test_a_backend_that_is_not_written_yet_is_not_available(monkeypatch):
    monkeypatch.setattr(availability, "aiter_obstacle", lambda: None)
    entry = BACKENDS["aiter"]._replace(module=None)
    monkeypatch.setitem(BACKENDS, "aiter", entry)
    status = backends()[0]
    assert not status.available
    assert "has no aiter backend" in status.reason


def test_names_that_no_backend_has():
    with pytest.raises(UsageError, match="cutlass"):
        choose_backend("cpu", "cutlass")
    with pytest.raises(UsageError, match="cutlass"):
        implementation("cutlass")


@pytest.fixture
def fast(monkeypatch):
    """aiter as if it could run here, on cuda devices, for W4A4 layers that are not kept."""
    entry = BACKENDS["aiter"]._replace(
        module=BACKENDS["torch"].module,
        obstacle=lambda: None,
        paths=frozenset({"asm", "triton"}),
        objection=lambda needs, paths: "is odd" if needs.k[0] % 2 else None,
        failure=lambda: None,
    )
    monkeypatch.setitem(BACKENDS, "aiter", entry)
    monkeypatch.setitem(BACKENDS, "triton", BACKENDS["triton"]._replace(module=None))


@pytest.mark.parametrize(
    ("device", "paths", "input_quant", "expected"),
    [
        ("cuda", ("asm",), "mxfp4", "aiter"),
        ("cuda", ("asm", "triton"), "mxfp4", "aiter"),
        ("cuda", ("asm", "kept"), "mxfp4", "torch"),
        ("cuda", ("asm",), "fp8_token", "torch"),
        ("cpu", ("asm",), "mxfp4", "torch"),
        ("cuda", (), None, "aiter"),
    ],
)
def test_the_best_that_handles_the_layer_is_taken(fast, device, paths, input_quant, expected):
    assert choose_backend(device, None, paths, input_quant) == expected


@pytest.mark.parametrize(
    ("device", "paths", "input_quant", "word"),
    [
        ("cpu", (), None, "device cpu"),
        ("cuda", ("kept",), None, "path kept"),
        ("cuda", ("asm",), "none", "input quantization none"),
    ],
)
def test_a_named_backend_must_handle_the_layer(fast, device, paths, input_quant, word):
    assert choose_backend("cuda", "aiter", ("asm",), "mxfp4") == "aiter"
    with pytest.raises(BackendUnavailable, match=word):
        choose_backend(device, "aiter", paths, input_quant)


def test_a_backend_may_object_to_a_layer(fast):
    assert choose_backend("cuda", None, ("asm",), "mxfp4", Needs(k=(2,))) == "aiter"
    assert choose_backend("cuda", None, ("asm",), "mxfp4", Needs(k=(3,))) == "torch"
    with pytest.raises(BackendUnavailable, match="backend aiter: is odd"):
        choose_backend("cuda", "aiter", ("asm",), "mxfp4", Needs(k=(3,)))


def test_a_backend_that_does_not_load_is_asked_last_and_passed_over(fast, monkeypatch):
    asked = []
    entry = BACKENDS["aiter"]._replace(failure=lambda: asked.append(1) or "fails to import")
    monkeypatch.setitem(BACKENDS, "aiter", entry)
    assert choose_backend("cuda", "aiter") == "aiter"
    assert choose_backend("cuda", None, ("asm",), "mxfp4", Needs(k=(3,))) == "torch"
    assert choose_backend("cpu", None, ("asm",), "mxfp4", Needs(k=(2,))) == "torch"
    assert asked == []
    assert choose_backend("cuda", None, ("asm",), "mxfp4", Needs(k=(2,))) == "torch"
    with pytest.raises(BackendUnavailable, match="fails to import"):
        choose_backend("cuda", "aiter", ("asm",), "mxfp4", Needs(k=(2,)))


def test_load_refuses_a_backend_that_cannot_run(tmp_path):
    build(tmp_path, [Layer("fc1", 64, 256)])
    with pytest.raises(BackendUnavailable, match="gfx950") as caught:
        mxfp4prep.load(tmp_path, backend="aiter")
    assert "torch" in caught.value.hint
    with pytest.raises(UsageError, match="nothing"):
        mxfp4prep.load(tmp_path, backend="nothing")
    assert mxfp4prep.load(tmp_path, backend="torch")["fc1"].backend == "torch"
    assert mxfp4prep.load(tmp_path)["fc1"].backend == "torch"


def test_p90_environment_variables_decide_nothing(tmp_path, monkeypatch):
    """What a checkpoint was laid out for is in its manifest."""
    for name in ("VLLM_ROCM_USE_AITER_FP4_ASM_GEMM", "VLLM_ROCM_USE_AITER"):
        monkeypatch.setenv(name, "0")
    build(tmp_path, [Layer("fc1", 64, 256)])
    assert mxfp4prep.load(tmp_path)["fc1"].path == "asm"
