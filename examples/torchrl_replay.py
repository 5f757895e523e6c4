"""Put compressed storage under a TorchRL replay buffer: one argument, nothing else changes.

Run: python examples/torchrl_replay.py
"""

from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer

from penstock import CompressedStorage
from penstock.nav.simulation.env import NavigationEnv

FRAMES, LIDAR = 6400, ("agents", "observation", "lidar")
env = NavigationEnv(num_envs=32, num_obstacles=100, dynamic_obstacles=16, maps=2)
collector = Collector(env, frames_per_batch=32 * 50, total_frames=FRAMES)  # random actions

compressed = CompressedStorage(FRAMES)
buffer = TensorDictReplayBuffer(storage=compressed, batch_size=256)
plain = TensorDictReplayBuffer(storage=LazyTensorStorage(FRAMES), batch_size=256)
for data in collector:  # [32 drones, 50 steps]
    frames = data.reshape(-1)
    buffer.extend(frames)
    plain.extend(frames)
collector.shutdown()

raw, held = plain[:].bytes(), compressed.nbytes
print(f"{len(buffer)} frames: {raw / 1e6:.1f} MB plain, {held / 1e6:.1f} MB compressed")
assert (buffer[:][LIDAR] == plain[:][LIDAR]).all()  # lossless
print("a batch:", tuple(buffer.sample()[LIDAR].shape))

slices = SliceSampler(slice_len=16, traj_key=("collector", "traj_ids"), strict_length=False)
buffer = TensorDictReplayBuffer(storage=compressed, sampler=slices, batch_size=256)
print("slices of up to 16 steps:", tuple(buffer.sample()[LIDAR].shape))
