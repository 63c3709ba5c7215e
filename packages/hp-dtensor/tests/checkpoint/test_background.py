"""Saves in the background: what is staged, waited for and told."""

import threading
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import Shard, async_save, distribute_tensor, load, save
from hp_dtensor.checkpoint import folders, rendezvous, safetensors_file, sources
from hp_platform import collectives, init_device_mesh
from hp_platform.testing import World, count_collectives, distributed


def _sharded(world: World, value: float) -> Any:
    mesh = init_device_mesh(world.device_type, (world.size,))
    return distribute_tensor(world.platform.full((5, 3), value, "float32", world.device), mesh, [Shard(0)])


def _first(path: Path) -> float:
    return float(load(path)["w"][0, 0])


class _Gate:
    """Files are written when it opens."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.opened, write = threading.Event(), safetensors_file.write

        def delayed(*args: Any, **kwargs: Any) -> None:
            assert self.opened.wait(30)
            write(*args, **kwargs)

        patch.setattr(safetensors_file, "write", delayed)


@distributed(world_size=(1, 2))
def test_a_change_right_after_it_returns_is_not_in_the_file(tmp_path: Path, world: World) -> None:
    platform, x = world.platform, _sharded(world, 1.0)
    plain = platform.full((3,), 1.0, "float32", world.device)
    state = {"w": x, "plain": plain, "step": 1}
    with pytest.MonkeyPatch.context() as patch:
        gate = _Gate(patch)
        handle = async_save(state, tmp_path)
        platform.add_(x.to_local(), 1.0)
        platform.fill_(plain, 5.0)
        state["step"] = 2
        assert not handle.done()
        assert "writing" in repr(handle)
        # Training goes on meanwhile, with collectives of its own.
        ones = platform.full((2,), 1.0, "float32", world.device)
        assert platform.to_numpy(collectives.all_reduce(ones)).tolist() == [world.size] * 2
        with pytest.raises(TimeoutError, match="has not ended after 0.01 s; it goes on"):
            handle.result(timeout=0.01)
        gate.opened.set()
        assert handle.wait() == handle.result(0) == handle.folder == tmp_path / "000001"
    assert handle.done()
    back = load(tmp_path)
    assert platform.to_numpy(back["w"]).tolist() == [[1.0] * 3] * 5
    assert platform.to_numpy(back["plain"]).tolist() == [1.0] * 3
    assert back["step"] == 1


@distributed(world_size=(1, 2))
def test_the_next_save_and_load_wait_for_the_one_that_runs(tmp_path: Path, world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        gate = _Gate(patch)
        first = async_save({"w": _sharded(world, 1.0)}, tmp_path)
        threading.Timer(0.2, gate.opened.set).start()
        with count_collectives() as counted:
            second = async_save({"w": _sharded(world, 2.0)}, tmp_path)
        counted.assert_counts(all_gather=int(world.size > 1))
        assert first.done()
    assert _first(tmp_path) == 2.0  # load has waited for the second
    assert second.done()
    async_save({"w": _sharded(world, 3.0)}, tmp_path)
    assert save({"w": _sharded(world, 4.0)}, tmp_path).name == "000004"
    assert _first(tmp_path) == 4.0


@distributed(world_size=(1, 2))
def test_an_error_of_the_writing_is_raised_on_every_rank_and_the_previous_checkpoint_stays(
    tmp_path: Path, world: World
) -> None:
    save({"w": _sharded(world, 1.0)}, tmp_path)
    last = world.size - 1

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    for how in (save, async_save):
        with pytest.MonkeyPatch.context() as patch:
            if world.rank == last:
                patch.setattr(safetensors_file, "write", full)
            mine = (
                (OSError, "No space left")
                if world.rank == last
                else (RuntimeError, f"rank-0000{last} could not save")
            )
            if how is async_save:
                handle = async_save({"w": _sharded(world, 2.0)}, tmp_path)
                with pytest.raises(mine[0], match=mine[1]):
                    handle.wait()
                assert handle.done() and "failed" in repr(handle)
            else:
                with pytest.raises(mine[0], match=mine[1]):
                    save({"w": _sharded(world, 2.0)}, tmp_path)
        assert _first(tmp_path) == 1.0
    # The error belongs to its handle: later saves work, and tell the unfinished ones apart.
    save({"w": _sharded(world, 3.0)}, tmp_path)
    report = load({"w": _sharded(world, 0.0)}, tmp_path)
    assert report.incomplete == ("000002", "000003")
    assert "2 incomplete: 000002, 000003" in str(report)
    assert _first(tmp_path) == 3.0


@distributed(world_size=2)
def test_a_copy_that_does_not_fit_is_told_to_the_other_ranks(tmp_path: Path, world: World) -> None:
    def too_large(*args: Any) -> None:
        raise MemoryError("no room for the copies")

    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(sources, "staged", too_large)
            with pytest.raises(MemoryError, match="no room for the copies"):
                async_save({"w": _sharded(world, 1.0)}, tmp_path)
        else:
            with pytest.raises(RuntimeError, match="rank-00001 could not save .*MemoryError: no room"):
                async_save({"w": _sharded(world, 1.0)}, tmp_path).wait()
    collectives.barrier()
    save({"w": _sharded(world, 2.0)}, tmp_path)
    assert _first(tmp_path) == 2.0


@distributed(world_size=1)
def test_the_first_error_is_raised_where_not_even_that_can_be_written(tmp_path: Path, world: World) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    def damaged(*args: Any, **kwargs: Any) -> None:
        raise OSError(5, "Input/output error")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors_file, "write", damaged)
        patch.setattr(folders, "put_text", full)
        with pytest.raises(OSError, match="Input/output error"):
            save({"w": _sharded(world, 1.0)}, tmp_path)


@distributed(world_size=2)
def test_another_job_may_save_a_later_one_beside_it(tmp_path: Path, world: World) -> None:
    """The other job's checkpoint is complete before any rank has looked at the pointer; it stays the newest."""
    put_text = folders.put_text

    def after_another_job(path: Path, text: str) -> None:
        if path.name == folders.INDEX:
            later = tmp_path / "000007"
            later.mkdir()
            put_text(later / folders.INDEX, text)
            put_text(tmp_path / folders.POINTER, later.name)
        put_text(path, text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folders, "put_text", after_another_job)
        folder = save({"w": _sharded(world, 1.0)}, tmp_path, keep=1, timeout=20)
    assert folder == tmp_path / "000001"
    assert (tmp_path / folders.POINTER).read_text() == "000007"
    assert _first(folder) == 1.0
    collectives.barrier()
    assert save({"w": _sharded(world, 2.0)}, tmp_path).name == "000008"
    assert _first(tmp_path) == 2.0


