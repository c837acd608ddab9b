#!/bin/sh
# Virtual environments with other people's clients, in the folder given or in the user's cache: made once, 700 MB, a minute
# or two. There are two, because the clients want different versions of openai. Neither has torch.
# Exit status 3, after saying why, where there is nowhere to get the packages from.
set -eu
home=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/memopd/clients}
here=$(cd "$(dirname "$0")" && pwd)
for name in openai-3 openai-2; do
    pins=$here/$name.txt
    cmp -s "$pins" "$home/$name/.ready" && continue
    rm -rf "${home:?}/$name"
    mkdir -p "$home"
    "${PYTHON:-python3}" -m venv "$home/$name"
    pip="$home/$name/bin/python -m pip"
    if ! $pip index versions verifiers --retries 1 --timeout 15 > "$home/index.log" 2>&1; then
        tail -n 1 "$home/index.log"
        echo "The tests of other people's clients are skipped: no package index was reached that has verifiers (PIP_INDEX_URL names another)"
        exit 3
    fi
    echo "making $home/$name, once"
    $pip install -qq --no-compile --requirement "$pins"
    cp "$pins" "$home/$name/.ready"
done
