#!/usr/bin/env bash
# One stage of training on a machine with a GPU: training/run_on_gpu.sh STAGE [OPTIONS]
#
#   check           the captured graph against the plain one, and milliseconds per bucket
#   train           a piece of training; put --resume among the options to go on
#   evaluate        the skill table of the run as it stands (--items N)
#   weights         copy the weights of the run out, without training
#
# The run lives in .build/nano and stays on the machine; what leaves it goes to $OUT (default: out):
# weights-*.safetensors and progress.json, or a report; each under 16 MB. The compiler's cache is
# kept as well.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

stage=${1:?say which stage: check, train, evaluate or weights}
shift
out=${OUT:-out}
run=.build/nano
mkdir -p "$out" "$run"
export PYTHONPATH=src:. PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4
export TORCHINDUCTOR_CACHE_DIR="$PWD/.build/inductor"
python=${PYTHON:-python3}

take() { cp "$run"/weights-*.safetensors "$run"/progress.json "$out"/; }

case $stage in
    check) "$python" -m training.check_device --out "$out" ;;
    train) "$python" -m training.train --out "$run" "$@" && take ;;
    evaluate) "$python" -m training.evaluate "$run" --json "$out/skills.json" "$@" ;;
    weights) take ;;
    *) echo "unknown stage $stage: check, train, evaluate or weights" >&2; exit 2 ;;
esac
