"""Table 2: the models of Table 1 on tasks of one question, with dependency."""

from __future__ import annotations

from paper import main
from paper.page import Findings
from paper.settings import Shown
from paper.suite import Work
from paper.trained import COLUMNS as TABLE_1
from paper.trained import Collected, Column, results_caption, results_table

COLUMNS: tuple[Column, ...] = (*TABLE_1[:3], ("dependency ↓ ×10⁵", "dependency", 1e5, 3), TABLE_1[3])


def findings(found: Collected, shown: Shown, work: Work) -> Findings:
    body = [results_table(found, shown, COLUMNS), results_caption(found, work)]
    return Findings({}, body, lambda output: main.draw(found, shown, work.split, output))
