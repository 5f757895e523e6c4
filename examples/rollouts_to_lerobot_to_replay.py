"""Let rollouts become a LeRobot dataset, and a dataset a replay buffer: exact both ways.

    python examples/rollouts_to_lerobot_to_replay.py

The command for the first half: penstock export runs/x/rollouts flights
"""

import torch

from penstock import DictReplayBuffer, RolloutStorage, export
from penstock.lerobot import Dataset
from penstock.nav.simulation.env import NavigationEnv

env = NavigationEnv(num_envs=16, num_obstacles=100, dynamic_obstacles=8, maps=1)
data = env.rollout(40, break_when_any_done=False)  # [16 drones, 40 steps]
env.close()

RolloutStorage("rollouts").save(data, iteration=1)
report = export("rollouts", "flights", fps=10, task="fly to the target", mode="overwrite")
print(f"{report.frames} frames became {report.episodes} episodes, cut where a flight ended")

dataset = Dataset("flights")
print("features:", ", ".join(name for name in dataset.features if "." in name))

names = {"observation.state": "state", "observation.lidar": "lidar"}
buffer = DictReplayBuffer.from_lerobot("flights", [*names, "action"], rename=names, seed=0)
print(f"{len(buffer)} frames in a buffer of {buffer.nbytes / 1e3:.0f} kB")

frames = buffer.get(range(len(buffer)))  # drone after drone, as in the rollouts
state = data["agents", "observation", "state"].flatten(0, 1)
print("equal, bit for bit:", torch.equal(frames["state"], state))
batch = buffer.sample(64, sequence=4)
print("a batch of sequences:", tuple(batch["lidar"].shape))
