#!/bin/bash
# down.sh: ends the cluster of this checkout, or what there is of it. Binaries and logs stay.
# shellcheck source=lib.sh
. "$(dirname "$(readlink -f "$0")")/lib.sh"
need_root
mkdir -p "$RUN"
exec 9>"$RUN/lock"
for _ in 1 2 3 4 5; do
  [ ! -d "$UNITS" ] || echo 1 >"$UNITS/cgroup.kill"   # an up.sh at work, too; then its lock is free
  if flock -w 1 9; then stop_all; exit; fi
done
die "another up.sh or down.sh of this checkout is running"
