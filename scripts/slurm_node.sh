#!/usr/bin/env bash
# A Slurm of one node on this machine, for as long as a command runs.
#
#   scripts/slurm_node.sh COMMAND WORDS...
#   scripts/slurm_node.sh magicdec sweep study.toml --executor slurm
#
# It has the partitions `main` (the default), `low` (whose jobs give way to those of `main`) and
# `closed` (which starts nothing). munged, slurmctld and slurmd run with a configuration, a key and ports
# of their own in a new folder, which COMMAND finds through SLURM_CONF. They are ended and the folder is
# removed when COMMAND ends; another Slurm of this machine is left alone. The exit code is COMMAND's.
# Needs Debian's slurm-wlm and munge, and root.
set -euo pipefail

[ $# -gt 0 ] || { sed -n '2,12s/^# \{0,1\}//p' "$0"; exit 2; }
for tool in munged mungekey slurmctld slurmd sinfo python3; do
  PATH=$PATH:/usr/sbin:/sbin command -v "$tool" > /dev/null ||
    { echo "slurm_node.sh needs $tool, of slurm-wlm and munge" >&2; exit 2; }
done
[ "$(id -u)" = 0 ] || { echo "slurm_node.sh needs root" >&2; exit 2; }
export PATH=$PATH:/usr/sbin:/sbin

folder=$(mktemp -d /tmp/slurm_node.XXXXXX)
chmod 755 "$folder"  # munged wants a socket that others could reach
mkdir "$folder/state" "$folder/spool"
read -r ctld_port slurmd_port < <(python3 -c '
import socket
sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
print(*(each.getsockname()[1] for each in sockets))')
export SLURM_CONF=$folder/slurm.conf
cat > "$SLURM_CONF" << END
ClusterName=one_node
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=$ctld_port
SlurmdPort=$slurmd_port
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
KillWait=5
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
NodeName=localhost NodeAddr=127.0.0.1 CPUs=$(nproc) State=UNKNOWN
PartitionName=main Nodes=localhost Default=YES PriorityTier=2 PreemptMode=OFF
PartitionName=low Nodes=localhost PriorityTier=1
PartitionName=closed Nodes=localhost State=DOWN
END

pids=()
stop() {  # the jobs first, so that nothing of them is left
  scancel --user root > "$folder/scancel.log" 2>&1 || true
  for _ in {1..40}; do
    [ -n "$(squeue --noheader 2> "$folder/squeue.log")" ] || break
    sleep 0.25
  done
  for pid in "${pids[@]}"; do kill "$pid" 2> "$folder/kill.log" || true; done
  wait
  rm -rf "$folder"
}
trap stop EXIT
trap 'exit 143' TERM

mungekey --create --keyfile "$folder/munge.key"
munged --foreground --force --key-file "$folder/munge.key" --socket "$folder/munge.socket" \
  --pid-file "$folder/munged.pid" --seed-file "$folder/munge.seed" --num-threads 2 \
  > "$folder/munged.log" 2>&1 & pids+=($!)
until [ -S "$folder/munge.socket" ] || ! kill -0 "${pids[0]}"; do sleep 0.1; done
slurmctld -D > "$folder/slurmctld.out" 2>&1 & pids=($! "${pids[@]}")
slurmd -D -N localhost > "$folder/slurmd.out" 2>&1 & pids=($! "${pids[@]}")
for _ in {1..120}; do
  state=$(sinfo --noheader --partition main --format %T 2> "$folder/sinfo.log" || true)
  [ "$state" != idle ] || break
  sleep 0.25
done
if [ "$state" != idle ]; then
  tail -n 5 "$folder"/*.log "$folder"/*.out >&2
  echo "slurm_node.sh: Slurm did not start" >&2
  exit 1
fi
code=0
"$@" || code=$?
exit "$code"
