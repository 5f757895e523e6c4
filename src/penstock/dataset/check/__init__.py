"""Check a LeRobot dataset: every file, every row, every frame; v3.0 and v2.1, ours and lerobot's.

An error means that the data cannot be trusted or that lerobot cannot read them; a warning means
that they can be used, knowing this. Memory does not grow with the length of the episodes.
"""

from penstock.dataset.check.dataset import check
from penstock.dataset.check.findings import Checkup, Finding

__all__ = ["Checkup", "Finding", "check"]
