"""Divides a question file into parts that share no question: split_questions.py QUESTIONS SPLIT."""

import json
import random
import sys

from memopd.tasks.files import read_questions

questions, output = sys.argv[1:]
ids = [question.id for question in read_questions(questions)]
random.Random(0).shuffle(ids)
n = len(ids) // 8
parts = {"sft": ids[: 4 * n], "rl": ids[4 * n : 6 * n], "dev": ids[6 * n : 7 * n], "test": ids[7 * n :]}
with open(output, "w") as file:
    json.dump(parts, file)
print(f"{output}: " + ", ".join(f"{len(part)} questions for {name}" for name, part in parts.items()))
