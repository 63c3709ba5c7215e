"""A writer may be killed at any moment: the previous or the new checkpoint loads whole, and the half one is told apart."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hp_dtensor import async_save, load, save
from hp_dtensor.checkpoint import folders
from hp_platform.testing import World, distributed


@pytest.mark.once
@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="the writers are forked, which MindSpore does not survive",
)
def test_whatever_moment_a_writer_is_killed_at_a_whole_checkpoint_is_the_newest(tmp_path: Path) -> None:
    seed = str(time.time_ns())
    script = Path(__file__).with_name("killed_writers.py")
    environment = {**os.environ, "HYPER_PARALLEL_PLATFORM": "torch", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), seed],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, f"seed {seed}: {done.stderr}"
    told = json.loads(done.stdout)
    assert told["random"]["previous"] + told["random"].get("new", 0) == 20
    assert told["random"]["incomplete"] > 0, "no writer was killed half-way"
    # Only two steps come after the pointer's renaming, which makes the new one count: its folder is opened and flushed.
    assert told["steps"]["new"] == 2
    assert told["steps"]["previous"] >= 10
    assert sum(told["ranks"].values()) == 8


@distributed(world_size=1)
def test_the_half_checkpoint_is_recognised_and_named(tmp_path: Path, world: World) -> None:
    state = {"w": world.platform.zeros((3,), "float32", world.device)}
    save(state, tmp_path)
    half = save(state, tmp_path)
    (half / folders.INDEX).unlink()
    (tmp_path / folders.POINTER).write_text("000001\n")
    report = load(state, tmp_path)
    assert (report.folder, report.incomplete) == (str(tmp_path / "000001"), ("000002",))
    with pytest.raises(
        ValueError, match=r"000002 is incomplete: it has no index.json.*complete there: 000001"
    ):
        load(state, half)
    assert save(state, tmp_path).name == "000003"


@distributed(world_size=1)
def test_a_program_that_ends_finishes_its_save_first(tmp_path: Path, world: World) -> None:
    # In a process of its own, whose last statement is the save.
    script = (
        "import sys, numpy\n"
        "from hp_platform import get_platform\n"
        "from hp_dtensor import async_save\n"
        "async_save({'w': get_platform().zeros((1 << 16,), 'float32', 'cpu'), 'n': 3}, sys.argv[1])\n"
    )
    environment = {**os.environ, "HYPER_PARALLEL_PLATFORM": world.platform.platform_type.value}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        environment.pop(name, None)
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=environment, check=True, timeout=50)
    assert load(tmp_path)["n"] == 3
    assert async_save({}, tmp_path).wait().name == "000002"
