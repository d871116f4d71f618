#!/bin/bash
# packages.sh ARCHITECTURE: downloads the packages of Debian that images need, of any architecture, and prints their
# directory. apt verifies them. There is one a day, so that security updates are in the images of the next.
set -euo pipefail
cd "$(dirname "$0")"
arch=$1
kept=${CTRLMESH_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/ctrlmesh}/debian-$arch-$(sha256sum <"${0##*/}" | cut -c1-8)
dir=$kept-$(date -u +%F)
if [ ! -d "$dir" ]; then
  new=$dir.new.$$; trap 'rm -rf "$new"' EXIT
  mkdir -p "$new"/{state/lists,cache/archives}/partial "$new/packages"
  apt=(apt-get -q -o DPkg::Lock::Timeout=600 -o Acquire::Retries=5 -o "APT::Architecture=$arch" -o "APT::Architectures=$arch"
    -o APT::Sandbox::User=root -o "Dir::State=$new/state" -o Dir::State::status=/dev/null -o "Dir::Cache=$new/cache")
  download() {
    "${apt[@]}" update && "${apt[@]}" install -y --download-only --no-install-recommends iptables &&
      (cd "$new/packages" && "${apt[@]}" download base-files ca-certificates) && mv "$new"/cache/archives/*.deb "$new/packages"
  }
  if download >"$new/log" 2>&1; then
    mv -T "$new/packages" "$dir" 2>/dev/null || [ -d "$dir" ]
  else
    tail "$new/log" >&2
    dir=$(find "$(dirname "$kept")" -maxdepth 1 -name "${kept##*/}-????-??-??" | sort | tail -n 1)
    [ -n "$dir" ] || { echo "packages.sh: downloading the packages of Debian failed" >&2; exit 1; }
    echo "packages.sh: downloading the packages of Debian failed: those in $dir are used" >&2
  fi
fi
echo "$dir"
