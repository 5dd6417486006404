#!/usr/bin/env bash
# All that must pass before a change lands: lint, format, types, tests, suites, a slice of families, a share of the record of planted
# faults. Stops at the first failure. With --cov the tests are counted by branch, which takes twice as long: for the night.
set -euo pipefail
coverage=()
if [[ ${1:-} == --cov ]]; then
  coverage=(--cov --cov-report=term-missing:skip-covered --cov-fail-under=90)
elif (($#)); then
  echo "test: option '$1' is not known: give --cov or nothing" >&2
  exit 2
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash ci/setup.sh

export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false WANDB_MODE=offline
bin=.venv/bin

stage() {
  local name=$1 began=$SECONDS
  shift
  printf '\n== %s (at %d s): %s\n' "$name" "$SECONDS" "$*"
  if "$@"; then
    printf '== %s passed in %d s\n' "$name" $((SECONDS - began))
  else
    local status=$?
    printf '== %s FAILED in %d s (exit %d)\n' "$name" $((SECONDS - began)) "$status" >&2
    exit "$status"
  fi
}

stage lint "$bin/ruff" check .
stage format "$bin/ruff" format --check .
stage types "$bin/mypy"
stage tests "$bin/python" -m pytest tests -q -n 2 --dist loadgroup "${coverage[@]}"
stage suites "$bin/python" -m pytest suites -q -n 2 --dist loadgroup
# A slice of the matrix of all families (`--lsv-arch=all`, 7 minutes): one of each kind that the suites above do not have.
stage families env LSVERIFY_PROFILE=quick "$bin/python" -m pytest suites/test_parity.py suites/test_identities.py -q \
  -n 2 --dist loadgroup --lsv-arch=gpt_oss --lsv-arch=gemma3n --lsv-arch=jamba --lsv-arch=mamba2
# Which problems of the record are run again follows from the commit, so that another share is seen each time.
seed=$((16#$(git rev-parse --short=7 HEAD 2>/dev/null || echo 0)))
stage faults "$bin/lsverify" faults --again fixtures/faults/float64.json --share 0.02 --seed "$seed" --workers 2
printf '\n== all passed in %d s\n' "$SECONDS"
