"""Two processes under torchrun: rank 0 saves, a second writer and sharded states are refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from penstock.checkpoints.load import load_checkpoint

pytest.importorskip("torch", "2.5")  # older ones shard otherwise

WORKER = """
import os
import sys
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from penstock import AsyncCheckpointSaver
from penstock.errors import LockHeld, UnsupportedValue

def say(*words):
    # In one call: two processes write here.
    os.write(1, (" ".join(map(str, words)) + chr(10)).encode())

folder = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)

net = DistributedDataParallel(torch.nn.Linear(4, 4))
net(torch.randn(2, 4)).sum().backward()
saver = AsyncCheckpointSaver(f"{folder}/ddp")
if rank == 0:  # rank 0 saves ...
    saver.save_async({"model": net.module.state_dict()}, "a.pt").wait()
dist.barrier()
if rank == 1:  # ... and a second writer is refused
    try:
        saver.save_async({}, "b.pt")
    except LockHeld as error:
        say("refused:", error)
dist.barrier()
own = AsyncCheckpointSaver(f"{folder}/rank{rank}")  # or each has its own folder
own.save_async({"rank": rank, "model": net.module.state_dict()}, "a.pt")

torch.manual_seed(0)
sharded = torch.nn.Linear(4, 4)
whole = {name: tensor.clone() for name, tensor in sharded.state_dict().items()}
fully_shard(sharded)
try:
    own.save_async({"model": sharded.state_dict()}, "b.pt")
except UnsupportedValue as error:
    say("sharded:", error)
options = StateDictOptions(full_state_dict=True, cpu_offload=True)
full = get_model_state_dict(sharded, options=options)
if rank == 0:
    assert all(torch.equal(full[name], whole[name]) for name in whole)
    own.save_async({"model": full}, "full.pt")
own.shutdown()
saver.shutdown()
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # all is saved; threads of gloo sometimes abort such an exit
"""


def test_ddp_and_sharded_states(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    source = str(Path(__file__).parents[2] / "src")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run(
        [*launch, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": source},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    said = result.stdout.splitlines()
    (refused,) = (line for line in said if line.startswith("refused"))
    assert "ddp is being written by" in refused
    sharded = [line for line in said if line.startswith("sharded")]
    assert len(sharded) == 2
    assert all("model.weight is a torch.distributed.tensor" in line for line in sharded)
    assert load_checkpoint(tmp_path / "ddp").keys() == {"model"}
    ranks = [load_checkpoint(tmp_path / f"rank{rank}/a.pt") for rank in range(2)]
    assert [state["rank"] for state in ranks] == [0, 1]
    assert torch.equal(ranks[0]["model"]["weight"], ranks[1]["model"]["weight"])
    assert load_checkpoint(tmp_path / "rank0/full.pt")["model"]["weight"].shape == (4, 4)
