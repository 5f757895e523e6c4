"""NavRL's training script as a stand-in: the same calls in the same order, without Isaac Sim.

The lines around those that the patch of docs/navrl.md changes are upstream's own
(Zhefan-Xu/NavRL, MIT), so that the patch applies to both; the rest is shortened.
"""

import os
import hydra
import datetime
import wandb
import torch
from omni.isaac.kit import SimulationApp
from ppo import PPO
from omni_drones.utils.torchrl import SyncDataCollector, EpisodeStats
from torchrl.envs.transforms import TransformedEnv, Compose
from utils import evaluate
from torchrl.envs.utils import ExplorationType


FILE_PATH = os.path.join(os.path.dirname(os.path.dirname(__file__)), "cfg")
@hydra.main(config_path=FILE_PATH, config_name="train", version_base=None)
def main(cfg):
    sim_app = SimulationApp({"headless": cfg.headless, "anti_aliasing": 1})
    started = datetime.datetime.now().strftime("%m-%d_%H-%M")
    run = wandb.init(project=cfg.wandb.project, name=f"{cfg.wandb.name}/{started}", config=cfg)

    from env import NavigationEnv
    env = NavigationEnv(cfg)
    transformed_env = TransformedEnv(env, Compose()).train()
    transformed_env.set_seed(cfg.seed)
    # PPO Policy
    policy = PPO(cfg.algo, transformed_env.observation_spec, transformed_env.action_spec, cfg.device)

    # Episode Stats Collector
    episode_stats_keys = [
        k for k in transformed_env.observation_spec.keys(True, True)
        if isinstance(k, tuple) and k[0]=="stats"
    ]
    episode_stats = EpisodeStats(episode_stats_keys)

    # RL Data Collector
    collector = SyncDataCollector(
        transformed_env,
        policy=policy,
        frames_per_batch=cfg.env.num_envs * cfg.algo.training_frame_num,
        total_frames=cfg.max_frame_num,
        device=cfg.device,
        return_same_td=True,
        exploration_type=ExplorationType.RANDOM,
    )

    # Training Loop
    for i, data in enumerate(collector):
        # print("data: ", data)
        # print("============================")
        # Log Info
        info = {"env_frames": collector._frames, "rollout_fps": collector._fps}

        # Train Policy
        train_loss_stats = policy.train(data)
        info.update(train_loss_stats) # log training loss info

        # Calculate and log training episode stats
        episode_stats.add(data)
        if len(episode_stats) >= transformed_env.num_envs:
            stats = {"train/" + ".".join(k): torch.mean(v.float()).item() for k, v in episode_stats.pop()}
            info.update(stats)

        # Evaluate policy and log info
        if i % cfg.eval_interval == 0:
            env.enable_render(True)
            env.eval()
            info.update(evaluate(env=transformed_env, policy=policy, seed=cfg.seed, cfg=cfg))
            env.enable_render(not cfg.headless)
            env.train()
            env.reset()

        # Update wand info
        run.log(info)


        # Save Model
        if i % cfg.save_interval == 0:
            ckpt_path = os.path.join(run.dir, f"checkpoint_{i}.pt")
            torch.save(policy.state_dict(), ckpt_path)
            print("[NavRL]: model saved at training step: ", i)

    ckpt_path = os.path.join(run.dir, "checkpoint_final.pt")
    torch.save(policy.state_dict(), ckpt_path)
    wandb.finish()
    sim_app.close()

if __name__ == "__main__":
    main()
