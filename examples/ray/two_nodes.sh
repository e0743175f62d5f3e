#!/bin/sh
# One model on two machines with quire[ray], which must have the model in the same folder.
#
#   ADDRESS=10.0.0.1 sh two_nodes.sh head         on the first machine, whose address that is
#   ADDRESS=10.0.0.1 sh two_nodes.sh node         on the second one
#   ADDRESS=10.0.0.1 sh two_nodes.sh serve M      on the first one, when both are there
#
# The head has rank 0, which is in the server's process, so it offers Ray no CPU for another one.
# Another rank takes as many CPUs as rank 0 has threads: give --num-threads if the node has fewer.
# It takes as much memory too. A node offers 70 % of its own, or what `ray start --memory` says.
set -eu
case "$1" in
  head) exec ray start --head --node-ip-address="$ADDRESS" --port=6379 --num-cpus=0 --block ;;
  node) exec ray start --address="$ADDRESS:6379" --block ;;
  serve)
    RAY_ADDRESS="$ADDRESS:6379" exec quire serve "$2" \
      --tensor-parallel-size=2 --distributed-executor-backend=ray
    ;;
  *) echo "usage: ADDRESS=... sh two_nodes.sh head | node | serve MODEL" >&2; exit 2 ;;
esac
