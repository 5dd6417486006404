#!/usr/bin/env bash
# All that must pass before a change lands: lint, format, types, tests with coverage, suites, a slice of families. Stops at the first failure.
set -euo pipefail
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
stage tests "$bin/python" -m pytest tests -q -n 2 --dist loadgroup \
  --cov --cov-report=term-missing:skip-covered --cov-fail-under=90
stage suites "$bin/python" -m pytest suites -q -n 2 --dist loadgroup
# A slice of the matrix of all families (`--lsv-arch=all`, 7 minutes): one of each kind that the suites above do not have.
stage families env LSVERIFY_PROFILE=quick "$bin/python" -m pytest suites/test_parity.py suites/test_identities.py -q \
  -n 2 --dist loadgroup --lsv-arch=gpt_oss --lsv-arch=gemma3n --lsv-arch=jamba --lsv-arch=mamba2
printf '\n== all passed in %d s\n' "$SECONDS"
