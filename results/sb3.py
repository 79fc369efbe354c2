"""What stable-baselines3's SAC learns in as many CPU minutes, for the table of results.

    pip install stable-baselines3 dm_control
    python results/sb3.py --task walker_walk --seed 0 --minutes 20

Its default settings, on one core. Writes peers/sac_TASK_SEED/.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import stable_baselines3
import torch
from dm_control import suite
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.monitor import Monitor

REPEAT = 2


class Task(gymnasium.Env[Any, Any]):
    """A dm_control task from states, each action repeated."""

    def __init__(self, name: str, seed: int) -> None:
        domain, _, task = name.partition("_")
        self._env = suite.load(domain, task, task_kwargs={"random": seed})
        bounds = self._env.action_spec()
        self.action_space = gymnasium.spaces.Box(
            np.float32(bounds.minimum), np.float32(bounds.maximum), dtype=np.float32
        )
        self.observation_space = gymnasium.spaces.Box(
            -np.inf, np.inf, self._flat(self._env.reset()).shape
        )

    def _flat(self, step: Any) -> Any:
        return np.concatenate([np.ravel(x) for x in step.observation.values()]).astype(np.float32)

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        return self._flat(self._env.reset()), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = 0.0
        for _ in range(REPEAT):
            step = self._env.step(action)
            reward += step.reward or 0.0
            if step.last():
                break
        return self._flat(step), reward, step.last() and step.discount == 0, step.last(), {}


class Until(BaseCallback):
    """Notes the score of every episode, until the CPU time is used up."""

    def __init__(self, minutes: float) -> None:
        super().__init__()
        self.scores: list[dict[str, float]] = []
        self._end = time.process_time() + 60 * minutes

    def _on_step(self) -> bool:
        for info in self.locals["infos"]:
            if "episode" in info:
                score = {"step": self.num_timesteps, "episode/score": float(info["episode"]["r"])}
                self.scores.append(score)
        return time.process_time() < self._end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--task", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=20.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    until = Until(args.minutes)
    model = stable_baselines3.SAC("MlpPolicy", Monitor(Task(args.task, args.seed)), seed=args.seed)
    model.learn(10**9, until)
    folder = Path(__file__).parent / "peers" / f"sac_{args.task}_{args.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(score) + "\n" for score in until.scores]
    (folder / "scores.jsonl").write_text("".join(lines))
    about = {
        "group": "proprio",
        "task": f"dmc:{args.task}",
        "program": "SAC, equal CPU minutes",
        "name": f"SAC of stable-baselines3 {stable_baselines3.__version__}",
        "seed": args.seed,
        "steps": model.num_timesteps,
        "cpu_minutes": time.process_time() / 60,
        "command": shlex.join(["python", "results/sb3.py", *sys.argv[1:]]),
    }
    (folder / "peer.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