@distributed(world_size=2)
def test_a_folder_that_another_job_removes_ends_the_save(tmp_path: Path, world: World) -> None:
    def removed(*args: Any, **kwargs: Any) -> None:
        folders.remove_old(tmp_path / "000009", 1)
        raise OSError("the file is gone")

    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 0:
            patch.setattr(safetensors_file, "write", removed)
            with pytest.raises(OSError, match="the file is gone"):
                save({"w": _sharded(world, 1.0)}, tmp_path, timeout=20)
        else:
            with pytest.raises(
                (RuntimeError, OSError), match="was removed while it was written|No such file"
            ):
                save({"w": _sharded(world, 1.0)}, tmp_path, timeout=20)
    collectives.barrier()


@distributed(world_size=2)
def test_a_rank_that_never_comes_is_named_after_the_time_limit(tmp_path: Path, world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        gate = _Gate(patch)
        handle = async_save({"w": _sharded(world, 1.0)}, tmp_path, timeout=0.3)
        if world.rank == 0:
            gate.opened.set()
            with pytest.raises(
                RuntimeError, match=r"waited 0 s for .*rank-00001.safetensors: that rank is gone or slow"
            ):
                handle.wait()
        else:
            threading.Timer(0.8, gate.opened.set).start()
            with pytest.raises(RuntimeError, match="rank-00000 could not save"):
                handle.wait()
    with pytest.raises(ValueError, match="complete there: none; incomplete: 000001"):
        load(tmp_path)


@distributed(world_size=(1, 2))
def test_old_checkpoints_go_when_asked_and_the_newest_never(tmp_path: Path, world: World) -> None:
    for value in (1.0, 2.0, 3.0):
        save({"w": _sharded(world, value)}, tmp_path)
    if world.rank == 0:
        (tmp_path / "000002" / folders.INDEX).unlink()  # as a killed save left it
        (tmp_path / "notes").mkdir()
    collectives.barrier()
    async_save({"w": _sharded(world, 4.0)}, tmp_path, keep=2).wait()
    collectives.barrier()
    if world.rank == 0:
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["000003", "000004", "latest", "notes"]
    collectives.barrier()
    save({"w": _sharded(world, 5.0)}, tmp_path, keep=1)
    collectives.barrier()
    if world.rank == 0:
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["000005", "latest", "notes"]
    assert _first(tmp_path) == 5.0


@pytest.mark.once
def test_a_thread_does_not_wait_long_when_its_program_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Thread()
    monkeypatch.setattr(threading, "main_thread", lambda: ended)
    monkeypatch.setattr(rendezvous, "GRACE_SECONDS", 0.05)
    with pytest.raises(RuntimeError, match="waited 0 s for a file"):
        rendezvous.wait_until(lambda: ["a file"], tmp_path, 1000.0)
