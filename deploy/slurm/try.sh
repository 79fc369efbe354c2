#!/bin/bash
# Run the scripts of this directory on a Slurm cluster that lives on this machine only: a real munged
# and slurmctld, and a slurmd for each of four nodes with a name and an address of its own. All of it is
# in namespaces, with no network but their own loopback, and ends with this script. It takes about five
# minutes and needs root, Slurm (`apt-get install slurm-wlm` on Debian) and `dreamfleet`.
set -eu

if [ -z "${TRY_ROOT:-}" ]; then
  here=$(cd "$(dirname "$0")" && pwd)
  TRY_ROOT=$(mktemp -d)
  export TRY_ROOT
  trap 'rm -rf "$TRY_ROOT"' EXIT
  trap : INT TERM  # it reaches the child, which ends everything
  unshare --mount --uts --net --pid --fork --kill-child --mount-proc bash "$here/try.sh" "$@"
  exit
fi

here=$(cd "$(dirname "$0")" && pwd)
root=$TRY_ROOT
nodes=(cpu1 cpu2 cpu3 gpu1)
chmod 755 "$root"
mkdir "$root/state" "$root/shared"
mount --bind "$root/shared" /mnt  # a file system that all nodes share
cd /mnt

say() { echo "== $*"; }
fail() {
  say "FAILED: $*"
  sinfo
  squeue
  tail -n 20 "$root"/*.log /mnt/*.log
  exit 1
}
# wait_for SECONDS WHAT COMMAND...
wait_for() {
  local end=$((SECONDS + $1)) what=$2
  shift 2
  until "$@" >/dev/null 2>&1; do
    [ $SECONDS -lt $end ] || fail "waited in vain for $what"
    sleep 0.5
  done
}

# --- The cluster
ip link set lo up
ip address add 10.0.0.100/24 dev lo
echo "127.0.0.1 localhost
10.0.0.100 controller" >"$root/hosts"
for i in "${!nodes[@]}"; do
  ip address add "10.0.0.$((i + 1))/24" dev lo
  echo "10.0.0.$((i + 1)) ${nodes[i]}" >>"$root/hosts"
done
mount --bind "$root/hosts" /etc/hosts
hostname controller

head -c 128 /dev/urandom >"$root/munge.key"
chmod 400 "$root/munge.key"
munged --key-file="$root/munge.key" --socket="$root/munge" --pid-file="$root/munged.pid" \
  --log-file="$root/munged.log" --seed-file="$root/munge.seed"

export SLURM_CONF=$root/slurm.conf TMPDIR=$root
{
  cat <<CONF
ClusterName=try
SlurmctldHost=controller
SlurmUser=root
AuthType=auth/munge
# A job that is queued again starts as soon as its old credential is void.
AuthInfo=socket=$root/munge,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,bf_interval=2
SlurmdParameters=config_overrides
StateSaveLocation=$root/state
SlurmdSpoolDir=$root/spool-%n
SlurmctldPidFile=$root/slurmctld.pid
SlurmdPidFile=$root/slurmd-%n.pid
SlurmctldLogFile=$root/slurmctld.log
SlurmdLogFile=$root/slurmd-%n.log
MpiDefault=none
ReturnToService=0
MinJobAge=3600
PartitionName=cpu Nodes=cpu[1-3] Default=YES MaxTime=INFINITE
PartitionName=gpu Nodes=gpu1 MaxTime=INFINITE
CONF
  for i in "${!nodes[@]}"; do
    echo "NodeName=${nodes[i]} CPUs=4 RealMemory=1000 Port=$((7001 + i)) NodeAddr=10.0.0.$((i + 1))"
  done
} >"$SLURM_CONF"
slurmctld -D 2>/dev/null &  # they write logs
for node in "${nodes[@]}"; do
  mkdir "$root/spool-$node"
  unshare --uts bash -c "hostname $node; exec slurmd -D -N $node" 2>/dev/null &
done
all_idle() { [ "$(sinfo -h -N -t idle -o %N | wc -l)" = ${#nodes[@]} ]; }
wait_for 60 "the nodes" all_idle
sinfo

# --- What the tries have in common
export AGENT_OPTIONS="--partition=gpu" ENVS_OPTIONS="--partition=cpu"
submit() {
  run=/mnt/$1
  shift
  "$here/submit.sh" "$run" --nodes 2 --envs 2 --task bundled:dummy --agent random --bind gpu1 \
    --expect-envs 4 --eval-episodes 0 --log-every 1 --batch-size 4 --batch-length 8 --save-every 0 \
    "$@" | tee "$root/submitted"
  read -r agent envs < <(sed -E 's/.*job ([0-9]+),.*job ([0-9]+),.*/\1 \2/' "$root/submitted")
  log=/mnt/dreamfleet-$agent.log
}
state() { scontrol show job "$1" | grep -o 'JobState=[A-Z_]*' | cut -d= -f2 | sort -u | xargs; }
is() { [ "$(state "$1")" = "$2" ]; }
idle() { [ -z "$(squeue --noheader)" ]; }
machines() {
  python3 -c 'import json, sys
run = json.load(open(sys.argv[1]))["run"] or {}
for each in run.get("machines", []): print(each["name"], each["state"], each["steps"], "steps")' \
    "$run/status.json"
}
# joined NODE: environments there have made steps
joined() { machines | grep -q "^$1 joined [1-9]"; }
took_part() { [ "$(machines | grep -c ' [1-9][0-9]* steps')" -ge "$1" ]; }
saved() { grep -o 'newest checkpoint is of step [0-9,]*' "$log" | tail -n 1 | tr -dc 0-9; }
step() { grep -o '^step [0-9,]*' "$log" | tail -n 1 | tr -dc 0-9; }
step_is() { [ "$(step)" -ge "$1" ]; }

