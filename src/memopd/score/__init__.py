"""Packed rows to log-probabilities, entropies and teacher divergences."""

from memopd.score.head import Head, head_of
from memopd.score.states import backbone, call_states, decision_states
from memopd.score.vocabulary import Target, VocabularyScores, vocabulary_scores

__all__ = [
    "Head",
    "Target",
    "VocabularyScores",
    "backbone",
    "call_states",
    "decision_states",
    "head_of",
    "vocabulary_scores",
]
