"""What `make quickstart` found, in a few lines: python examples/quickstart_found.py runs/quickstart"""

import json
import sys
from pathlib import Path
from statistics import fmean

from memopd.evaluate import Measures, compare

here = Path(sys.argv[1])
run = here / "memopd"

audit = json.loads((here / "audit.json").read_text())
equal = audit["equivalence"]
rows = {row["representation"]: row for row in audit["representations"]}
print(
    f"{audit['episodes']} episodes, {audit['calls']} model calls, {equal['decisions']:,} sampled tokens, scored again:"
)
for name, representation in (("flattened", "persistent history"), ("packed", "reconstructed packing")):
    row = rows[representation]
    print(
        f"  {name:<9} one token in a hundred is off by {row['p99_logprob']:.2g} or more in log p; PPO would clip "
        f"{100 * row['false_clip']:.2f} % of all, though the policy has not changed"
    )
print(
    f"  packing is {'' if equal['passed'] else 'NOT '}equivalent to the calls run alone, "
    f"in 1 / {equal['tokens'] / equal['rows']:.2f} of the rows"
)

steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
saved, gap, divergence = (fmean(s[name] for s in steps) for name in ("rows_saved", "sampler_gap", "loss_opd"))
print(
    f"{len(steps)} updates of {steps[-1]['episodes']:.0f} episodes: {100 * saved:.0f} % of the rows saved by sharing; "
    f"sampler and trainer agree to {gap:.0e} in log p"
)
print(f"  divergence from the teacher, in the states of the calls: {divergence:.3f} per token")

before, after = (json.loads((run / "evaluation" / f"{name}.json").read_text()) for name in ("before", "after"))
a, b = ([Measures(**m) for m in which["tasks"][0][0]] for which in (after, before))
print(f"{len(a)} dev tasks of two questions, before and after, compared task by task:")
for metric in ("em", "f1"):
    was, now = (which["results"][0]["metrics"][metric]["mean"] for which in (before, after))
    found = compare(a, b, metric)
    verdict = "beyond chance" if found.low > 0 or found.high < 0 else "may be chance"
    print(
        f"  {metric.upper()}  {was:.3f} → {now:.3f} of 2: {found.difference:+.3f}, 95 % interval "
        f"{found.low:+.3f} to {found.high:+.3f}: {verdict}"
    )
print(f"README.md and paper/README.md show what longer training does. The model: {run / 'model'}")
print("To go on by hand: . .venv/bin/activate, and `memopd --help`")
print(f"Curves, tables, and episodes token by token: {(run / 'report.html').resolve().as_uri()}")
