"""AITER's tuned tables, made up in AITER's own formats."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mxfp4prep.engines import Tuned, find_tuned
from mxfp4prep.errors import UsageError

HEADER = "gfx,cu_num,M,N,K,kernelId,splitK,us,kernelName,tflops,bw,errRatio"
NAME = "a4w4_blockscale_tuned_gemm"
NESTED = "ops/triton/configs/gfx950/triton/gemm/gemm_afp4wfp4_preshuffled"
FLAT = "ops/triton/configs/gemm"
TILE = {"BLOCK_SIZE_M": 32, "BLOCK_SIZE_N": 64, "NUM_KSPLIT": 1}


def row(m: int, n: int, k: int, cu_num: int = 256, gfx: str | None = "gfx950") -> str:
    start = [] if gfx is None else [gfx]
    return ",".join([*start, f"{cu_num},{m},{n},{k},21,0,6.5,f4gemm_bf16_x,1.0,2.0,0.0"])


def write_table(path: Path, *rows: str, header: str = HEADER) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([header, *rows]) + "\n")


def write_shape(
    package: Path, n: int, k: int, *keys: str, place: str = NESTED, prefix: str = ""
) -> None:
    path = package / place / f"{prefix}GEMM-AFP4WFP4_PRESHUFFLED-N={n}-K={k}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dict.fromkeys(keys or ("M_LEQ_128", "any"), TILE)))


@pytest.fixture
def package(tmp_path):
    """An AITER package as it lies in a checkout, with one tuned shape."""
    package = tmp_path / "checkout" / "aiter"
    write_table(package / "configs" / f"{NAME}.csv", row(1024, 512, 256), row(8192, 512, 256))
    write_shape(package, 512, 256)
    return package


def test_what_is_read(package):
    found = find_tuned(package)
    assert found == Tuned(
        origin=str(package),
        gemm=frozenset({(1024, 512, 256), (8192, 512, 256)}),
        triton=frozenset({(512, 256)}),
    )
    assert found.for_both(512, 256)
    assert not found.for_both(256, 512)


@pytest.mark.parametrize("inside", ["..", ".", "configs"])
def test_the_folder_may_be_checkout_package_or_configs(package, inside):
    found = find_tuned((package / inside).resolve())
    assert (len(found.gemm), len(found.triton)) == (2, 1)


def test_triton_s_own_folder_beside_a_table(tmp_path):
    write_table(tmp_path / f"{NAME}.csv", row(1, 2, 3))
    write_shape(tmp_path, 2, 3, place="gfx950/triton/gemm/gemm_afp4wfp4_preshuffled")
    assert find_tuned(tmp_path).triton == {(2, 3)}


def test_rows_of_other_machines_do_not_count(package):
    write_table(
        package / "configs" / f"{NAME}.csv",
        row(16, 512, 256),
        row(32, 512, 256, cu_num=304),
        row(64, 512, 256, gfx="gfx942"),
        row(128, 512, 256, gfx=""),
    )
    assert find_tuned(package).gemm == {(16, 512, 256), (128, 512, 256)}


def test_tables_without_the_column_gfx(package):
    write_table(
        package / "configs" / f"{NAME}.csv",
        row(16, 512, 256, gfx=None),
        row(32, 512, 256, gfx=None, cu_num=80),
        header=HEADER.removeprefix("gfx,"),
    )
    assert find_tuned(package).gemm == {(16, 512, 256)}


def test_columns_are_found_by_name(package):
    write_table(package / "configs" / f"{NAME}.csv", "7,256,16,512,256", header="us,K,M,N,cu_num")
    assert find_tuned(package).gemm == {(16, 512, 256)}


def test_tables_of_single_models_count_and_others_do_not(package):
    configs = package / "configs"
    write_table(configs / "model_configs" / f"llama_{NAME}.csv", row(16, 1, 1))
    write_table(configs / "model_configs" / f"{NAME}_qwen.csv", row(16, 2, 2))
    write_table(configs / "a4w4_blockscale_untuned_gemm.csv", row(16, 3, 3))
    write_table(configs / "a8w8_blockscale_tuned_gemm.csv", row(16, 4, 4))
    write_table(configs / "model_configs" / "a8w8_tuned_gemm.csv", row(16, 5, 5))
    write_table(configs / f"old_{NAME}.csv", row(16, 6, 6))
    shapes = {(n, k) for _, n, k in find_tuned(package).gemm}
    assert shapes == {(512, 256), (1, 1), (2, 2)}


@pytest.mark.parametrize(
    ("keys", "tuned"),
    [
        (["M_LEQ_128"], True),
        (["M_LEQ_256", "any"], True),
        (["M_LEQ_8192"], True),
        (["M_GEQ_128"], True),
        (["M_GEQ_4"], True),
        (["M_LEQ_64", "any"], False),
        (["M_GEQ_256"], False),
        (["any"], False),
        (["M_LEQ_129"], False),  # not a bound that AITER looks up
        (["M_LEQ_16384"], False),
        (["M_GEQ_2"], False),
        (["small", "large"], False),
    ],
)
def test_a_shape_counts_if_it_has_an_entry_for_128_rows(package, keys, tuned):
    write_shape(package, 512, 256, *keys)
    assert ((512, 256) in find_tuned(package).triton) is tuned


def test_files_of_other_kernels_and_machines(package):
    write_shape(package, 1, 1, place=NESTED.replace("gfx950", "gfx942"))
    write_shape(package, 2, 2, place=NESTED.replace("gemm_afp4wfp4_preshuffled", "gemm_afp4wfp4"))
    write_shape(package, 3, 3, place=FLAT, prefix="gfx942-")
    folder = package / NESTED
    (folder / "GEMM-AFP4WFP4_PRESHUFFLED.json").write_text("{}")
    (folder / "GEMM-AFP4WFP4-N=4-K=4.json").write_text('{"M_LEQ_128": {}}')
    (folder / "GEMM-AFP4WFP4_PRESHUFFLED-N=5-K=5.json.bak").write_text("{}")
    assert find_tuned(package).triton == {(512, 256)}


def test_the_older_layout(tmp_path):
    write_table(tmp_path / "configs" / f"{NAME}.csv", row(1024, 512, 256))
    write_shape(tmp_path, 640, 256, place=FLAT, prefix="gfx950-")
    assert find_tuned(tmp_path).triton == {(640, 256)}


def test_small_m_needs_every_size_that_aiter_pads_to(package):
    path = package / "configs" / f"{NAME}.csv"
    write_table(path, row(16, 512, 256), row(32, 512, 256), row(64, 512, 256))
    assert find_tuned(package).for_small_m(512, 256)
    write_table(path, row(16, 512, 256), row(32, 512, 256), row(64, 512, 512))
    assert not find_tuned(package).for_small_m(512, 256)


# What does not read -------------------------------------------------------------------------------


def refused(folder: Path) -> str:
    with pytest.raises(UsageError) as error:
        find_tuned(folder)
    return str(error.value)


def test_folders_without_tables(tmp_path, package):
    assert "no such folder" in refused(tmp_path / "none")
    assert f"no {NAME}.csv" in refused(tmp_path)
    (package / "configs" / f"{NAME}.csv").unlink()
    assert f"no {NAME}.csv" in refused(package)


def test_a_folder_without_triton_s_files(package):
    for path in (package / NESTED).iterdir():
        path.unlink()
    text = refused(package)
    assert "not AITER's tuned tables" in text
    assert "gemm_afp4wfp4_preshuffled/GEMM-AFP4WFP4_PRESHUFFLED-N=...-K=...json" in text
    assert "aiter/ops/triton/configs" in text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "no column cu_num, M, N, K"),
        (b"cu_num,M,N\n256,1,2\n", "no column K"),
        (b"cu_num,M,N,K\n256,1,2,3\n256,1,two,3\n", "line 3"),
        (b"cu_num,M,N,K\n256,1,2,3\n256,1,two,3\n", "256, 1, two, 3"),
        (b"cu_num,M,N,K\n256,1,2\n", "256, 1, 2, None"),
        (b"cu_num,M,N,K\n256,1,,3\n", "not a row of tuned GEMMs"),
        (b"\xff\xfe\x00", "not text"),
        (
            b"cu_num,M,N,K\n" + b'"' + b"x" * 200000 + b'"' + b",1,2,3\n",
            "not a table: field larger",
        ),
    ],
)
def test_tables_that_do_not_read(package, text, says):
    path = package / "configs" / f"{NAME}.csv"
    path.write_bytes(text)
    found = refused(package)
    assert says in found
    assert str(path) in found


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1, "a": 2}'])
def test_shapes_that_do_not_read(package, text):
    path = package / NESTED / "GEMM-AFP4WFP4_PRESHUFFLED-N=512-K=256.json"
    path.write_text(text)
    assert str(path) in refused(package)


# An installed distribution ------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of installed packages, in front of all others."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.setattr(sys, "path", [str(site)])
    return site


def install(site: Path, *files: str) -> None:
    info = site / "amd_aiter-0.1.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: amd-aiter\nVersion: 0.1.9\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))


def test_tables_of_an_installed_aiter(site):
    package = site / "aiter_meta" / "aiter"
    write_table(package / "configs" / f"{NAME}.csv", row(1024, 512, 256))
    write_table(package / "configs" / "model_configs" / f"x_{NAME}.csv", row(8192, 512, 256))
    write_table(site / "other" / f"{NAME}.csv", row(1, 1, 1))
    write_table(package / "configs" / "a8w8_blockscale_tuned_gemm.csv", row(2, 2, 2))
    write_table(package / "configs" / "model_configs" / "a8w8_tuned_gemm.csv", row(3, 3, 3))
    write_table(package / "others" / "model_configs" / f"{NAME}.csv", row(4, 4, 4))
    write_shape(package, 512, 256)
    write_shape(package, 640, 256, place=FLAT, prefix="gfx950-")
    (site / "aiter").mkdir()
    (site / "aiter" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    files = [path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()]
    install(site, *files)
    found = find_tuned(None)
    assert found == Tuned(
        origin="amd-aiter 0.1.9",
        gemm=frozenset({(1024, 512, 256), (8192, 512, 256)}),
        triton=frozenset({(512, 256), (640, 256)}),
    )
    assert found.for_both(512, 256)
    assert "aiter" not in sys.modules


def test_an_installed_aiter_without_tables(site):
    install(site, "aiter/__init__.py")
    assert find_tuned(None) is None


def test_an_installed_aiter_whose_files_are_gone(site):
    install(site, f"aiter/configs/{NAME}.csv", f"aiter/{NESTED}/x-N=1-K=1.json")
    assert find_tuned(None) is None


def test_no_aiter_at_all(site):
    assert find_tuned(None) is None
