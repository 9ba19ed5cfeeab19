from __future__ import annotations

import os
from pathlib import Path

import pytest

from server.batch.files import BatchFileError, BatchInput, BatchOutput, open_files
from tests.server.batch_files import build_line, write_input


def test_blank_lines_are_no_lines_and_a_long_one_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"one\n\n  \n" + b"x" * 95 + b"\ntwo\nlast")
    with BatchInput(str(path), max_line_bytes=10) as source:
        assert list(source) == [b"one\n", None, b"two\n", b"last"]
        assert (source.num_lines, source.is_at_end, source.get_share_read()) == (4, True, 1.0)


def test_how_far_reading_is_is_known_without_reading_ahead(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"1\n" * 4)
    with BatchInput(str(path)) as source:
        lines = iter(source)
        assert (source.num_lines, source.is_at_end, source.get_share_read()) == (0, False, 0.0)
        next(lines)
        assert (source.num_lines, source.is_at_end, source.get_share_read()) == (1, False, 0.25)
        path.write_bytes(b"")  # emptied by somebody else
        assert source.get_share_read() is None
    with BatchInput("/dev/null") as device:
        assert (list(device), device.num_lines, device.get_share_read()) == ([], 0, None)


def test_the_output_has_its_name_only_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with BatchOutput(str(path), force=False) as target:
        target.write_line(b"{}")
        assert not path.exists()
        assert (tmp_path / "out.jsonl.partial").read_bytes() == b"{}\n"
        target.finish()
    assert path.read_bytes() == b"{}\n"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.partial"])
def test_nothing_is_overwritten_without_force(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("dear")
    out = tmp_path / "out.jsonl"
    with pytest.raises(BatchFileError, match="--force"):
        BatchOutput(str(out), force=False)
    assert (tmp_path / name).read_text() == "dear"
    with BatchOutput(str(out), force=True) as target:
        target.write_line(b"new")
        target.finish()
    assert out.read_text() == "new\n"


def test_an_output_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with BatchOutput(str(out), force=False) as target:
        target.write_line(b"new")
        out.write_text("dear")
        with pytest.raises(BatchFileError, match="appeared"):
            target.finish()
    assert out.read_text() == "dear"
    assert target.partial_path is not None and target.partial_path.read_text() == "new\n"


@pytest.mark.parametrize(
    ("source", "target", "complaint"),
    [
        ("missing.jsonl", "out.jsonl", "missing.jsonl cannot be read"),
        ("in.jsonl", "no/such/folder.jsonl", "cannot be written"),
        ("in.jsonl", "in.jsonl", "is the input as well"),
        ("in.jsonl", ".", "is a directory and is not overwritten; move it away, or name another output"),
        ("in.jsonl", "x" * 300, "cannot be written"),
    ],
)
def test_files_that_do_not_work_are_refused(tmp_path: Path, source: str, target: str, complaint: str) -> None:
    write_input(tmp_path, [build_line("a")])
    files = open_files(str(tmp_path / source), str(tmp_path / target), force=source == target)
    with pytest.raises(BatchFileError, match=complaint), files:
        pass


def test_standard_streams_that_are_closed_are_missed_only_where_they_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = write_input(tmp_path, [build_line("a")]), tmp_path / "out.jsonl"
    monkeypatch.setattr("sys.stdin", None)
    monkeypatch.setattr("sys.stdout", None)
    with pytest.raises(BatchFileError, match="Standard input is closed"), open_files("-", str(out), force=False):
        pass
    with pytest.raises(BatchFileError, match="Standard output is closed"), open_files(str(path), "-", force=False):
        pass
    with open_files(str(path), str(out), force=False) as (source, target):
        target.write_line(next(iter(source)) or b"")
        target.finish()
    assert out.exists()


@pytest.mark.parametrize("is_forced", [True, False])
@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.partial", "another-name.jsonl"])
def test_whatever_an_output_would_write_is_never_the_input(tmp_path: Path, name: str, is_forced: bool) -> None:
    path = tmp_path / name
    path.write_text("dear\n")
    if name == "another-name.jsonl":
        (tmp_path / "out.jsonl.partial").hardlink_to(path)
    with (
        pytest.raises(BatchFileError, match=r"is the input as well; name another output than .*out\.jsonl"),
        open_files(str(path), str(tmp_path / "out.jsonl"), force=is_forced),
    ):
        pass
    assert path.read_text() == "dear\n"


def test_standard_output_may_not_go_to_the_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_input(tmp_path, [build_line("a")])
    with path.open("a") as out:
        monkeypatch.setattr("sys.stdout", out)
        with pytest.raises(BatchFileError, match="the input's own file"), open_files(str(path), "-", force=True):
            pass


@pytest.mark.parametrize("name", ["folder", "folder.partial", "."])
def test_force_does_not_overwrite_a_folder_and_is_not_advised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir(exist_ok=True)
    with pytest.raises(BatchFileError, match="is a directory and is not overwritten") as caught:
        BatchOutput(name.removesuffix(".partial"), force=True)
    assert "--force" not in str(caught.value)


def test_a_pipe_under_the_partial_name_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "out.jsonl.partial")
    with pytest.raises(BatchFileError, match="is no regular file"):
        BatchOutput(str(tmp_path / "out.jsonl"), force=True)


def test_an_output_that_cannot_be_renamed_is_told_where_it_is(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with BatchOutput(str(out), force=True) as target:
        target.write_line(b"new")
        out.mkdir()
        with pytest.raises(BatchFileError, match=r"out\.jsonl\.partial cannot be renamed"):
            target.finish()


def test_a_full_disk_is_a_sentence_and_not_an_error_of_closing_as_well() -> None:
    with (
        pytest.raises(BatchFileError, match="cannot be written any further"),
        BatchOutput("/dev/full", force=False) as target,
    ):
        target.write_line(b"{}")


def test_a_device_is_written_directly(tmp_path: Path) -> None:
    with BatchOutput("/dev/null", force=False) as target:
        target.write_line(b"{}")
        target.finish()
    assert target.partial_path is None
    assert Path("/dev/null").is_char_device()
