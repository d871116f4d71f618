#!/bin/bash
# site.sh: builds the site of the documentation into .run/site, and fails for dead links.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v npm >/dev/null || tests/setup.sh docs
# VitePress finds its modules above the pages only.
build=.run/site-build
mkdir -p $build
find $build -mindepth 1 -maxdepth 1 ! -name node_modules -exec rm -r {} +
cp -r hack/site/. $build
git ls-files -co --exclude-standard '*.md' docs/images | xargs cp --parents -t $build
hack/progress.sh "downloading VitePress" hack/retry.sh npm --prefix $build ci --ignore-scripts --silent
TREE=$PWD hack/progress.sh "building the site" $build/node_modules/.bin/vitepress build $build
node $build/anchors.mjs .run/site
echo "the site is in .run/site: python3 -m http.server -d .run/site shows it"
