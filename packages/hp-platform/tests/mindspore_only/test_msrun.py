"""MindSpore's own launcher, whose scheduler runs the program as well."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hp_platform.launch._ports import reserve_ports

PROGRAM = """
import hp_platform
from hp_platform import collectives

platform = hp_platform.get_platform()
hp_platform.init_process_group()
rank = hp_platform.get_rank()
total = collectives.all_reduce(platform.full((2,), rank + 1.0))
if rank == 0:
    collectives.send(total, 1)
else:
    total = collectives.recv(platform.zeros((2,)), 0)
print("rank", rank, "has", platform.to_numpy(total).tolist(), flush=True)
hp_platform.destroy_process_group()
"""


def test_a_program_runs_under_msrun(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    logs = tmp_path / "logs"
    command = [
        *(sys.executable, "-m", "mindspore.parallel.cluster.run", "--worker_num=2", "--local_worker_num=2"),
        *("--cluster_time_out=60", f"--log_dir={logs}", "--join=True"),
    ]
    paths = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    env = {
        **os.environ,
        "GLOG_v": "3",
        "HYPER_PARALLEL_PLATFORM": "mindspore",
        "PATH": os.pathsep.join(paths),
    }
    with reserve_ports() as ports:
        port = f"--master_port={ports.first}"
        done = subprocess.run(
            [*command, port, str(program)], env=env, capture_output=True, text=True, timeout=120, check=False
        )
    written = {path.name: path.read_text() for path in sorted(logs.glob("*.log"))}
    assert done.returncode == 0, (done.stderr[-2000:], written)
    for rank in range(2):
        assert f"rank {rank} has [3.0, 3.0]" in written[f"worker_{rank}.log"]
    assert "rank" not in written["scheduler.log"].replace("rank_id", "")
