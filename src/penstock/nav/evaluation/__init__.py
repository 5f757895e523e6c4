"""Crossings of unseen worlds, deterministic, and what they say.

crossing.py    pilots, and fly: crossings of worlds -> Flights
table.py       rates with intervals over worlds; the ablation table
picture.py     the flights from above, as PNG, and what was in those worlds
rerun_file.py  the flights as a file for the rerun viewer
pilot.py       Navigator: a checkpoint that flies; for deployment, too
evaluate.py    all of it on one run: `penstock evaluate`
"""
