#!/bin/bash
# build.sh [PART...]: builds what is missing into the cache and links it from .run; the first time it
# takes some minutes. Parts: tools k8s containerd runc cni coredns images (default: all of these), and
# etcd, which only backups need.
# shellcheck source=lib.sh
. "$(dirname "$(readlink -f "$0")")/lib.sh"

containerd=v2.4.2 runc=v1.5.2 cni=v1.9.1
required() { awk -v m="$2" '$1 == "require" && $2 == m {print $3} $1 == m && $2 ~ /^v/ {print $2}' "$HERE/src/$1" | head -n 1; }
# KUBERNETES=1.X: another minor than the usual one.
modules=k8s/${KUBERNETES:-go}
[ -e "$HERE/src/$modules.mod" ] || die "no Kubernetes $KUBERNETES: there are $(cd "$HERE/src/k8s" && echo [0-9]*.mod)"
k8s=$(required "$modules.mod" k8s.io/kubernetes)
coredns=$(required coredns/go.mod github.com/coredns/coredns)

export GOFLAGS=-buildvcs=false GOWORK=off CGO_ENABLED=0
say() { printf '[%4d s] %s\n' $SECONDS "$*"; }

apt_install() { # apt_install LOG PACKAGE...
  local apt=(apt-get -q -o DPkg::Lock::Timeout=600 -o Acquire::Retries=5)
  local install=("${apt[@]}" install -y --no-install-recommends "${@:2}")
  { "${install[@]}" || { "${apt[@]}" update && "${install[@]}"; }; } >"$1" 2>&1
}

