"""The HTML file of an audit: written whole, and never over something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from mxfp4prep import io
from mxfp4prep.errors import IOFailed, UnsafeOutput
from mxfp4prep.report.page_file import check_page_file, write_page_file

MARK = '<meta name="generator" content="mxfp4prep audit">'
PAGE = f"<!doctype html>\n{MARK}<title>é</title>\n"


def write(path: Path, text: str) -> None:
    check_page_file(path)
    write_page_file(path, text)


@pytest.mark.parametrize("name", ["audit.html", "AUDIT.HTML", "a.htm"])
def test_a_page_is_written_and_replaced(tmp_path, name):
    path = tmp_path / name
    write(path, PAGE)
    assert path.read_bytes() == PAGE.encode()
    write(path, PAGE + "second")
    assert path.read_text() == PAGE + "second"
    assert [file.name for file in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "<!doc",
        "# notes\n" * 100,
        MARK,
        "<!doctype html>mine",
        f"<!doctype html>{'-' * 999}{MARK}",
    ],
)
def test_a_file_that_is_no_page_stays(tmp_path, content):
    path = tmp_path / "notes.html"
    path.write_text(content)
    with pytest.raises(UnsafeOutput, match="not the page of an audit"):
        check_page_file(path)
    assert path.read_text() == content


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "audit", "html"])
def test_only_names_of_pages_are_taken(tmp_path, name):
    with pytest.raises(UnsafeOutput, match=r"ends in \.html"):
        check_page_file(tmp_path / name)


def test_links_folders_and_missing_folders_are_refused(tmp_path):
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "page.html").write_text(PAGE)
    (tmp_path / "link.html").symlink_to(tmp_path / "page.html")
    (tmp_path / "dangling.html").symlink_to(tmp_path / "nothing")
    for name in ("folder.html", "link.html", "dangling.html"):
        with pytest.raises(UnsafeOutput, match="not a regular file"):
            check_page_file(tmp_path / name)
    with pytest.raises(UnsafeOutput, match="no such directory"):
        check_page_file(tmp_path / "no" / "page.html")


def test_a_file_that_comes_meanwhile_stays(tmp_path):
    path = tmp_path / "page.html"
    check_page_file(path)
    path.write_text("my notes")
    with pytest.raises(UnsafeOutput, match="not the page of an audit"):
        write_page_file(path, PAGE)
    assert path.read_text() == "my notes"
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]


def test_a_failed_write_leaves_the_old_page_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    path.write_text(PAGE)

    def full(fd, where):
        raise IOFailed(where, "no space left on the device")

    monkeypatch.setattr(io, "fsync", full)
    with pytest.raises(IOFailed):
        write_page_file(path, "<!doctype html>new")
    assert path.read_text() == PAGE
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]
