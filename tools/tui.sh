#!/bin/sh
# `make tui`: with no stored run, record one on this machine first; then open the TUI, or print its report.
set -eu
bin=$1
if [ -z "$("$bin/costlab" runs --ids)" ]; then
    echo "No stored run yet: recording one on this machine (a few minutes at most)." >&2
    if ls /dev/nvidia[0-9]* >/dev/null 2>&1; then preset=1b; else preset=smoke; fi
    "$bin/costlab" run --preset "$preset" >/dev/null
fi
if [ -t 0 ] && [ -t 1 ]; then
    exec "$bin/costlab" tui last
fi
exec "$bin/costlab" report last --format text