say "A run trains its steps with environments of two nodes, and its jobs end with it"
submit first --steps 3000
wait_for 180 "the first steps" step_is 1
squeue --format="%.8i %.16j %.9P %.8T %N"
wait_for 300 "the end of the jobs" idle
is "$agent" COMPLETED || fail "the agent's job is $(state "$agent")"
is "$envs" COMPLETED || fail "the environments' job is $(state "$envs")"
[ "$(saved)" -ge 3000 ] || fail "the run ended at step $(saved)"
took_part 2 || fail "not all nodes took part"
machines
tail -n 2 "$log"

say "A node of environments is lost, and another one takes its place"
AGENT_OPTIONS="$AGENT_OPTIONS --time=3 --signal=B:USR1@60" submit second --steps 0
wait_for 180 "two nodes" joined cpu2
scontrol update NodeName=cpu1 State=DOWN Reason=try
wait_for 180 "the third node" joined cpu3
machines

say "When its time is up a run saves, is queued again, resumes, and its environments come back"
wait_for 240 "the signal before the time limit" grep -q "queued again" "$log"
before=$(saved)
wait_for 240 "the second start" grep -q "Resuming at step" "$log"
wait_for 240 "new steps" step_is $((before + 1))
grep -E "checkpoint|queued|Resuming" "$log"
scontrol show job "$agent" | grep -oE "JobState=\w+|Restarts=[0-9]+" | xargs

say "scancel saves and ends a run"
at=$(step)
scancel "$agent"
wait_for 180 "the end of the jobs" idle
is "$agent" CANCELLED || fail "the agent's job is $(state "$agent")"
tail -n 3 "$log"
[ "$(saved)" -ge "$at" ] || fail "the run was at step $at, and $(saved) was saved"

say "Two nodes are hosts that learn together, as srun tells them; scancel saves, and three resume"
learn() {
  local count=$1
  shift
  set -- "$@" --task bundled:dummy --env-options length=25 'size=[16,16]' --dreamer.model debug \
    --envs 2 --batch-size 12 --batch-length 8 --train-ratio 32 --report-every 0 --log-every 1 \
    --eval-episodes 1
  srun --nodes="$count" --ntasks-per-node=1 --label --job-name=hosts \
    dreamfleet train --hosts 0 --logdir /mnt/hosts "$@" &>"$root/hosts.log"
}
scontrol update NodeName=cpu1 State=RESUME
wait_for 60 "the nodes" all_idle
learned() {
  grep -q learner/updates /mnt/hosts/metrics.jsonl &&
    grep -q learner/updates /mnt/hosts/hosts/1/metrics.jsonl
}
learn 2 --steps 0 &
first=$!
wait_for 300 "updates of both" learned
scancel --name=hosts
wait_for 180 "the end of the hosts" idle
wait $first || true
grep -E "hosts are there|checkpoint is" "$root/hosts.log" | sort
learn 3 --steps 1500 || fail "the hosts: $(tail -n 20 "$root/hosts.log")"
grep -E "hosts are there|Resuming|Evaluation:|checkpoint is" "$root/hosts.log" | sort
say "Everything worked, in $SECONDS s"
