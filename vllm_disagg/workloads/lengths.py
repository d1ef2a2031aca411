"""Named distributions of prompt and answer lengths, for use without a trace."""

from __future__ import annotations

from random import Random

import msgspec

from ..errors import ConfigError

MAX_REDRAWS = 1000  # of one request: its limit leaves less than about one draw in a hundred


class LengthDistribution(msgspec.Struct, frozen=True):
    """Log-normal prompts and answers, drawn again while prompt + answer reaches `limit`.

    The location parameters are solved so that the means after truncation are those of the paper.
    """

    prompt: tuple[float, float]  # mean and deviation of the logarithm of its tokens
    answer: tuple[float, float]
    limit: int = 2048
    cut: tuple[int, int] | None = None  # prompts are truncated to a uniform draw from this range

    def draw(self, random: Random) -> tuple[int, int]:
        """Draws the tokens of a prompt and of its answer.

        Raises ConfigError if hardly any draw is below the limit.
        """
        for _ in range(MAX_REDRAWS):
            prompt = max(1, round(random.lognormvariate(*self.prompt)))
            answer = max(1, round(random.lognormvariate(*self.answer)))
            if self.cut:
                prompt = min(prompt, random.randint(*self.cut))
            if prompt + answer < self.limit:
                return prompt, answer
        raise ConfigError(
            f"--max-model-len: hardly any request of this workload has at most {self.limit - 1}"
            " tokens"
        )


# Mean tokens in/out 755.5/200.3, 171.3/98.2 and 1738.3/90.7 with the OPT tokenizer (DistServe,
# figure 7). The deviations are assumptions of this project: the paper prints no medians.
NAMED_DISTRIBUTIONS = {
    "sharegpt-like": LengthDistribution((6.805711, 1.0), (4.945537, 1.0)),
    "humaneval-like": LengthDistribution((5.020300, 0.5), (4.406787, 0.6)),
    "longbench-like": LengthDistribution((8.077833, 0.6), (4.520791, 0.7), cut=(1750, 2039)),
}
