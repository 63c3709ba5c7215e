"""torch's own launcher: the ranks meet at its store, and the world comes of its variables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
import hp_platform
from hp_platform import collectives

platform = hp_platform.get_platform()
hp_platform.init_process_group("gloo", device_id="cpu")
rank = hp_platform.get_rank()
total = collectives.all_reduce(platform.full((2,), rank + 1.0))
alone = hp_platform.split_group(split_ranks=[[0], [1]])
sys.stdout.write(f"rank {rank} has {platform.to_numpy(total).tolist()}, alone {alone.ranks}\\n")
hp_platform.destroy_process_group()
"""


def test_a_program_runs_under_torchrun(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        str(program),
    ]
    env = {**os.environ, "HYPER_PARALLEL_PLATFORM": "torch", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        assert f"rank {rank} has [3.0, 3.0], alone ({rank},)" in done.stdout
