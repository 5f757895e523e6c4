"""Ask whether to compress: measured on your own data, on this machine. It may well say no.

    python examples/advise.py

For files, the command does the same: penstock advise runs/x/rollouts --memory 2GB
"""

import numpy as np

import penstock

random = np.random.default_rng(0)
steps = 5_000
lidar = np.maximum(0, random.normal(-1, 1, (steps, 36))).astype(np.float32)  # 5 of 6 see nothing
data = {
    "noise": {"features": random.normal(size=(steps, 128)).astype(np.float32)},
    "lidar": {"lidar": np.repeat(lidar, 8, axis=1), "action": lidar[:, :3]},
}
questions = [
    ("noise", {"bandwidth": "100Mb/s"}),  # sent to another machine
    ("lidar", {"bandwidth": "100Mb/s"}),
    ("lidar", {"memory": "2MB"}),  # more than there is room for
    ("lidar", {}),  # in memory, and there is room
]
for name, limits in questions:
    advice = penstock.advise(data[name], seconds=0.3, **limits)
    found = advice.to_json()
    print(f"{name}, {limits or 'no limits'}: {found['verdict']}, ratio {found['ratio']:.2f}")
    print(f"    {found['why'][1]}")

print("\nthe last one in full:\n")
print(advice.text())
