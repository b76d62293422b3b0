#!/usr/bin/env bash
# Several hosts on one machine: a network namespace for each, joined by a bridge.
#
#   scripts/netns_ring.sh [--hosts N] [--cut_on TEXT] [--kill_on TEXT] -- COMMAND FLAGS...
#   scripts/netns_ring.sh --hosts 3 -- selfspec --model demo --B 1 --gen_len 16 --threads 1
#
# Every host runs `torchrun ... -m magicdec COMMAND FLAGS` with one rank under torchrun's own
# rendezvous, as on real hosts, and sees its own processes only. When a host prints TEXT, --cut_on
# takes the last host's link down, and --kill_on kills that host's processes.
# NETNS_RING_PROGRAM, if it is set, is run in the place of `-m magicdec`.
# Each host's output goes to the screen behind its name. The exit code is that of the first host
# that fails; a host that was cut off or killed does not count. Needs iproute2, unshare and the right
# to make namespaces (root, or unprivileged user namespaces). Nothing is left behind.
set -euo pipefail

usage() { sed -n '2,13s/^# \{0,1\}//p' "$0"; exit 2; }

hosts=3 cut_on= kill_on=
while [ $# -gt 0 ]; do
  case "$1" in
    --hosts) hosts=${2:?--hosts needs a number}; shift 2 ;;
    --cut_on) cut_on=${2:?--cut_on needs a text}; shift 2 ;;
    --kill_on) kill_on=${2:?--kill_on needs a text}; shift 2 ;;
    --) shift; break ;;
    *) usage ;;
  esac
done
[ $# -gt 0 ] || usage
[[ $hosts =~ ^[1-9][0-9]?$ ]] || { echo "--hosts $hosts: choose 1 to 99" >&2; exit 2; }
for tool in ip unshare; do
  command -v "$tool" > /dev/null || { echo "netns_ring.sh needs $tool" >&2; exit 2; }
done

if [ -z "${NETNS_RING_INSIDE:-}" ]; then  # once more, in namespaces that end with this process
  unshare --map-root-user --net --mount --pid --fork true 2> /dev/null ||
    { echo "netns_ring.sh: this user may not make namespaces here" >&2; exit 2; }
  options=(--hosts "$hosts" ${cut_on:+--cut_on "$cut_on"} ${kill_on:+--kill_on "$kill_on"})
  exec env NETNS_RING_INSIDE=1 unshare --map-root-user --net --mount --pid --fork --kill-child \
    --mount-proc bash "$0" "${options[@]}" -- "$@"
fi

mount -t tmpfs tmpfs /run  # `ip netns` keeps its names there
ip link add br0 type bridge
ip link set br0 up
for ((host = 0; host < hosts; host++)); do
  ip netns add "host$host"
  ip link add "veth$host" type veth peer name eth0 netns "host$host"
  ip link set "veth$host" master br0 up
  ip -n "host$host" addr add "10.9.0.$((host + 1))/24" dev eth0
  ip -n "host$host" link set eth0 up
  ip -n "host$host" link set lo up
done

printed=/run/printed  # what the hosts have printed so far
touch "$printed"
pids=()
for ((host = 0; host < hosts; host++)); do
  ip netns exec "host$host" unshare --pid --fork --kill-child --mount-proc python -u -m torch.distributed.run \
    --nnodes "$hosts" --nproc-per-node 1 --node-rank "$host" \
    --master-addr 10.9.0.1 --master-port 29400 ${NETNS_RING_PROGRAM:--m magicdec} "$@" \
    > >(sed -u "s/^/host$host: /" | tee -a "$printed") 2>&1 &
  pids+=($!)
done
last=$((hosts - 1)) lost_on=${cut_on:-$kill_on}
if [ -n "$lost_on" ]; then
  until grep -qF -- "$lost_on" "$printed" || ! kill -0 "${pids[0]}" 2> /dev/null; do sleep 0.2; done
  if [ -n "$cut_on" ]; then
    ip link set "veth$last" down
    echo "host$last cut off"
  else
    kill -KILL "${pids[$last]}"
    echo "host$last killed"
  fi
  unset "pids[$last]"
fi
code=0
for pid in "${pids[@]}"; do
  wait "$pid" || { status=$?; [ "$code" -ne 0 ] || code=$status; }
done
exit "$code"
