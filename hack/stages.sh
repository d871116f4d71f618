#!/bin/bash
# stages.sh STAGE...: runs make for each, until one fails. Output and seconds of each are kept in .run/stages.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p .run/stages
for stage; do
  began=$SECONDS result=passed
  make --no-print-directory "$stage" 2>&1 | tee ".run/stages/$stage.log" || result=failed
  printf '%s %s %d\n' "$stage" "$result" $((SECONDS - began)) >>.run/stages/times
  echo "stage $stage $result after $((SECONDS - began)) s"
  [ $result = passed ] || exit 1
done
