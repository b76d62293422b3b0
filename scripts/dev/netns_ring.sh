#!/usr/bin/env bash
# Several hosts on one machine: a network namespace for each, joined by a bridge or by slow links.
#
#   scripts/dev/netns_ring.sh [--hosts N] [--rate RATE --delay TIME] [--cut_on TEXT] [--kill_on TEXT] [--srun] -- COMMAND FLAGS...
#   scripts/dev/netns_ring.sh --hosts 3 -- selfspec --model demo --B 1 --gen_len 16 --threads 1
#   scripts/dev/netns_ring.sh --hosts 2 --rate 1gbit --delay 1ms -- serve --modes ring --threads 1
#
# What a host sends leaves it at RATE (such as 100mbit) and arrives TIME later (such as 1ms), by
# netem where the kernel has it, elsewhere by scripts/dev/slow_link.py.
# Every host runs `torchrun ... -m magicdec COMMAND FLAGS` with one rank under torchrun's own
# rendezvous, as on real hosts, and sees its own processes only. When a host prints TEXT, --cut_on
# takes the last host's link down, and --kill_on kills that host's processes.
# NETNS_RING_PROGRAM, if it is set, is run in the place of `-m magicdec`. With --srun, a Slurm of N
# nodes (scripts/slurm_node.sh) starts torchrun on the hosts; that needs root.
# Each host's output goes to the screen behind its name. The exit code is that of the first host
# that fails; a host that was cut off or killed does not count. Needs iproute2, unshare and the right
# to make namespaces (root, or unprivileged user namespaces). Nothing is left behind.
set -euo pipefail

usage() { sed -n '2,18s/^# \{0,1\}//p' "$0"; exit 2; }

hosts=3 rate= delay= cut_on= kill_on= srun=
while [ $# -gt 0 ]; do
  case "$1" in
    --hosts) hosts=${2:?--hosts needs a number}; shift 2 ;;
    --rate) rate=${2:?--rate needs a rate such as 1gbit}; shift 2 ;;
    --delay) delay=${2:?--delay needs a time such as 1ms}; shift 2 ;;
    --cut_on) cut_on=${2:?--cut_on needs a text}; shift 2 ;;
    --kill_on) kill_on=${2:?--kill_on needs a text}; shift 2 ;;
    --srun) srun=--srun; shift ;;
    --) shift; break ;;
    *) usage ;;
  esac
done
[ $# -gt 0 ] || usage
[[ $hosts =~ ^[1-9][0-9]?$ ]] || { echo "--hosts $hosts: choose 1 to 99" >&2; exit 2; }
[[ $rate =~ ^([0-9.]+[gmk]bit)?$ ]] || { echo "--rate $rate: choose one such as 100mbit" >&2; exit 2; }
[[ $delay =~ ^([0-9.]+[mu]?s)?$ ]] || { echo "--delay $delay: choose one such as 1ms" >&2; exit 2; }
[ -n "$rate" ] && [ -n "$delay" ] || [ -z "$rate$delay" ] ||
  { echo "netns_ring.sh: --rate and --delay need each other" >&2; exit 2; }
[ -z "$srun" ] || [ -z "$cut_on$kill_on" ] || { echo "netns_ring.sh: --srun ends no host" >&2; exit 2; }
for tool in ip unshare ${rate:+tc}; do
  command -v "$tool" > /dev/null || { echo "netns_ring.sh needs $tool" >&2; exit 2; }
done

if [ -z "${NETNS_RING_INSIDE:-}" ]; then  # once more, in namespaces that end with this process
  user=--map-root-user
  if [ -n "$srun" ]; then user=; fi  # Slurm sets groups, which a user's namespace does not allow
  unshare $user --net --mount --pid --fork true 2> /dev/null ||
    { echo "netns_ring.sh: this user may not make namespaces here" >&2; exit 2; }
  options=(--hosts "$hosts" ${rate:+--rate "$rate" --delay "$delay"} ${cut_on:+--cut_on "$cut_on"} ${kill_on:+--kill_on "$kill_on"} $srun)
  exec env NETNS_RING_INSIDE=1 unshare $user --net --mount --pid --fork --kill-child \
    --mount-proc bash "$0" "${options[@]}" -- "$@"
fi

mount -t tmpfs tmpfs /run  # `ip netns` keeps its names there
ip link add br0 type bridge
ip link set br0 up
links=bridge
if [ -n "$rate" ]; then
  links=netem
  tc qdisc add dev br0 root netem rate "$rate" delay "$delay" 2> /run/netem.log || links=user_space
  if [ $links = netem ]; then tc qdisc del dev br0 root; fi
  echo "links of $rate and $delay: $links"
fi
if [ $links = user_space ]; then
  mkfifo /run/ready
  python "$(dirname "$0")/slow_link.py" forward --hosts "$hosts" --rate "$rate" --delay "$delay" > /run/ready &
  forwarder=$!
  read -r _ < /run/ready
fi
for ((host = 0; host < hosts; host++)); do
  ip netns add "host$host"
  if [ $links = user_space ]; then
    ip link set "tap$host" netns "host$host" name eth0
  else
    ip link add "veth$host" type veth peer name eth0 netns "host$host"
    ip link set "veth$host" master br0 up
  fi
  ip -n "host$host" addr add "10.9.0.$((host + 1))/24" dev eth0
  ip -n "host$host" link set eth0 up
  ip -n "host$host" link set lo up
  if [ $links = netem ]; then
    tc -n "host$host" qdisc add dev eth0 root netem rate "$rate" delay "$delay" limit 100000
  fi
done

printed=/run/printed  # what the hosts have printed so far
touch "$printed"
pids=()
start='exec ip netns exec "host$SLURM_NODEID" unshare --pid --fork --kill-child --mount-proc \
  python -u -m torch.distributed.run --node-rank "$SLURM_NODEID" "$@"'
# torchrun would leave a folder in /tmp; that in /run goes with the namespace.
torchrun=(--log-dir /run/torchrun --nnodes "$hosts" --nproc-per-node 1 --master-addr 10.9.0.1 --master-port 29400)
torchrun+=(${NETNS_RING_PROGRAM:--m magicdec} "$@")
if [ -n "$srun" ]; then
  ip link set lo up
  ip addr add 10.8.0.1/24 dev br0  # without an address beside 127.0.0.1 no name is looked up
  "$(dirname "$0")/../slurm_node.sh" --nodes "$hosts" srun --nodes "$hosts" --ntasks "$hosts" --label \
    bash -c "$start" - "${torchrun[@]}" &
  pids+=($!)
else
  for ((host = 0; host < hosts; host++)); do
    SLURM_NODEID=$host bash -c "$start" - "${torchrun[@]}" \
      > >(sed -u "s/^/host$host: /" | tee -a "$printed") 2>&1 &
    pids+=($!)
  done
fi
last=$((hosts - 1)) lost_on=${cut_on:-$kill_on}
if [ -n "$lost_on" ]; then
  until grep -qF -- "$lost_on" "$printed" || ! kill -0 "${pids[0]}" 2> /dev/null; do sleep 0.2; done
  if [ -n "$cut_on" ]; then
    ip -n "host$last" link set eth0 down
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
if [ $links = user_space ]; then
  kill "$forwarder"
  wait "$forwarder" || code=$?
fi
exit "$code"
