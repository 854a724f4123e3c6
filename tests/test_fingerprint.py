"""Fingerprints of files: what counts as a change."""

import json
import os

import pytest

from experiments import workdir


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "x.npy"
    path.write_bytes(bytes(range(256)))
    return path


def overwrite(path, place, *, keep_time=False):
    """Changes one byte in place."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1]))
    later = 0 if keep_time else 1
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + later))


def test_a_fingerprint_is_json(file):
    recorded = workdir.fingerprint(file)
    assert json.loads(json.dumps(recorded)) == recorded
    assert recorded["bytes"] == 256 and recorded["modified"] == file.stat().st_mtime_ns
    assert workdir.changed(recorded, file) is None


def test_other_content_another_size_and_a_missing_file_are_changes(file):
    recorded = workdir.fingerprint(file)
    overwrite(file, 77)
    assert "x.npy" in workdir.changed(recorded, file)
    file.write_bytes(b"short")
    assert "x.npy has 5 bytes, had 256" in workdir.changed(recorded, file)
    file.unlink()
    assert "x.npy cannot be read" in workdir.changed(recorded, file)


def test_the_same_content_written_again_is_no_change(file):
    recorded = workdir.fingerprint(file)
    file.write_bytes(bytes(range(256)))
    os.utime(file, ns=(0, 0))
    assert workdir.changed(recorded, file) is None


def test_what_could_not_be_read_stays_the_same_until_it_can(tmp_path, file):
    assert workdir.changed({}, tmp_path / "gone") is None
    assert "x.npy" in workdir.changed({}, file)
    with pytest.raises(OSError, match="gone"):
        workdir.fingerprint(tmp_path / "gone")


def test_large_files_are_sampled_from_the_first_byte_to_the_last(tmp_path):
    path, size = tmp_path / "large.npy", 3 * workdir.WHOLE
    with path.open("wb") as file:
        file.truncate(size)  # a hole, so no disk is used
    recorded = workdir.fingerprint(path)
    for place in (0, size - 1):
        overwrite(path, place)
        assert workdir.fingerprint(path)["digest"] != recorded["digest"]
        recorded = workdir.fingerprint(path)
    # Between two samples, only the time tells; a file written again is taken for another.
    overwrite(path, workdir.BLOCK + 1)
    assert workdir.fingerprint(path)["digest"] == recorded["digest"]
    assert "large.npy" in workdir.changed(recorded, path)
