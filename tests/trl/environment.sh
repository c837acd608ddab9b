#!/bin/sh
# A virtual environment with TRL and PrefixGrouper, in the folder given or in the user's cache: made once, 60 MB, half a
# minute. It adds to the packages of .venv, so that torch and transformers are not installed twice, and leaves .venv as
# it is.
# Exit status 3, after saying why, where there is nowhere to get TRL from.
set -eu
home=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/memopd/trl}
trl=trl==1.16.0
grouper=prefix-grouper==0.0.1.post1
cd "$(dirname "$0")/../.."
python=$PWD/.venv/bin/python
made_of="$trl $grouper $("$python" -VV)"
if [ "$(cat "$home/.ready" 2> /dev/null)" != "$made_of" ]; then
    if ! "$python" -m pip index versions trl --retries 1 --timeout 15 > /dev/null 2>&1; then
        echo "TRL's tests are skipped: no package index was reached that has trl (PIP_INDEX_URL names another)"
        exit 3
    fi
    echo "making $home, once"
    "$python" -m venv --without-pip "$home"
    rm -f "$home/.ready"
fi
# The checkout may be another one than the last time.
packages=$("$python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
here=$("$home/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
echo "import site; site.addsitedir('$packages')" > "$here/memopd.pth"
if [ ! -e "$home/.ready" ]; then
    "$python" -m pip --python "$home/bin/python" install -qq --no-compile --constraint constraints.txt $trl
    "$python" -m pip --python "$home/bin/python" install -qq --no-compile --no-deps $grouper
    echo "$made_of" > "$home/.ready"
fi
