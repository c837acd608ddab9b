#!/bin/sh
# `make quickstart`: record an agent, audit it, train it, evaluate it and report, in some minutes on two CPU cores.
# An existing world is kept, and everything else is made anew, under runs/quickstart.
set -eu
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # the models are too small for more threads to pay
here=runs/quickstart
world=$here/world
run=$here/memopd
begun=$(date +%s)

say() { printf '\n%s  [%s s]\n' "$1" $(($(date +%s) - begun)); }
do_() { printf '$ %s\n' "$*" && "$@"; }
evaluate() { # name, model: two questions per task, the same tasks and random numbers for everyone
    do_ memopd evaluate "$world/tasks/dev-q2.parquet" --limit 128 --model "$2" --index "$world/index" \
        --max-tokens 96 --max-context 1024 --name "$1" -o "$run/evaluation/$1.json"
}

rm -rf "$here/episodes" "$here/audit.json" "$here/after.txt" "$run"

say "1/6 An invented encyclopedia, its search index, and questions about it"
test -d "$world" || do_ memopd world "$world" --episodes 0

say "2/6 The shipped student answers two questions at a time; every model call is recorded"
do_ memopd rollout "$world/tasks/dev-q2.parquet" --limit 24 --model models/student --index "$world/index" \
    --max-tokens 96 --max-context 1024 -o "$here/episodes"

say "3/6 The audit: what a trainer that flattens these calls would compute, and what packing them computes"
do_ memopd audit "$here/episodes" --model models/student -o "$here/audit.json"

say "4/6 A few updates of MemOPD with the shipped teacher; one step each, so that KL to the sampling policy and clip are 0"
do_ memopd train configs/quickstart.toml --output "$run"

say "5/6 The same 128 dev tasks before and after"
evaluate after "$run/model" > "$here/after.txt" & # each has a core
evaluate before models/student
wait $!
cat "$here/after.txt"

say "6/6 The page"
mkdir -p "$run/audit" && cp "$here/audit.json" "$run/audit/before.json"
do_ memopd report "$run"

say "What was found"
python examples/quickstart_found.py "$here"
