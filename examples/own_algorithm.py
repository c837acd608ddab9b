"""An algorithm of your own: one class that gives credit and a loss, named in the configuration.

PYTHONPATH=examples memopd train CONFIG --output RUN --optimise.algorithm own_algorithm:Reinforce
"""

from memopd.train.algorithms import Credit


class Reinforce:
    """REINFORCE with the mean of all episodes as its baseline. No critic, no ratio, no clip."""

    needs_critic = False

    def __init__(self, reference):  # settings of [optimise] arrive under their names: optimise.reference
        self.reference = reference

    def credit(self, experience):
        """An advantage for each sampled token: what its episode earned, compared with all episodes of the step."""
        centred = experience.outcome - experience.outcome.mean()
        return Credit(centred[experience.episode] - self.reference * experience.penalty)

    def loss(self, tokens):
        """A sum: it is divided by the number of tokens of the whole mini-batch, whatever packs they are in."""
        return -(tokens.logp * tokens.advantage).sum()
