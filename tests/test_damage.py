"""verify finds every damage that tests/attacks/damage.py knows, and names file and tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from attacks import damage
from attacks.damage import DIGESTS, MANIFEST, SUMS, UNPROVABLE, is_named, look

from mxfp4prep.restore import restore


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return damage.build(tmp_path_factory.mktemp("damage"))


@pytest.fixture(scope="module")
def pristine(made) -> Path:
    return made[1]


@pytest.fixture
def root(pristine: Path, tmp_path: Path) -> Iterator[Path]:
    with damage.small_pieces():
        yield Path(shutil.copytree(pristine, tmp_path / "out"))


def test_every_bit_of_every_header(root, tried):
    count, whole = 0, 0
    check = damage.ShardCheck(root)
    assert not any(check(path.name) for path in damage.shards(root))
    for file, bit, tensor, seen in damage.header_flips(root):
        assert is_named(seen, file, tensor), (file, bit, tensor, seen)
        if bit % 151 == 0:  # the check of one shard is all that verify adds nothing to
            assert seen.places <= look(root).places, (file, bit)
            whole += 1
        count += 1
    assert whole > 100
    assert not look(root)
    tried("H5", count)


def test_random_bits_of_tensors(root, tried):
    count = 0
    for file, bit, tensor, seen in damage.data_flips(root, 2000):
        assert seen.places == {(file, tensor), (file, None)}, (file, bit)
        count += 1
    tried("H5", count)


def test_the_check_of_one_shard_is_what_verify_says(root):
    for file, bit, _, seen in damage.data_flips(root, 40, seed=1):
        assert seen.places == look(root).places, (file, bit)


def test_swapped_tensors_of_equal_size(root, tried):
    places = []
    for swapped, seen in damage.swaps(root):
        assert swapped <= seen.places
        assert {tensor for _, tensor in seen.places} == {*(t for _, t in swapped), None}
        places.append(swapped)
    assert any(len({file for file, _ in swapped}) == 2 for swapped in places)
    assert any(len({file for file, _ in swapped}) == 1 for swapped in places)
    tried("H5", len(places))


def test_zeroed_pages(root, tried):
    hits = []
    for hit, seen in damage.zeroed_pages(root):
        assert seen.places == hit | {(file, None) for file, _ in hit}
        hits.append(hit)
    assert max(map(len, hits)) > 1  # a page that two tensors share
    tried("H5", len(hits))


def test_each_value_of_the_manifest(root, tried):
    places = []
    for path, seen in damage.manifest_edits(root, sums=False):
        assert is_named(seen, MANIFEST, None) or MANIFEST in seen.error, (path, seen)
        places.append(path)
    assert len(places) == len(list(damage.edited(json.loads((root / MANIFEST).read_bytes()))))
    tried("H5", len(places))


def test_each_value_of_the_manifest_with_its_sum(root, tried):
    missed, count = set(), 0
    for path, seen in damage.manifest_edits(root, sums=True):
        count += 1
        if not seen:
            missed.add(path)
    assert missed == UNPROVABLE
    tried("H5", count - len(missed))


def test_a_manifest_of_another_version_hides_no_edit(root):
    seen = dict(damage.manifest_edits(root, sums=True, tool_version="0.0.9"))
    assert {path for path, found in seen.items() if not found} == UNPROVABLE


@pytest.mark.parametrize(
    "name", ["config.json", "source/config.json", "model.safetensors.index.json"]
)
def test_each_value_of_the_json_files(root, tried, name):
    count = 0
    for path, alone, summed in damage.document_edits(root, name):
        assert is_named(alone, name, None) or alone.error.startswith(name), path
        named = {file for file, _ in summed.places}
        assert named & {name, "config.json"} or summed.error.startswith(name), path
        count += 1
    tried("H5", count)


def test_config_edited_with_all_that_follows_is_known_by_the_source(root, made, tried):
    count = 0
    for path, seen in damage.forgeries(root, made[0]):
        assert seen, path
        count += 1
    tried("H5", count)


def test_each_digest(root, tried):
    count = 0
    for tensor, alone, summed in damage.digest_edits(root):
        assert (DIGESTS, None) in alone.places
        assert tensor in {name for _, name in summed.places}
        count += 1
    tried("H5", count)


def test_each_line_of_the_sums(root, tried):
    count = 0
    for what, seen in damage.sums_edits(root):
        assert any(file in (SUMS, MANIFEST) for file, _ in seen.places), what
        count += 1
    tried("H5", count)


def test_files_added_removed_renamed_linked(root, tried):
    count = 0
    for what, seen in damage.file_changes(root):
        name = what.partition(":")[0]
        assert is_named(seen, name, None) or name in seen.error, (what, seen)
        count += 1
    assert not look(root)
    tried("H5", count)


def test_nothing_is_restored_from_what_verify_refuses(root, tmp_path):
    """A tensor changed with its digest of what is stored: the source's digest still stands."""
    path = damage.shards(root)[0]
    name, (begin, _) = next(iter(damage.data_spans(path).items()))
    raw = bytearray(path.read_bytes())
    raw[begin] ^= 1
    with damage.consistent(root, {path.name: bytes(raw)}):
        assert (path.name, name) in look(root).places
        with pytest.raises(damage.Mxfp4PrepError):
            restore(root, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_every_damaged_entry_of_a_header_is_named(root):
    """The reader stops at the first one; each alone would still be spelled as an entry is."""
    path = damage.shards(root)[0]
    spans, raw = damage.entry_spans(path), bytearray(path.read_bytes())
    damaged = sorted(spans, key=spans.get)[2:5]
    for name in damaged:
        begin, end = spans[name]
        at = raw.index(b'"shape":[', begin, end) + len(b'"shape":[')
        raw[at] = ord("9") if raw[at] != ord("9") else ord("8")
    with damage.replaced(path, bytes(raw)):
        assert {tensor for _, tensor in look(root, "quick").places} >= set(damaged)
    whole = path.read_bytes()
    with damage.replaced(path, whole[:8] + bytes(len(whole) - 8)):  # another file altogether
        assert look(root, "quick").places == {(path.name, None), *((path.name, n) for n in spans)}
