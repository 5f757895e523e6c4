"""Convert a Kuavo's recordings with the robot's own settings file, unchanged.

    python examples/convert_kuavo.py

Makes a recording with a gripper and a depth camera in bags/, and a settings file like the robot's.
What each setting means is in docs/kuavo.md.
"""

from pathlib import Path

import penstock
from penstock.lerobot import Dataset
from penstock.samples import write_sample

SETTINGS = """\
rosbag:
  chunk_size: 1000
dataset:
  eef_type: leju_claw
  which_arm: right
  train_hz: 10
  use_depth: true
  depth_range: [0, 1500]
  resize: {width: 320, height: 240}
"""
if not Path("bags").exists():
    Path("bags").mkdir()
    write_sample("bags/take_1.bag", seconds=2, width=320, height=240, eef="leju_claw", depth=True)
Path("KuavoRosbag2Lerobot.yaml").write_text(SETTINGS)

words = ["dataset.train_hz=20"]  # on the command line: the same key=value words, behind the paths
report = penstock.convert(
    "bags", "kuavo", config="KuavoRosbag2Lerobot.yaml", overrides=words, resume=True
)
dataset = Dataset("kuavo")
print(f"{dataset.total_frames} frames at {dataset.fps} Hz, {report.dropped or 'none'} dropped")
for name, feature in dataset.features.items():
    print(f"  {name:32} {feature.dtype:8} {list(feature.shape)}")
