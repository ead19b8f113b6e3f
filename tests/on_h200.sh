#!/usr/bin/env bash
# On a machine with an H200: tests the kernels there, compares them with XLA, and leaves the results in a folder.
#
#   tests/on_h200.sh FOLDER        the folder is $OUT if left out; PYTHON names the interpreter, python3 if left out
#
# Takes at most eight minutes; needs jax with its CUDA plugin, pytest, hypothesis and matplotlib, and no network. A step
# that fails or hangs does not keep the next from running: each is a process of its own, within a limit of its own.
# Exits with 0 if all went well, 1 if a step failed, 2 without a folder.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-${OUT:-}}
if [ -z "$out" ] || ! mkdir -p "$out"; then
  echo "usage: tests/on_h200.sh FOLDER" >&2
  exit 2
fi
out=$(cd "$out" && pwd)
parts=$(mktemp -d)
trap 'rm -rf "$parts"' EXIT
python=${PYTHON:-python3}
export out parts python
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# A process that was killed may hold its memory for a while; leave enough for those that follow.
export XLA_PYTHON_CLIENT_MEM_FRACTION=0.4
deadline=$((SECONDS + 465)) failed=0
: >"$out/summary.txt"

say() { echo "$*" | tee -a "$out/summary.txt"; }

# step NAME SECONDS LOG COMMAND…: runs a command within its limit and the deadline, its output at the end of the log.
step() {
  local name=$1 limit=$2 log=$out/$3 begun=$SECONDS left=$((deadline - SECONDS)) status word
  shift 3
  if [ "$left" -lt "$limit" ]; then limit=$left; fi
  if [ "$limit" -lt 1 ]; then
    say "$name: no time left"
    failed=1
    return
  fi
  timeout -k 3 "$limit" "$@" >>"$log" 2>&1
  status=$?
  case $status in
    0) word=ok ;;
    124 | 137) word="stopped after $limit s" ;;
    *) word="failed ($status)" ;;
  esac
  if [ "$status" -ne 0 ]; then failed=1; fi
  say "$name: $word, $((SECONDS - begun)) s; see ${log##*/}"
}

environment() {
  nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,temperature.gpu,power.draw --format=csv,noheader
  git log -1 --format='commit %H' 2>/dev/null
  "$python" - <<'END'
import platform

import jax

devices = jax.devices()
print("python", platform.python_version(), "jax", jax.__version__, [device.device_kind for device in devices])
capability = str(getattr(devices[0], "compute_capability", "none"))
raise SystemExit(None if capability.startswith("9.") else f"needs a Hopper GPU; compute capability here: {capability}")
END
}

# Stopped, a comparison still prints what it has measured.
compare() { exec "$python" -m pallas_kernels.compare --json --operation "$2" >"$parts/$1.json"; }

# All comparisons in one list, one table and one chart; without the GPU, which may hang by now.
merge() {
  card=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1)
  JAX_PLATFORMS=cpu "$python" - "$parts" "$out" "${card:-unknown card}" <<'END'
import json
from pathlib import Path
import sys

from pallas_kernels.compare import report

parts, out, card = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
rows = []
for part in sorted(parts.glob("*.json")):
    try:
        rows += json.loads(part.read_text())
    except ValueError:
        print(f"comparison {part.stem} left no results")
(out / "compare.json").write_text(json.dumps(rows, indent=1) + "\n")
(out / "compare.txt").write_text(report.table(rows) + "\n")
copies = [row["gigabytes_per_second"] / row["copy_fraction"] for row in rows if row["copy_fraction"]]
if not copies:
    sys.exit("there are no times")
title = f"{card}, copies at {min(copies):,.0f} to {max(copies):,.0f} GB/s"
report.plot_speed(rows, out / "compare.png", title)
END
}

export -f environment compare merge
tests=("$python" -m pytest -v -p no:cacheprovider --tb=short -m hopper)

step environment 40 environment.log bash -c environment
step "tests of rewrite" 130 tests.log "${tests[@]}" tests/pallas_kernels/test_rewrite_on_hopper.py
step "tests of token_read" 60 tests.log "${tests[@]}" tests/pallas_kernels/test_token_read_on_hopper.py
step "comparison of rewrite_and_read" 60 compare.log bash -c "compare 2 rewrite_and_read"
step "comparison of token_read" 60 compare.log bash -c "compare 4 token_read"
step "comparison of reversible_rewrite_and_read" 40 compare.log bash -c "compare 3 reversible_rewrite_and_read"
step "comparison of rewrite" 50 compare.log bash -c "compare 1 rewrite"
deadline=$((SECONDS + 15))
step results 15 compare.log bash -c merge

cat "$out/environment.log"
grep -E '^(FAILED|ERROR)|^=+ .* in [0-9.]+s' "$out/tests.log" | tail -n 25
cat "$out/compare.txt" 2>/dev/null
grep -v '^comparing' "$out/compare.log" | cut -c 1-300 | sort -u | tail -n 20
echo
cat "$out/summary.txt"
exit "$failed"
