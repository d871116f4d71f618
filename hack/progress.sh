#!/bin/bash
# progress.sh WHAT COMMAND...: runs a command, and says every 15 s on standard error that WHAT goes on.
# Sourced, it is the function alone.

# progress WHAT COMMAND...: the command may be a function.
progress() {
  local what=$1 status ticker
  shift
  # The ticker ends when nobody has the pipe open any more, whatever ended this shell.
  exec {ticker}> >(began=$SECONDS
    until IFS= read -r -t "${PROGRESS_INTERVAL:-15}" _ || [ $? -le 128 ]; do
      printf '          ... %s: %d s\n' "$what" $((SECONDS - began)) >&2
    done)
  "$@" {ticker}>&-   # not in a condition, where a function's errors would not end it
  status=$?
  exec {ticker}>&-
  return $status
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  set -euo pipefail
  progress "$@"
fi
