"""Keep a million pictures in memory: a replay buffer of episodes, compressed where it pays.

Run: python examples/replay_buffer.py
"""

import numpy as np

from penstock import DictReplayBuffer

random = np.random.default_rng(0)
y, x = np.mgrid[:84, :84]


def fly(steps: int) -> dict[str, np.ndarray]:
    """Make one episode: depth pictures of a wall with a post in front, and what was done."""
    post = random.uniform(10, 74) + np.arange(steps)[:, None, None] * 0.3
    wall = 120 + 0.8 * y - 0.2 * x
    pixels = np.where(abs(x - post) < 6, 60, wall[None]).astype(np.uint8)
    action = random.normal(size=(steps, 2)).astype(np.float32)
    done = np.arange(steps) == steps - 1
    return {"pixels": pixels, "action": action, "reward": action[:, 0], "done": done}


keys = ["pixels", "action", "reward", "done"]
buffer = DictReplayBuffer(1_000_000, keys, img_compressed=True, next_keys=["pixels"], seed=0)
for _ in range(20):
    buffer.add(fly(steps=200))
raw = len(buffer) * 84 * 84
print(f"{len(buffer)} pictures: {raw / 1e6:.1f} MB, held in {buffer.nbytes / 1e6:.1f} MB")
print("codecs:", buffer.codecs)

batch = buffer.sample(256, n_step=3, gamma=0.99)  # rewards summed, the picture 3 steps ahead
print("n-step :", tuple(batch["next"]["pixels"].shape), f"discount {batch['discount'].max():.3f}")
windows = buffer.sample(32, sequence=16)  # never across the end of an episode
print("windows:", tuple(windows["pixels"].shape))
buffer.save("replay")  # a second save writes only what is new
print("loaded :", len(DictReplayBuffer.load("replay")), "frames")
