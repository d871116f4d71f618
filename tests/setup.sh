#!/bin/bash
# Installs the Debian packages that a task needs and that are missing: setup.sh test|bench|clients|operators|generate|pages|docs
set -euo pipefail
# shellcheck source=../hack/progress.sh
. "$(dirname "$0")/../hack/progress.sh"
case ${1:-} in
test) packages=(gcc libc6-dev iproute2 iptables nftables haproxy openssl curl nodejs python3) ;;
bench) packages=(haproxy nginx) ;;
operators) packages=(python3 python3-kubernetes) ;;
clients) packages=(ca-certificates curl openssl nodejs) ;;
generate) packages=(clang llvm protobuf-compiler) ;;
pages) packages=(chromium) ;;
docs) packages=(nodejs npm) ;;
*) echo "usage: $0 test|bench|clients|operators|generate|pages|docs" >&2; exit 2 ;;
esac
missing=()
for p in "${packages[@]}"; do
  dpkg-query -W -f '${db:Status-Abbrev}' "$p" 2>/dev/null | grep -q ^ii || missing+=("$p")
done
[ ${#missing[@]} -gt 0 ] || exit 0
[ "$(id -u)" = 0 ] || { echo "$0: needs root to install ${missing[*]}" >&2; exit 1; }
echo "installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp) policy=
trap 'rm -f "$log" $policy' EXIT
# The tests need the programs, not the services that some packages start.
[ -e /usr/sbin/policy-rc.d ] || { policy=/usr/sbin/policy-rc.d; printf '#!/bin/sh\nexit 101\n' >$policy; chmod +x $policy; }
apt=(apt-get -q -o DPkg::Lock::Timeout=600 -o Acquire::Retries=5)
apt_install() { { "${apt[@]}" update && "${apt[@]}" install -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; }
progress "installing packages" apt_install || { tail "$log" >&2; exit 1; }
