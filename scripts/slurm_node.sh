#!/usr/bin/env bash
# A Slurm on this machine, for as long as a command runs.
#
#   scripts/slurm_node.sh [--nodes N] COMMAND WORDS...
#   scripts/slurm_node.sh sbatch --wait job.sh
#
# It has one node with all CPUs, or N nodes that share them, and the partition `main`. munged, slurmctld
# and slurmd have a configuration, a key and ports of their own in a new folder, which COMMAND finds
# through SLURM_CONF. They are ended and the folder is removed when COMMAND ends; another Slurm of this
# machine is left alone. The exit code is COMMAND's.
# Needs Debian's slurm-wlm and munge, and root.
set -euo pipefail

nodes=1
if [ "${1:-}" = --nodes ]; then
  nodes=${2:-}
  shift 2
fi
[[ $nodes =~ ^[1-9]$ ]] || { echo "--nodes $nodes: choose 1 to 9" >&2; exit 2; }
[ $# -gt 0 ] || { sed -n '2,13s/^# \{0,1\}//p' "$0"; exit 2; }
for tool in munged mungekey slurmctld slurmd sinfo python3; do
  PATH=$PATH:/usr/sbin:/sbin command -v "$tool" > /dev/null ||
    { echo "slurm_node.sh needs $tool, of slurm-wlm and munge" >&2; exit 2; }
done
[ "$(id -u)" = 0 ] || { echo "slurm_node.sh needs root" >&2; exit 2; }
export PATH=$PATH:/usr/sbin:/sbin

folder=$(mktemp -d /tmp/slurm_node.XXXXXX)
chmod 755 "$folder"  # munged wants a socket that others could reach
mkdir "$folder/state"
read -ra ports < <(python3 -c '
import socket, sys
sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(1 + int(sys.argv[1]))]
print(*(each.getsockname()[1] for each in sockets))' "$nodes")
cpus=$(($(nproc) / nodes))
export SLURM_CONF=$folder/slurm.conf
cat > "$SLURM_CONF" << END
ClusterName=one_node
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=${ports[0]}
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool_%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd_%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd_%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
KillWait=5
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PartitionName=main Nodes=ALL Default=YES
END
for ((node = 1; node <= nodes; node++)); do
  echo "NodeName=node$node NodeHostname=localhost NodeAddr=127.0.0.1 Port=${ports[$node]}" \
    "CPUs=$((cpus > 0 ? cpus : 1)) State=UNKNOWN" >> "$SLURM_CONF"
  mkdir "$folder/spool_node$node"
done

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
for ((node = 1; node <= nodes; node++)); do
  slurmd -D -N "node$node" > "$folder/slurmd$node.out" 2>&1 & pids=($! "${pids[@]}")
done
for _ in {1..120}; do
  state=$(sinfo --noheader --partition main --format '%T %D' 2> "$folder/sinfo.log" || true)
  [ "$state" != "idle $nodes" ] || break
  sleep 0.25
done
if [ "$state" != "idle $nodes" ]; then
  tail -n 5 "$folder"/*.log "$folder"/*.out >&2
  echo "slurm_node.sh: Slurm did not start" >&2
  exit 1
fi
code=0
"$@" || code=$?
exit "$code"
