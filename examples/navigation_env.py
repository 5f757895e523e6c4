"""Fly drones through a field of obstacles: NavRL's task as a TorchRL environment, on a CPU.

Run: python examples/navigation_env.py
"""

import time

from tensordict import TensorDictBase

from penstock.nav.simulation.env import NavigationEnv

DRONES, STEPS = 256, 60
env = NavigationEnv(num_envs=DRONES, num_obstacles=350, dynamic_obstacles=80, maps=4, seed=1)


def straight(data: TensorDictBase) -> TensorDictBase:
    """Fly at the target at full speed, whatever is in the way."""
    towards = data["agents", "observation", "state"][..., :3]  # a unit vector, in the goal frame
    data["agents", "action_normalized"] = 0.5 + 0.5 * towards
    return data


env.rollout(2, straight)  # compiles the simulator, the first time ever
started = time.perf_counter()
data = env.rollout(STEPS, straight, break_when_any_done=False)  # who crashes starts again
seconds = time.perf_counter() - started
print(f"{DRONES * STEPS / seconds:,.0f} decisions/s through TorchRL")

crashed = (data["next", "stats", "collision"] > 0).any(1)  # of [drones, steps, 1]
print(f"straight ahead for {0.096 * STEPS:.1f} s: {crashed.float().mean():.0%} crash")
reward = data["next", "agents", "reward"]
print(f"mean reward {reward.mean():.2f}, keys: {sorted(data['agents', 'observation'].keys())}")
env.close()
