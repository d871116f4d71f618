#!/bin/bash
# retry.sh COMMAND...: runs a command that needs the network, up to four times, with a pause between.
set -u
for pause in 5 15 45 ""; do
  "$@" && exit
  status=$?
  [ -z "$pause" ] || { echo "retrying in $pause s: $*" >&2; sleep "$pause"; }
done
exit $status
