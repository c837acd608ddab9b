"""An importer of your own: a function from a file to episodes. This one reads tables that are separated by tabs.

    episode  task  reward  prompt    completion
    e0       t7    1.0     5 6 7     8 9
    e0       t7    1.0     5 8 9 3   2

PYTHONPATH=examples memopd import CALLS.tsv --format own_importer:read -o EPISODES
"""

import csv
from itertools import groupby

from memopd import Call, Episode


def read(path):
    """One row per call; the calls of an episode follow each other."""
    with path.open(newline="") as file:
        for episode, rows in groupby(csv.DictReader(file, delimiter="\t"), key=lambda row: row["episode"]):
            rows = list(rows)
            calls = [Call(ids(row["prompt"]), ids(row["completion"])) for row in rows]
            yield Episode(episode, rows[0]["task"], calls, float(rows[0]["reward"]))


def ids(text):
    return [int(id) for id in text.split()]
