#!/bin/bash
# release.sh VERSION: makes the release of this commit in dist/. REGISTRY: registry and folder of its images. The same
# commit and the same packages of Debian give the same files.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=progress.sh
. hack/progress.sh
version=${1:?which version?} registry=${REGISTRY:?set REGISTRY to the registry and folder of the images, as in registry.example.com/ctrlmesh}
version=${version#v}
[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+(-[0-9A-Za-z.-]+)?$ ]] || { echo "release.sh: $version is no semantic version, as in 0.1.0" >&2; exit 2; }
[ -z "$(git status --porcelain)" ] || { echo "release.sh: commit or remove the changes of the tree first" >&2; exit 1; }
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct); export SOURCE_DATE_EPOCH
export GOFLAGS="-buildvcs=false -trimpath -tags=grpcnotrace" CGO_ENABLED=0
tools=$(hack/tools.sh release) helm=$(hack/tools.sh helm)
dist=$PWD/dist work=$PWD/.run/release
rm -rf "$dist" "$work"; mkdir -p "$dist" "$work/chart"

compile() { # compile OS ARCHITECTURE OUT PROGRAM...
  local packages=("${@:4}")
  GOOS=$1 GOARCH=$2 progress "building for $1 on $2" go build -ldflags "-s -w -X github.com/ctrlmesh/ctrlmesh/internal/program.version=v$version" \
    -o "$3" "${packages[@]/#/./cmd/}"
}
archive() { # archive OUT DIR: the same for the same content. Helm finds no chart in an archive whose names begin with "./".
  (cd "$2" && tar --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX -c -- *) | gzip -n >"$1"
}

for arch in amd64 arm64; do
  mkdir -p "$work/$arch"
  compile linux $arch "$work/$arch/" ctrlmesh-agent ctrlmesh-manager
  ln -s "$(progress "downloading the packages of Debian for $arch" hack/release/packages.sh $arch)" "$work/$arch/packages"
done
progress "packing the images" "$tools/release" images -repository "$registry" -tag "$version" -dir "$work/images" "$work/amd64" "$work/arm64"
for f in "$work"/images/*.tar; do cp "$f" "$dist/ctrlmesh-$(basename "$f" .tar)-$version.tar"; done
for f in "$work"/images/*.cdx.json; do cp "$f" "$dist/ctrlmesh-$(basename "$f")"; done

for platform in linux/amd64 linux/arm64 darwin/amd64 darwin/arm64 windows/amd64; do
  os=${platform%/*} arch=${platform#*/}
  mkdir -p "$work/plugin/$os-$arch"
  compile "$os" "$arch" "$work/plugin/$os-$arch/" kubectl-ctrlmesh
  cp LICENSE "$work/plugin/$os-$arch/"
  archive "$dist/kubectl-ctrlmesh_${os}_$arch.tar.gz" "$work/plugin/$os-$arch"
done
"$tools/release" krew -tag "$version" "$dist"/kubectl-ctrlmesh_*.tar.gz >"$dist/ctrlmesh.krew.yaml"

chart=$work/chart/ctrlmesh
cp -rL deploy/chart "$chart" # with what its links point to
rm "$chart/.helmignore"
"$tools/release" chart -repository "$registry" -tag "$version" -dir "$work/images" "$chart"
sed -i "s/^version: .*/version: $version/; s/^appVersion: .*/appVersion: $version/" "$chart/Chart.yaml"
"$helm/helm" lint --quiet "$chart"
archive "$dist/ctrlmesh-$version.tgz" "$work/chart" # helm package would write the time
{ cat deploy/default/namespace.yaml; "$helm/helm" template ctrlmesh "$chart" --kube-version 1.30.0 --namespace ctrlmesh-system --no-hooks; } >"$dist/ctrlmesh-$version.yaml"
(cd "$dist" && sha256sum -- * >SHA256SUMS)
echo "made release $version in dist/:"; ls -l "$dist"
