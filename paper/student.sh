#!/bin/sh
# How models/student was made: five parts of supervised learning, about twenty minutes of one GPU. WHERE is a new folder.
#
#   sh paper/student.sh WHERE
#
# What it learns: first to copy and to read, on short tasks; then to keep its place in long ones, where one-hop questions
# suffice; and last to imitate an oracle that misreads a quarter of what it finds, which leaves a student that works through
# sixteen questions in order and is often wrong: what is left to learn is the same on two questions and on sixteen.
set -eu
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
where=${1:?give a new folder to make it in}
world=$where/world
new=$where/oracle

part() { # name, start, tokens, rate, episodes, more options
    name=$1 start=$2 tokens=$3 lr=$4 episodes=$5
    shift 5
    memopd sft configs/world-gpu.toml --output "$where/$name" --sft.start "$start" --sft.tokens "$tokens" --sft.lr "$lr" \
        --sft.tokenizer "$world/tokenizer" --sft.episodes "$episodes" --sft.dev "" --tasks.dev "" \
        --run.dev_every 0 --run.save_every 1000 "$@"
}
script() { # policy, tasks, episodes, more options
    policy=$1 tasks=$2 to=$3
    shift 3
    memopd rollout "$world/tasks/$tasks.parquet" --policy "$policy" --tokenizer "$world/tokenizer" --index "$world/index" \
        --max-context 32768 --batch 256 -o "$new/$to" "$@"
}

memopd world "$world" --episodes 24000
for k in 1 2 8 16; do
    memopd tasks build "$world/tasks/train-q1.parquet" --kind one-hop -k $k -o "$world/tasks/one-hop-q$k.parquet"
done
script oracle one-hop-q1 one-hop-q1 --limit 3000
script oracle one-hop-q2 one-hop-q2 --limit 3000
script oracle one-hop-q8 one-hop-q8
script oracle one-hop-q16 one-hop-q16
script oracle train-q2 q2 --limit 800
script careless train-q1 careless-q1 --limit 3000
script careless train-q2 careless-q2 --limit 4000
script careless train-q8 careless-q8
script careless train-q16 careless-q16
script careless one-hop-q8 careless-one-hop-q8
script careless one-hop-q16 careless-one-hop-q16

o=$world/oracle/train/mem1
all=$o/q1.parquet,$o/q2.parquet,$o/q8.parquet,$o/q16.parquet
one_hop=$new/one-hop-q1,$new/one-hop-q2,$new/one-hop-q8,$new/one-hop-q16,$new/q2
careless=$new/careless-q1,$new/careless-q2,$new/careless-q8,$new/careless-q16
part student-1 configs/models/student.json 110000000 1.5e-3 "$all"
part student-2 "$where/student-1/model" 60000000 1.2e-3 "$all" --sft.short 0
part student-3 "$where/student-2/model" 100000000 1e-3 "$one_hop" --sft.short 0
part student-4 "$where/student-3/model" 140000000 1e-3 "$careless" --sft.short 0 # without its faulty episodes: sft.keep
part student-5 "$where/student-4/model" 60000000 6e-4 "$careless,$new/careless-one-hop-q8,$new/careless-one-hop-q16" \
    --sft.short 0 --sft.keep ""
