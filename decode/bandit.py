"""Which arm to decode with next, learned while decoding: `--tree auto:online`, `--proposer router`. Needs no torch.

For `auto:online` arm 0 is no draft, and the others draft trees. An arm is played for rounds of `ROUND` steps, and its
value is its speed: mean tokens per step over mean seconds per step.

* Choice: the highest upper confidence bound of the speed (UCB, with the variance that was seen of the tokens per step).
* Change: a cumulative sum of every arm's standardised rounds; above `ALARM` the arm begins anew, and what is known of
  the other drafting arms counts no more than one round, because all of them draft with the same draft.
* Price: an arm other than the one that is fastest so far is played only while the time that such rounds have lost is
  within `SHARE` of all time. An arm that has waited long enough for its round to be within its part of that share is
  played whatever its bound, since only playing a draft shows that the text has become easy for it.

Regret. This is CUSUM-UCB (Liu, Lee, Shroff, AAAI 2018, arXiv 1711.03539), whose regret against the best arm of every
moment is O(sqrt(T c log(T / c))) over T rounds with c changes, for rewards in [0, 1] and a forced exploration tuned to
T and c. Neither is known here, so exploration is a fixed share, as in conservative bandits (Wu et al., ICML 2016, arXiv
1602.04282): what is lost to arms that looked worse, at the speeds that were measured, is at most `SHARE` of the time,
one round of each arm at the beginning and what one round may turn out dearer than expected, on any stream. What a
change costs besides is the delay of the alarm. Rewards that depend on each other make alarms more frequent; the rounds
that follow an alarm have the same price.

A router has a bandit for every request (`branch`), whose arms are drafts and whose seconds are what a step is reckoned
to cost. It begins with what earlier requests gave, counted as one round of each draft, and goes by its own text from
there. All of them share one account of what was lost to trying.
"""

import math
from collections import deque
from dataclasses import dataclass, field, replace

ROUND = 8  # steps
SHARE = 0.02  # of all time, that rounds of arms which look worse may lose
MEMORY = 256  # steps of an arm that its mean remembers
TIMES = 64  # latest steps of an arm that its seconds per step are taken from
SLACK, ALARM = 0.5, 6.0  # of the cumulative sums, in standard deviations of a round
REST = 4  # rounds that pass at least before an arm that looks worse is tried again only to see whether it still is
STREAM = 64  # steps of an arm that are remembered over all requests


