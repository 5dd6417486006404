#!/usr/bin/env bash
# Proves or refuses gradient parity: builds .venv when needed, then runs `lsverify gate` with the given options.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
bash "$here/setup.sh"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "$here/../.venv/bin/lsverify" gate --out "$here/../lsverify-out" "$@"
