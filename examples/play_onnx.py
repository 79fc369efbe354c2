"""Play a Gymnasium environment with an exported policy, without this package.

dreamfleet export runs/gym-CartPole-v1
python examples/play_onnx.py runs/gym-CartPole-v1/export --env CartPole-v1
"""

import argparse

import gymnasium
import numpy as np
from run_onnx import OnnxPolicy


def play(policy, env, seed):
    """The score of an episode."""
    (obs, _), done, score = env.reset(seed=seed), False, 0.0
    policy.reset()
    while not done:
        action = policy({"vector": obs[None]})["action"][0]
        obs, reward, terminated, truncated, _ = env.step(action)
        done, score = terminated or truncated, score + float(reward)
    return score


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--episodes", type=int, default=20)
    args = parser.parse_args()
    policy, env = OnnxPolicy(args.folder), gymnasium.make(args.env)
    scores = [play(policy, env, seed) for seed in range(args.episodes)]
    print(f"{args.env}: mean score {np.mean(scores):.1f} of {len(scores)} episodes")
