#!/bin/bash
# sweep.sh: removes what test runs that were killed have left on this machine and nobody owns any more.
# A cluster whose checkout exists is left alone, except that of this checkout: it is ended.
# shellcheck source=lib.sh
. "$(dirname "$(readlink -f "$0")")/lib.sh"
need_root

exe() { readlink "/proc/$1/exe" 2>/dev/null || true; }   # "PATH (deleted)" if the file is gone
is_test() { [[ $(exe "$1") =~ \.test( \(deleted\))?$ ]]; }

# checkout GROUP: the .run of the cluster whose cgroup it is, from the environment of its processes; "" without any.
# A checkout that was removed may have left a .run: what was mounted there could not be removed.
checkout() {
  local p
  while read -r p; do
    tr '\0' '\n' 2>/dev/null <"/proc/$p/environ" | sed -n 's/^RUN=//p' | grep -m 1 . && return
  done < <(find "$1" -name cgroup.procs -exec cat {} + 2>/dev/null)
  return 0
}

remove_group() { # remove_group NAME: in all hierarchies
  local dirs; mapfile -t dirs < <(find /sys/fs/cgroup -type d -name "$1" -prune)
  echo "removing the processes and cgroups of $1"
  remove_groups "${dirs[@]}" || true
}

"$HERE/down.sh"

# Groups of tests are called ctrlmesh-test-PID, those of clusters by a hash of the checkout. One without
# processes may be about to get some, unless it is old.
find "$V2" -mindepth 1 -maxdepth 1 -type d -name 'ctrlmesh-*' | while read -r group; do
  name=${group##*/}
  case $name in
  ctrlmesh-test-*) is_test "${name##*-}" || remove_group "$name" ;;
  *)
    if grep -qs '^populated 1' "$group/cgroup.events"; then
      run=$(checkout "$group")
      [ -z "$run" ] || [ -e "${run%/.run}/go.mod" ] || remove_group "$name"
    elif [ -n "$(find "$group" -maxdepth 0 -mmin +1)" ]; then
      remove_group "$name"
    fi ;;
  esac
done

# Processes that a test started in a network namespace, and that lost their parent.
own=$(readlink /proc/self/ns/net)
for p in /proc/[0-9]*; do
  pid=${p##*/}
  is_test "$pid" && [ "$(readlink "$p/ns/net")" != "$own" ] && grep -qsx 'PPid:[[:space:]]*1' "$p/status" || continue
  echo "ending process $pid, which a test left in a network namespace"
  kill -KILL "$pid" 2>/dev/null || true
done

# Mounts below temporary folders of tests, unless tests run.
for p in /proc/[0-9]*; do ! is_test "${p##*/}" || exit 0; done
awk '{print $5}' /proc/self/mountinfo | { grep -E "^${TMPDIR:-/tmp}/Test[^/]*[0-9]+/" || true; } | tac | while read -r mount; do
  echo "unmounting $mount"
  umount -l "$mount" || true
done
