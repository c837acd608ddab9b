"""Computes log-probabilities, entropies, values and divergences from a teacher for packed rows."""

from memopd.score.divergences import DIVERGENCES, Divergence, divergence_of, reverse_kl
from memopd.score.head import Head, head_of
from memopd.score.rows import packed_rows
from memopd.score.score import Scores, packed_logprobs, score, teacher_target
from memopd.score.states import call_states, decision_states, many_passes
from memopd.score.vocabulary import Target, VocabularyScores, vocabulary_scores

__all__ = [
    "DIVERGENCES",
    "Divergence",
    "Head",
    "Scores",
    "Target",
    "VocabularyScores",
    "call_states",
    "decision_states",
    "divergence_of",
    "head_of",
    "many_passes",
    "packed_logprobs",
    "packed_rows",
    "reverse_kl",
    "score",
    "teacher_target",
    "vocabulary_scores",
]