# Debian packages. nft and iptables are called by kube-proxy and by the CNI's portmap.
packages() {
  local missing=() p
  for p in "$@"; do dpkg-query -W -f '${db:Status-Abbrev}' "$p" 2>/dev/null | grep -q ^ii || missing+=("$p"); done
  [ ${#missing[@]} -gt 0 ] || return 0
  need_root
  say "installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  local log; log=$(mktemp)
  progress "installing packages" apt_install "$log" "${missing[@]}" || { tail "$log" >&2; die "apt-get failed"; }
  rm "$log"
}

# compile OUT PACKAGE... with LDFLAGS, TAGS: a line now and then, for the large ones take minutes.
compile() {
  local out=$1; shift
  GOBIN=$out "$ROOT/hack/retry.sh" go install -v -trimpath -tags "${TAGS:-}" -ldflags "-s -w ${LDFLAGS:-}" "$@" 2>&1 |
    awk -v start=$SECONDS '/^go: downloading|^[^ :#]+$/ {if (++n % 300 == 0) {printf "          ... %d packages\n", n; fflush()}; next} {print > "/dev/stderr"}'
}

# build_PART OUT: builds the part into the directory OUT.
build_tools() { cd "$HERE/src/tools"; compile "$1" ./...; }
build_k8s() {
  cd "$HERE/src/k8s"
  local pkg v=${k8s#v} flags=; local minor=${v#*.}
  for pkg in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
    flags+=" -X $pkg.gitVersion=$k8s -X $pkg.gitMajor=${v%%.*} -X $pkg.gitMinor=${minor%%.*} -X $pkg.gitTreeState=clean"
  done
  LDFLAGS=$flags compile "$1" .
  mv "$1/k8s" "$1/hyperkube"
  for c in $COMPONENTS kubelet kube-proxy kubectl; do ln -s hyperkube "$1/$c"; done
}
build_containerd() {
  local m=github.com/containerd/containerd/v2 c
  for c in containerd containerd-shim-runc-v2 ctr; do
    TAGS="no_btrfs no_devmapper no_zfs" LDFLAGS="-X $m/version.Version=$containerd" compile "$1" $m/cmd/$c@$containerd
  done
}
build_runc() {   # the only one with C in it
  packages gcc libc6-dev pkg-config libseccomp-dev
  CGO_ENABLED=1 TAGS="seccomp netgo osusergo" LDFLAGS="-X main.version=${runc#v} -linkmode external -extldflags -static" \
    compile "$1" github.com/opencontainers/runc@$runc
}
build_cni() {
  local m=github.com/containernetworking/plugins p
  for p in main/bridge main/loopback ipam/host-local meta/portmap; do compile "$1" $m/plugins/$p@$cni; done
}
build_etcd() { cd "$HERE/src/etcd"; compile "$1" .; mv "$1/etcd" "$1/etcdbackup"; }
build_coredns() { cd "$HERE/src/coredns"; compile "$1" .; }
build_images() {
  local a applets=()
  for a in $(busybox --list); do [ "$a" = busybox ] || applets+=("bin/$a@busybox"); done
  local parts=$RUN/parts
  { "$PACK/packimage" -o "$1/pause.tar" -ref localhost/pause:1 -entrypoint /pause "$parts/tools/pause=/pause"
    "$PACK/packimage" -o "$1/busybox.tar" -ref localhost/busybox:1 -cmd /bin/sh \
      "$(command -v busybox)=/bin/busybox" "$parts/tools/gonet=/bin/gonet" "${applets[@]}"
    "$PACK/packimage" -o "$1/coredns.tar" -ref localhost/coredns:1 -entrypoint /coredns "$parts/coredns/coredns=/coredns"
  } >/dev/null
}

build() { ( "build_$1" "$2" ); }   # build NAME OUT

# part NAME VERSION [SOURCE...]: its place in the cache is named by the version and by a hash of the
# sources and of the recipe, so checkouts share what is equal and a bump builds only what it changes.
part() {
  local name=$1 version=$2 key dir tmp; shift 2
  key=$({ declare -f "build_$name" compile; echo "${NEEDS:-}"; cat "$@" </dev/null; } | sha256sum | cut -c1-10)
  dir=$CACHE/$name${version:+-$version}-$key
  if [ ! -d "$dir" ]; then
    say "building $name${version:+ $version}"
    packages ca-certificates   # for the module proxy
    tmp=$CACHE/.new.$$; rm -rf "$tmp"; mkdir -p "$tmp"
    progress "building $name" build "$name" "$tmp"
    mv -T "$tmp" "$dir" 2>/dev/null || [ -d "$dir" ] || die "cannot write $dir"   # or another build was first
    say "built $name ($(du -sm "$dir" | cut -f1) MB)"
  fi
  ln -sfnT "$dir" "$RUN/parts/$name"
  case $name in cni | images) return ;; esac
  for f in "$dir"/*; do ln -sfnT "$f" "$RUN/bin/${f##*/}"; done
}

command -v go >/dev/null || die "needs Go"
mkdir -p "$CACHE" "$RUN/bin" "$RUN/parts"
trap 'rm -rf "$CACHE/.new.$$"' EXIT
trap 'exit 130' INT TERM
for d in "$CACHE"/.new.*; do [ ! -d "$d" ] || [ -d "/proc/${d##*.}" ] || rm -rf "$d"; done   # of builds that were killed

[ $# -gt 0 ] || set -- tools k8s containerd runc cni coredns images
for name; do
  case $name in
  tools) part tools "" "$HERE"/src/tools/go.{mod,sum} "$HERE"/src/tools/*/*.go ;;
  k8s) GOFLAGS="$GOFLAGS -modfile=$HERE/src/$modules.mod" part k8s "$k8s" "$HERE/src/$modules".{mod,sum} "$HERE"/src/k8s/main.go ;;
  etcd) part etcd "" "$HERE"/src/etcd/* ;;
  containerd) part containerd $containerd ;;
  runc) part runc $runc ;;
  cni) part cni $cni ;;
  coredns) part coredns "$coredns" "$HERE"/src/coredns/* ;;
  images)
    packages busybox-static iproute2 nftables iptables
    PACK=$("$ROOT/hack/tools.sh" release)
    NEEDS=$(basename -a "$PACK" "$(readlink "$RUN/parts/tools")" "$(readlink "$RUN/parts/coredns")") part images "" "$(command -v busybox)" ;;
  *) die "no such part: $name" ;;
  esac
done
