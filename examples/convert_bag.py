"""Turn a robot's recording into a LeRobot dataset: bounded memory, no ROS, every frame accounted.

    python examples/convert_bag.py                 # makes a small recording first
    python examples/convert_bag.py flight.bag      # or takes yours: .bag, .db3, .mcap, a folder

The dataset goes to dataset/ in the current folder. Stop it and start it again: it goes on.
"""

import sys
from pathlib import Path

import penstock
from penstock.lerobot import Dataset
from penstock.samples import write_sample

if len(sys.argv) > 1:
    bags = sys.argv[1]
else:
    bags = "sample.bag"
    if not Path(bags).exists():
        write_sample(bags, seconds=2, width=320, height=240)

report = penstock.convert(bags, "dataset", memory="512MB", resume=True)
print(f"frames: {report.frames_in} in = {report.frames_out} out + {report.dropped or 0} dropped")
print(f"peak memory: {report.peak_bytes / 1e6:.0f} MB, bags that failed: {len(report.failed)}")

dataset = Dataset("dataset")
print(f"dataset: {len(dataset)} episode(s), {dataset.total_frames} frames, {dataset.fps} fps")

episode = dataset.episode(0)
first = next(iter(episode.frames()))  # decodes only what is asked for
for name, value in first.items():
    print(f"  {name:32} {getattr(value, 'shape', value)}")
