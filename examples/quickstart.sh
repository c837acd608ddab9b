#!/bin/sh
# `make quickstart`: an agent that rewrites its context, seen from all sides in some minutes on two CPU cores.
# A world that is there already is kept; everything else is made anew. All of it is under runs/quickstart.
set -eu
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
here=runs/quickstart
world=$here/world
run=$here/memopd
begun=$(date +%s)

say() { printf '\n\033[1m%s\033[0m  [%s s]\n' "$1" $(($(date +%s) - begun)); }
do_() { printf '$ %s\n' "$*"; "$@"; }

rm -rf "$here/episodes" "$here/audit.json" "$run"

say "1/6 An invented encyclopedia, its search index, and questions about it"
test -d "$world" || do_ memopd world "$world" --episodes 0

say "2/6 The shipped student answers two questions at a time, and every model call is recorded"
do_ memopd rollout "$world/tasks/dev-q2.parquet" --limit 24 --model models/student --index "$world/index" \
    --max-tokens 96 --max-context 1024 -o "$here/episodes"

say "3/6 The audit: what a trainer that flattens these calls would compute, and what packing them computes"
do_ memopd audit "$here/episodes" --model models/student -o "$here/audit.json"

say "4/6 A few updates of MemOPD, from the shipped teacher"
do_ memopd train configs/quickstart.toml --output "$run"

say "5/6 The same questions before and after"
for which in before after; do
    test $which = before && model=models/student || model=$run/model
    do_ memopd evaluate "$world/tasks/dev-q2.parquet" --limit 128 --model "$model" --index "$world/index" \
        --max-tokens 96 --max-context 1024 --name "$which" -o "$run/evaluation/$which.json"
done

say "6/6 The page"
do_ memopd report "$run"

say "What was found"
python examples/quickstart_found.py "$here"
