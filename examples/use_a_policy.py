"""Play CartPole with a trained policy: python examples/use_a_policy.py runs/gym-CartPole-v1"""

import sys

import gymnasium

from dreamfleet import Policy

policy = Policy.load(sys.argv[1])
env = gymnasium.make("CartPole-v1")
play = policy.for_gym(env)

for episode in range(2):
    observation, _ = env.reset(seed=episode)
    play.reset()  # a new episode
    score, over = 0.0, False
    while not over:
        observation, reward, terminated, truncated, _ = env.step(play(observation))
        score += float(reward)
        over = terminated or truncated
    print(f"episode {episode}: score {score:g} after {policy.step:,} steps of training")
