#!/bin/sh
# Everything that the experiment on real questions reads: index, tasks, demonstrations. A few minutes of two cores.
#
#   sh paper/real/prepare.sh DATA TOKENIZER [WHERE]
#
# DATA has the questions and passages (paper/README.md says which); TOKENIZER is the folder or hub name of the student;
# WHERE is runs/real unless you name another. What exists is kept, so an interrupted command can be repeated.
set -eu
cd "$(dirname "$0")/../.."
PATH="$PWD/.venv/bin:$PATH"
data=${1:?name the folder with the questions and passages} tokenizer=${2:?name the tokenizer of the student}
where=${3:-runs/real}
split=$data/more/split.json
mkdir -p "$where/questions" "$where/tasks" "$where/demonstrations"

# A data set is one file, so that its questions are grouped across the files that they came in.
joined() { # output, inputs
    to=$1
    shift
    test -e "$to" || { cat "$@" > "$to.part" && mv "$to.part" "$to"; }
}
joined "$where/questions/nq.jsonl.gz" "$data/nq.jsonl.gz"
joined "$where/questions/hotpotqa.jsonl.gz" "$data/hotpotqa.jsonl.gz" "$data/more/hotpotqa-train.jsonl.gz" \
    "$data/more/hotpotqa-dev.jsonl.gz"
joined "$where/questions/squad.jsonl.gz" "$data/more/squad-train.jsonl.gz" "$data/more/squad-dev.jsonl.gz"
joined "$where/corpus.jsonl.gz" "$data/corpus.jsonl.gz" "$data/more/corpus.jsonl.gz"
test -e "$where/index" || memopd index build "$where/corpus.jsonl.gz" -o "$where/index"

tasks() { # output, part, k, more options and questions
    to=$where/tasks/$1.parquet part=$2 k=$3
    shift 3
    test -e "$to" || memopd tasks build "$@" --split "$split" --part "$part" -k "$k" --seed 0 -o "$to"
}
# For training, fewer tasks of SQuAD than there are, which would be nine tenths of all. 40 updates of 32 tasks see 1,280 of them.
tasks rl-q2 rl 2 --limit 740 "$where/questions/nq.jsonl.gz" "$where/questions/hotpotqa.jsonl.gz" \
    "$where/questions/squad.jsonl.gz"
tasks dev-q2 dev 2 --limit 100 "$where/questions/nq.jsonl.gz" "$where/questions/hotpotqa.jsonl.gz" \
    "$where/questions/squad.jsonl.gz"
for part in dev test; do
    for of in nq hotpotqa squad; do
        for k in 1 2 8 16; do
            tasks $part-$of-q$k $part $k "$where/questions/$of.jsonl.gz"
        done
    done
done

demonstrations() { # output, part, horizons, more options
    to=$where/demonstrations/$1.parquet part=$2 k=$3
    shift 3
    test -e "$to" || memopd demonstrate "$where/questions/nq.jsonl.gz" "$where/questions/hotpotqa.jsonl.gz" \
        "$where/questions/squad.jsonl.gz" --split "$split" --part "$part" -k "$k" --yes-no \
        --index "$where/index" --tokenizer "$tokenizer" -o "$to" "$@"
}
demonstrations sft sft 1,2,4,8,16 --max-context 8192
demonstrations rl rl 1,2,4,8,16 --max-context 8192 --limit 2500
