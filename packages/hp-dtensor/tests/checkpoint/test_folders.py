"""Folders of checkpoints that go while another job is at work in them."""

import errno
import threading
from pathlib import Path

import pytest

from hp_dtensor.checkpoint import folders

pytestmark = pytest.mark.once


def _finished(root: Path, number: int, num_files: int = 3) -> Path:
    folder = folders.folder_of(root, number)
    folder.mkdir(parents=True)
    for rank in range(num_files):
        (folder / f"rank-{rank:05d}.safetensors").write_bytes(b"x")
    (folder / folders.INDEX).write_text("{}")
    return folder


def test_old_and_unfinished_folders_go_and_the_newest_stay(tmp_path: Path) -> None:
    for number in (1, 2, 3, 5):
        _finished(tmp_path, number)
    folders.folder_of(tmp_path, 4).mkdir()
    folders.folder_of(tmp_path, 6).mkdir()  # another job's, that is under way
    folders.remove_old(folders.folder_of(tmp_path, 5), 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000003", "000005", "000006"]


def test_a_folder_goes_while_another_job_makes_files_in_it(tmp_path: Path) -> None:
    own = _finished(tmp_path, 100)
    for number in range(1, 20):
        old = _finished(tmp_path, number, num_files=200)
        begun, ended = threading.Event(), []

        def write(old: Path = old, begun: threading.Event = begun, ended: list[str] = ended) -> None:
            try:
                for each in range(1_000_000):
                    (old / f"{each}.part").write_bytes(b"y")
                    begun.set()
            except FileNotFoundError as error:
                ended.append(str(error))

        writer = threading.Thread(target=write)
        writer.start()
        assert begun.wait(10)
        folders.remove_old(own, 1)
        writer.join(10)
        assert len(ended) == 1  # it was told that the folder is gone
        assert not old.exists()
    folders.remove_old(own, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["000100"]


def test_what_cannot_be_emptied_goes_the_next_time(tmp_path: Path) -> None:
    own = _finished(tmp_path, 2)
    _finished(tmp_path, 1)

    def busy(folder: Path) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(folder))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folders.shutil, "rmtree", busy)
        folders.remove_old(own, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000001.removed", "000002"]
    assert folders.incomplete(tmp_path) == ()
    folders.remove_old(own, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["000002"]


def test_a_folder_that_is_gone_already_is_fine_and_one_that_may_not_be_removed_is_told(
    tmp_path: Path,
) -> None:
    own = _finished(tmp_path, 2)
    for number, left in ((errno.ENOENT, True), (errno.EACCES, False)):
        _finished(tmp_path, 1)

        def refused(path: Path, target: Path, number: int = number) -> None:
            raise OSError(number, "no", str(path))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "rename", refused)
            if left:
                folders.remove_old(own, 1)
            else:
                with pytest.raises(PermissionError):
                    folders.remove_old(own, 1)
        folders.remove_old(own, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["000002"]
