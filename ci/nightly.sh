#!/usr/bin/env bash
# Trains tonight's fresh seeds on two cores and says what stands: builds .venv when needed, then runs `lsverify nightly` with the
# given options. Give --resume to let a night that was stopped go on.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
bash "$here/setup.sh"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "$here/../.venv/bin/lsverify" nightly --out "$here/../lsverify-nightly" --processes 2 "$@"
