"""Run an exported policy with numpy and onnxruntime alone.

    dreamfleet export runs/gym-CartPole-v1
    python examples/run_onnx.py runs/gym-CartPole-v1/export

Replace `read_sensors` and `send` with your robot. Everything else is the loop that it needs: one
call of the policy at a fixed rate, the state kept between calls, and a reset when an episode ends.
"""

import argparse
import hashlib
import json
import time
from pathlib import Path

import numpy as np
import onnxruntime


class OnnxPolicy:
    """An exported policy with the state of its episodes, a row for each."""

    def __init__(self, folder, rows=1, seed=0):
        self.contract = json.loads((Path(folder) / "policy.json").read_text())
        data = (Path(folder) / self.contract["file"]).read_bytes()
        if hashlib.sha256(data).hexdigest() != self.contract["sha256"][self.contract["file"]]:
            raise ValueError(f"{self.contract['file']} in {folder} is damaged: export it again.")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1  # a call is too short for more
        self._session = onnxruntime.InferenceSession(data, options)
        self._inputs = {each["name"]: each for each in self.contract["inputs"]}
        self._rows, self._rng = rows, np.random.default_rng(seed)
        self.reset()

    def reset(self):
        """Start new episodes in all rows."""
        self._state = {name: self._zeros(name) for name in self._inputs if name[:6] == "state."}
        self._first = np.ones(self._rows, bool)

    def restart(self, done):
        """Start a new episode in the rows where `done` is true."""
        self._first |= np.asarray(done, bool)

    def __call__(self, obs):
        """Actions by key for observations by key, [rows, ...] each."""
        feed = {"is_first": self._first, **self._state}
        for name, each in self._inputs.items():
            if name.startswith("obs."):
                feed[name] = np.asarray(obs[name[4:]], each["dtype"])
            elif name.startswith("noise."):
                normal = each["distribution"] == "standard normal"
                draw = self._rng.standard_normal if normal else self._rng.random
                feed[name] = draw(self._shape(name), np.float32)
        names = [each["name"] for each in self.contract["outputs"]]
        outputs = dict(zip(names, self._session.run(names, feed), strict=True))
        self._state = {name: outputs[f"state_out.{name[6:]}"] for name in self._state}
        self._first = np.zeros(self._rows, bool)
        return {name[7:]: value for name, value in outputs.items() if name[:7] == "action."}

    def _shape(self, name):
        return (self._rows, *self._inputs[name]["shape"][1:])

    def _zeros(self, name):
        return np.zeros(self._shape(name), self._inputs[name]["dtype"])


def read_sensors(policy):
    """Stands for your robot: zeros in the shapes that the policy expects."""
    return {name[4:]: policy._zeros(name) for name in policy._inputs if name[:4] == "obs."}


def send(action):
    """Stands for your robot: takes an action in its own units; true when the episode is over."""
    del action
    return False


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rate", type=float, help="calls a second")
    args = parser.parse_args()
    policy = OnnxPolicy(args.folder)
    rate = args.rate or policy.contract.get("control_rate_hz") or 50.0
    busy, due = 0.0, time.monotonic()
    for _ in range(args.steps):
        start = time.monotonic()
        action = policy(read_sensors(policy))
        busy += time.monotonic() - start
        if send(action):
            policy.reset()
        due += 1 / rate
        time.sleep(max(0.0, due - time.monotonic()))
    print(f"{args.steps} steps at {rate:g} a second, {1e3 * busy / args.steps:.2f} ms a call")


if __name__ == "__main__":
    main()
