"""Train a navigation policy for a moment, stop, go on, and let it fly behind the shield.

    python examples/train_navigation.py            # the first time compiles for half a minute

The command does the same: penstock train name=x env.num_envs=1024 …; penstock train --resume runs/x
"""

import json
from pathlib import Path

from penstock.cli import main
from penstock.nav.evaluation.pilot import Navigator
from penstock.nav.simulation.env import NavigationEnv

RUN = Path("runs/example")
SETTINGS = """name=example env.num_envs=64 env.num_obstacles=100 env_dyn.num_obstacles=16 env.maps=2
              algo.training_frame_num=16 algo.minibatches=4 eval_interval=0 processes=1
              tensorboard=False wandb.mode=disabled"""

if not RUN.exists():
    main(["train", *SETTINGS.split(), "max_iterations=2"])
done = json.loads((RUN / "metrics.jsonl").read_text().splitlines()[-1])["step"]
main(["train", f"resume={RUN}", f"max_iterations={done + 2}"])  # bit for bit as if never stopped

rows = [json.loads(line) for line in (RUN / "metrics.jsonl").read_text().splitlines()]
print(f"{rows[-1]['step']} iterations, {rows[-1]['perf/frames_per_s']:,.0f} frames/s")

navigator = Navigator.load(RUN, shield="on")
env = NavigationEnv(navigator.settings, num_envs=16, maps=1, map_seed=7, action="velocity")
data = env.reset()
for _ in range(40):
    seen = data["agents", "observation"]
    height = data["info", "drone_state"][:, 0, 2]  # above the ground: the shield keeps off it
    data["agents", "action"] = navigator.velocity(seen, height)  # m/s, in the frame of the world
    data = env.step_mdp(env.step(data))
print(f"the shield changed {navigator.interventions} of {navigator.decisions} velocities")
env.close()
