"""Evaluation: scores and costs of episodes, their statistics, and the paper's tables."""

from memopd.evaluate.metrics import Measures, measure, measure_all, measure_outcome, measure_outcomes
from memopd.evaluate.statistics import Comparison, Estimate, over_seeds, over_tasks, paired_bootstrap
from memopd.evaluate.summary import Result, Setting, compare, summarise
from memopd.evaluate.tables import comparison_table, costs_table, table_1, table_2

__all__ = [
    "Comparison",
    "Estimate",
    "Measures",
    "Result",
    "Setting",
    "compare",
    "comparison_table",
    "costs_table",
    "measure",
    "measure_all",
    "measure_outcome",
    "measure_outcomes",
    "over_seeds",
    "over_tasks",
    "paired_bootstrap",
    "summarise",
    "table_1",
    "table_2",
]
