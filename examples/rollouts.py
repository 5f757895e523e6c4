"""Keep rollouts on disk, several times smaller, and read back only the part you want.

Run: python examples/rollouts.py
"""

import time
from pathlib import Path

from penstock import RolloutStorage
from penstock.nav.simulation.env import NavigationEnv

LIDAR = ("agents", "observation", "lidar")
env = NavigationEnv(num_envs=256, num_obstacles=200, dynamic_obstacles=16, maps=4)
data = env.rollout(32, break_when_any_done=False)  # [256 drones, 32 steps], nested keys
env.close()

storage = RolloutStorage("rollouts", keep_last=10)
path = storage.save(data, iteration=100)  # durable when it returns; background=True does not wait
raw, stored = data.bytes(), Path(path).stat().st_size
print(f"saved {raw / 1e6:.1f} MB in {stored / 1e6:.1f} MB: {raw / stored:.1f} times smaller")

whole = storage.load(100)
assert (whole == data).all()  # lossless, and every byte was verified

started = time.perf_counter()
part = storage.load(100, keys=[LIDAR], envs=slice(0, 4), steps=-1)  # four drones, the last step
print(f"a part: {tuple(part[LIDAR].shape)} in {1e3 * (time.perf_counter() - started):.1f} ms")

for iteration, rewards in storage.iterate(keys=[("next", "agents", "reward")]):
    print(f"iteration {iteration}: mean reward {rewards['next', 'agents', 'reward'].mean():.3f}")
