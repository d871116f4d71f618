#!/bin/bash
# packages.sh ARCHITECTURE: downloads the packages of Debian that images need, of any architecture, and prints their
# directory. apt verifies them. They are kept for a day: security updates are in the images of the next.
set -euo pipefail
cd "$(dirname "$0")"
arch=$1
dir=${CTRLMESH_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/ctrlmesh}/debian-$arch-$(sha256sum <"${0##*/}" | cut -c1-8)
if [ -z "$(find "$dir" -maxdepth 0 -mtime -1 2>/dev/null)" ]; then
  new=$dir.new.$$ log=$(mktemp); trap 'rm -rf "$new" "$log"' EXIT
  mkdir -p "$new"/{state/lists,cache/archives}/partial
  apt=(apt-get -q -o Acquire::Retries=5 -o "APT::Architecture=$arch" -o "APT::Architectures=$arch" -o APT::Sandbox::User=root
    -o "Dir::State=$new/state" -o Dir::State::status=/dev/null -o "Dir::Cache=$new/cache")
  get() {
    "${apt[@]}" update && "${apt[@]}" install -y --download-only --no-install-recommends iptables &&
      (cd "$new/cache/archives" && "${apt[@]}" download base-files ca-certificates)
  }
  if get >"$log" 2>&1; then :
  elif [ -d "$dir" ]; then echo "packages.sh: the packages of Debian could not be updated; those of $(date -r "$dir" -I) are used" >&2
  else tail "$log" >&2; echo "packages.sh: downloading the packages of Debian failed" >&2; exit 1; fi
  if [ -d "$new/cache/archives" ] && ls "$new"/cache/archives/*.deb >/dev/null 2>&1; then
    rm -rf "$dir" "$new/cache/archives/partial" "$new/cache/archives/lock"; mv -T "$new/cache/archives" "$dir"; touch "$dir"
  fi
fi
echo "$dir"
