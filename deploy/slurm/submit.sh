#!/bin/bash
# Train on a Slurm cluster, with the environments on nodes of their own:
#   deploy/slurm/submit.sh DIR [--nodes N] [--envs K] [SETTING ...]
# DIR is a directory that all nodes share. N nodes (2) run K environments each (8); settings are
# those of `dreamfleet train`. What the cluster has to know is told with the variables of sbatch, such
# as SBATCH_ACCOUNT, or for one of the two jobs with AGENT_OPTIONS and ENVS_OPTIONS:
#   AGENT_OPTIONS='--partition=gpu --gres=gpu:1' deploy/slurm/submit.sh "$SCRATCH/walker" \
#     --nodes 8 --task dmc:walker_walk --preset dmc_proprio
# The same command again resumes the run.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
logdir=$(mkdir -p "$1" && cd "$1" && pwd)
shift
nodes=2 envs=8
while [ $# -gt 0 ]; do
  case $1 in
    --nodes) nodes=$2; shift 2 ;;
    --envs) envs=$2; shift 2 ;;
    *) break ;;
  esac
done

# Two jobs and not one: environments come as nodes become free, and a node that is lost is replaced
# while the run goes on. ${agent%%;*}: sites with several clusters add the name of one.
# shellcheck disable=SC2086 # the options are several words
agent=$(sbatch --parsable ${AGENT_OPTIONS:-} "$here/agent.sbatch" "$logdir" "$@")
# shellcheck disable=SC2086
array=$(sbatch --parsable ${ENVS_OPTIONS:-} --array="1-$nodes" --dependency="after:${agent%%;*}" \
  "$here/envs.sbatch" "$logdir" "${agent%%;*}" "$envs")
echo "The agent is job ${agent%%;*}, its environments are job ${array%%;*}, and the run is in $logdir."