@dataclass
class Arm:
    """What is known of one arm: weighted counts of steps, tokens and their squares, and the seconds of late steps."""

    steps: float = 0.0
    tokens: float = 0.0
    squares: float = 0.0
    late_s: deque[float] = field(default_factory=lambda: deque(maxlen=TIMES))
    rise: float = 0.0
    fall: float = 0.0
    played_at_s: float = 0.0
    all_steps: int = 0
    all_tokens: float = 0.0
    all_s: float = 0.0

    @property
    def mean(self) -> float:
        """Tokens per step."""
        return self.tokens / self.steps

    @property
    def variance(self) -> float:
        """Variance of the tokens per step; not 0 for an arm of which few steps are known."""
        return max(0.0, self.squares / self.steps - self.mean**2) + 1 / (self.steps + 1)

    @property
    def step_s(self) -> float:
        """Seconds per step; a pause counts as three steps at most."""
        most = 3 * sorted(self.late_s)[len(self.late_s) // 2]
        return sum(min(seconds, most) for seconds in self.late_s) / len(self.late_s)

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.mean / self.step_s

    def took(self, tokens: float, seconds: float) -> None:
        """Record one step of this arm; it counts for the mean when its round is over."""
        self.late_s.append(seconds)
        self.all_steps, self.all_tokens, self.all_s = self.all_steps + 1, self.all_tokens + tokens, self.all_s + seconds

    def record(self) -> dict[str, int | float | None]:
        """What it gave so far: steps, and tokens per step."""
        return {
            "steps": self.all_steps,
            "tokens_per_step": self.all_tokens / self.all_steps if self.all_steps else None,
        }

    def bound(self, steps: float) -> float:
        """The upper confidence bound of the speed, when `steps` count of all arms together."""
        return (self.mean + math.sqrt(2 * self.variance * math.log(steps) / self.steps)) / self.step_s

    def forget(self, steps: float) -> None:
        """Count what is known as `steps` steps at most."""
        if self.steps > steps:
            kept = steps / self.steps
            self.steps, self.tokens, self.squares = steps, self.tokens * kept, self.squares * kept

    def changed(self, mean: float) -> bool:
        """Whether rounds such as this one, of `mean` tokens per step, can no longer be what the arm gave before."""
        if self.steps < 2 * ROUND:
            return False
        far = (mean - self.mean) / math.sqrt(self.variance / ROUND)
        self.rise, self.fall = max(0.0, self.rise + far - SLACK), max(0.0, self.fall - far - SLACK)
        return max(self.rise, self.fall) > ALARM


@dataclass
class Account:
    """The time of all steps, and what trying arms that looked worse has lost of it."""

    all_s: float = 0.0
    lost_s: float = 0.0


class Bandit:
    """Chooses among `count` arms: `choose` before a step, `learn` after it. `resting`: arm 0 is no draft."""

    def __init__(self, count: int, *, resting: bool = True) -> None:
        self.arms = [Arm() for _ in range(count)]
        self.changes = 0
        self._resting, self._account = resting, Account()
        self._stream: Bandit | None = None
        self._arm, self._left = 0, ROUND
        self._price_s: float | None = None  # what this round is expected to lose; None where its arm is the fastest
        self._tokens = self._squares = self._round_s = 0.0

    def branch(self) -> "Bandit":
        """A bandit for one request. What is known counts as one round of each arm, and what it learns is known here."""
        one = Bandit(len(self.arms), resting=self._resting)
        one.arms = [replace(arm, late_s=deque(arm.late_s, TIMES)) for arm in self.arms]
        for arm in one.arms:
            arm.forget(ROUND)
        one._stream, one._account = self, self._account
        one._arm = one._next()
        return one

    def choose(self) -> int:
        """The arm of the next step. It depends on steps that are over, and on nothing that is yet to be drawn."""
        if not self._left:
            self._close()
            self._arm, self._left = self._next(), ROUND
        return self._arm

    def learn(self, tokens: float, seconds: float) -> None:
        """What the chosen arm's step gave: tokens (a mean over rows) and the time that it took."""
        self.arms[self._arm].took(tokens, seconds)
        self._tokens, self._squares = self._tokens + tokens, self._squares + tokens**2
        self._round_s, self._left = self._round_s + seconds, self._left - 1
        self._account.all_s += seconds
        if self._stream is not None:
            arm = self._stream.arms[self._arm]
            arm.took(tokens, seconds)
            arm.steps, arm.tokens, arm.squares = arm.steps + 1, arm.tokens + tokens, arm.squares + tokens**2
            arm.forget(STREAM)
            arm.played_at_s = self._account.all_s

    def _close(self) -> None:
        arm = self.arms[self._arm]
        if arm.changed(self._tokens / ROUND):
            self.changes += 1
            for other in self.arms[int(self._resting) :]:
                other.forget(0.5 if other is arm else ROUND)
                other.rise = other.fall = 0.0
        arm.steps, arm.tokens, arm.squares = arm.steps + ROUND, arm.tokens + self._tokens, arm.squares + self._squares
        arm.forget(MEMORY)
        arm.played_at_s = self._account.all_s
        if self._price_s is not None:
            # A round that was better than expected makes up for earlier losses, and no more.
            lost_s = self._account.lost_s - self._price_s + self._round_s - self._tokens / self._fastest().speed
            self._account.lost_s = max(0.0, lost_s)
        self._tokens = self._squares = self._round_s = 0.0

    def _fastest(self) -> Arm:
        return max((arm for arm in self.arms if arm.steps), key=lambda arm: arm.speed)

    def _next(self) -> int:
        for number, arm in enumerate(self.arms):
            if not arm.late_s:
                self._price_s = None  # the first round of every arm is not counted against the share
                return number
        account, fastest, total = self._account, self._fastest(), sum(arm.steps for arm in self.arms)

        def price_s(arm: Arm) -> float:
            return ROUND * max(0.0, arm.step_s - arm.mean / fastest.speed)

        def within(arm: Arm) -> bool:
            return arm is fastest or account.lost_s + price_s(arm) <= SHARE * account.all_s

        def due(arm: Arm) -> bool:
            waited_s = account.all_s - arm.played_at_s
            part = SHARE / (len(self.arms) - 1)
            return arm is not fastest and waited_s * part >= price_s(arm) and waited_s > REST * ROUND * fastest.step_s

        chosen = max(self.arms, key=lambda arm: arm.bound(total))
        forced = next((arm for arm in self.arms if due(arm)), None)
        chosen = next((arm for arm in (forced, chosen) if arm is not None and within(arm)), fastest)
        self._price_s = None
        if chosen is not fastest:
            # Counted as lost when the round begins: a request may end before its round does.
            self._price_s = price_s(chosen)
            account.lost_s += self._price_s
        return next(number for number, arm in enumerate(self.arms) if arm is chosen)
