r"""Statistics of a what-if: the leg, not the step, is the unit of replication.

Steps of one process share its memory layout, allocator state, chosen kernels, clocks and neighbours, so they are not
independent, and more steps do not show how much the next process would differ (Mytkowicz et al., "Producing wrong data
without doing anything obviously wrong!", ASPLOS 2009; Kalibera and Jones, "Rigorous benchmarking in reasonable time",
ISMM 2013: replicate at the highest level that varies). A leg is therefore one number, y = log(median step time), and
every statement is made from rounds of legs.

A round runs the baseline A, every variant B and the baseline again A' once each, as fresh process groups, the order
reversed from round to round. It is a randomised complete block design with the round as block: what changes from round
to round (temperature, neighbours) cancels in differences within a round, and a drift within rounds cancels between a
round and the reversed one. Two orthogonal contrasts are taken:

    d = y_B - (y_A + y_A') / 2     the effect        variance (1 + 1/2) s^2 where legs are alike
    c = y_A' - y_A                 the A/A control   variance 2 s^2, mean 0 in truth

Under the null hypothesis legs of A and B are exchangeable. The interval is Student's t on the mean of d over R rounds.
Its variance is the larger of d's own and the average of that with what the A/A pairs predict (sum of squared weights x
mean of c^2 / 2), so that a variant cannot look precise by luck where the A/A pairs are noisy. The degrees of freedom
are those of the average by Satterthwaite, 2 R - 1 where both agree, towards R - 1 where the variant is noisier, rounded
down. The control's own interval uses its own variance only.

The level is 98 %: the cost of a false "faster" is a change that somebody makes, and of 40 A/A what-ifs at most 2 may
be called different with good probability, which 95 % intervals do not give. Simulated at 4 rounds: 1.5 % false alarms
for A/A; for a variant of no effect whose legs are three times as noisy as the baseline's 4 %, three times as quiet less
than 1 %; a difference of 3 % is found in 94 % of what-ifs if a leg varies by 0.75 %, in 81 % if by 1 %.

A leg may be disturbed by something that the others did not meet: another job on the host, a page cache that is
written out. One such leg widens every interval it takes part in beyond use. The log times of all arms and rounds are
therefore fitted by an arm's and a round's effect (median polish; Tukey, Exploratory Data Analysis, 1977), and a round
with a leg that lies more than 6 robust standard deviations and 1 % off the fit is left out and measured again. The rule
does not know which arm is which, so it favours none; where more than a third of the rounds would go, the disturbance is
the machine's nature and all are kept.

A cluster bootstrap over rounds is not used: with 3 to 6 clusters it is known to be too narrow (Cameron, Gelbach and
Miller, "Bootstrap-based improvements for inference with clustered errors", Review of Economics and Statistics 2008);
tests/app/whatif/test_stats.py shows by how much here.

A difference is called only if its interval excludes zero *and* it is larger than the A/A pair's own difference.

Stopping early looks at the data several times. Each look uses level 1 - 0.02 / K for K planned looks, one more being
counted for an end by the clock, so by the union bound (Bonferroni) all the intervals that might have been reported hold
together with 98 %, whatever made it stop; the reported interval is the one of that look.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from costlab.app.whatif.spec import BASELINE, CONTROL

ALPHA = 0.02
LOOKS = (3, 5, 8, 12)  # rounds after which an early stop is considered
EQUIVALENT = 0.01  # an interval within +-1 % is decided too: there is no difference worth more legs

DISTURBED = 6.0  # robust standard deviations from which a leg counts as disturbed

Verdict = Literal["faster", "slower", "no difference", "invalid"]
Rounds = Sequence[Mapping[str, float]]
CONTROL_WEIGHTS = {CONTROL: 1.0, BASELINE: -1.0}


@dataclass(frozen=True)
class Estimate:
    """A relative change with its interval; `noise` is the relative spread of one leg as the A/A pairs show it."""

    change: float
    low: float
    high: float
    level: float
    rounds: int
    noise: float

    @property
    def half_width(self) -> float:
        """Half the interval's width."""
        return (self.high - self.low) / 2


def student_cdf(t: float, df: int) -> float:
    """P(T <= t) for Student's t with a whole number of degrees of freedom (Abramowitz and Stegun 26.7.3, 26.7.4)."""
    theta = math.atan(abs(t) / math.sqrt(df))
    sine, cosine = math.sin(theta), math.cos(theta)
    term, series = 1.0, 0.0
    first = 1 if df % 2 else 0
    if df % 2:
        term = cosine
    for k in range(first, df - 1, 2):
        series += term
        term *= cosine**2 * (k + 1) / (k + 2)
    inside = (theta + sine * series) * 2 / math.pi if df % 2 else sine * series
    return 0.5 + math.copysign(inside / 2, t)


@lru_cache(maxsize=256)
def student_quantile(p: float, df: int) -> float:
    """The t with P(T <= t) = p, 0.5 <= p < 1, by bisection of `student_cdf`."""
    low, high = 0.0, 2.0
    while student_cdf(high, df) < p:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, df) < p else (low, middle)
    return (low + high) / 2


def effect_weights(arm: str) -> dict[str, float]:
    """Weights of an arm against both baseline legs of a round; of A' against A for the control."""
    if arm == CONTROL:
        return CONTROL_WEIGHTS
    return {arm: 1.0, BASELINE: -0.5, CONTROL: -0.5}


def complete_rounds(rounds: Rounds, arms: Sequence[str]) -> list[Mapping[str, float]]:
    """The rounds in which all of `arms`, and both baseline legs, have a time."""
    needed = {*arms, BASELINE, CONTROL}
    return [r for r in rounds if needed <= r.keys()]


def contrast(rounds: Rounds, weights: Mapping[str, float], level: float = 1 - ALPHA) -> Estimate | None:
    """The relative change exp(mean of the weighted log times) - 1; None with fewer than two complete rounds.

    `rounds` map arms to log times; `weights` sum to zero. Rounds that lack an arm of `weights` are left out.
    """
    used = complete_rounds(rounds, list(weights))
    count = len(used)
    if count < 2:
        return None
    values = [sum(w * r[arm] for arm, w in weights.items()) for r in used]
    square = statistics.fmean((r[CONTROL] - r[BASELINE]) ** 2 for r in used)  # their mean is zero in truth
    own = statistics.variance(values)
    predicted = own if weights == CONTROL_WEIGHTS else sum(w * w for w in weights.values()) * square / 2
    variance = max(own, (own + predicted) / 2)
    freedom = count - 1 if weights == CONTROL_WEIGHTS else _freedom(own, predicted, count)
    quantile = student_quantile(1 - (1 - level) / 2, freedom)
    middle, reach = statistics.fmean(values), quantile * math.sqrt(variance / count)
    return Estimate(
        change=math.expm1(middle),
        low=math.expm1(middle - reach),
        high=math.expm1(middle + reach),
        level=level,
        rounds=count,
        noise=math.sqrt(square / 2),
    )


def _freedom(own: float, predicted: float, count: int) -> int:
    """Degrees of freedom of the average of two variances by Satterthwaite, never more for a variant that is quieter."""
    if own <= predicted:
        return 2 * count - 1
    spread = own**2 / (count - 1) + predicted**2 / count
    return max(1, math.floor((own + predicted) ** 2 / spread + 1e-9))


def effect(rounds: Rounds, arm: str, level: float = 1 - ALPHA) -> Estimate | None:
    """The change of one arm against the baseline."""
    return contrast(rounds, effect_weights(arm), level)


def decide(estimate: Estimate | None, control: Estimate | None) -> Verdict:
    """The verdict; "invalid" without an estimate."""
    if estimate is None or control is None:
        return "invalid"
    within_noise = abs(math.log1p(estimate.change)) <= abs(math.log1p(control.change))
    if estimate.low <= 0 <= estimate.high or within_noise:
        return "no difference"
    return "faster" if estimate.change < 0 else "slower"


def settled(estimate: Estimate | None) -> bool:
    """Whether more legs would not change the answer: zero is outside, or nothing beyond +-1 % is left inside."""
    if estimate is None:
        return False
    outside = not estimate.low <= 0 <= estimate.high
    return outside or (estimate.low > -EQUIVALENT and estimate.high < EQUIVALENT)


def looks_until(most: int) -> tuple[int, ...]:
    """The planned looks of a what-if of at most `most` rounds; the last look is at `most`."""
    return (*(n for n in LOOKS if n < most), most)


def look_level(most: int) -> float:
    """Level of every interval of a what-if that may stop early."""
    return 1 - ALPHA / (len(looks_until(most)) + 1)


def undisturbed(rounds: Rounds) -> list[Mapping[str, float]]:
    """The rounds without those in which a leg was disturbed; all of them where there are fewer than three.

    A round that ended halfway takes no part in any estimate: it is kept, and the others are judged without it.
    """
    whole = complete_rounds(rounds, [])
    arms = sorted(set.intersection(*(set(r) for r in whole))) if whole else []
    if len(whole) < 3 or len(arms) < 3:
        return list(rounds)
    residuals = _polished([[r[arm] for arm in arms] for r in whole])
    limit = max(DISTURBED * _robust_spread(residuals), EQUIVALENT)
    out = {id(r) for r, row in zip(whole, residuals, strict=True) if max(map(abs, row)) > limit}
    return [r for r in rounds if id(r) not in out] if 3 * len(out) <= len(whole) else list(rounds)


def _robust_spread(residuals: list[list[float]]) -> float:
    """Standard deviation from the upper quartile: the polish of a small table makes half of its residuals zero."""
    sizes = sorted(abs(v) for row in residuals for v in row)
    rows, columns = len(residuals), len(residuals[0])
    share = math.sqrt(rows * columns / ((rows - 1) * (columns - 1)))
    return share * sizes[math.ceil(0.75 * len(sizes)) - 1] / 1.15


def _polished(table: list[list[float]]) -> list[list[float]]:
    """Residuals of the median polish of rows and columns."""
    rest = [list(row) for row in table]
    for _ in range(10):
        for row in rest:
            middle = statistics.median(row)
            row[:] = [v - middle for v in row]
        for column in range(len(rest[0])):
            middle = statistics.median(row[column] for row in rest)
            for row in rest:
                row[column] -= middle
    return rest


@dataclass(frozen=True)
class Effect:
    """A main effect or an interaction of a factorial what-if."""

    factors: tuple[str, ...]
    estimate: Estimate


def factor_weights(arms: Mapping[str, frozenset[str]], factors: frozenset[str]) -> dict[str, float]:
    """Weights of the effect of `factors` over all arms of a full factorial of n factors.

    `arms` map an arm to its factors; the baseline's is the empty set and stands for both baseline legs. The main effect
    of a factor is the mean with it less the mean without it; the interaction of k factors is the usual product of
    signs, scaled so that it is how much larger the effect of one is with the others on than the mean effect (Box,
    Hunter and Hunter, Statistics for Experimenters, chapter 5).
    """
    half = len(arms) / 2
    weights: dict[str, float] = {}
    for arm, on in arms.items():
        sign = (-1) ** (len(factors) - len(factors & on))
        weight = sign / half
        if on:
            weights[arm] = weight
        else:
            weights[BASELINE] = weights[CONTROL] = weight / 2
    return weights


def factorial_effects(rounds: Rounds, arms: Mapping[str, frozenset[str]], level: float = 1 - ALPHA) -> list[Effect]:
    """All main effects, then all interactions by order; empty with fewer than two rounds in which all arms ran."""
    names = list(dict.fromkeys(f for on in arms.values() for f in sorted(on)))
    subsets = sorted({on for on in arms.values() if on}, key=lambda s: (len(s), [names.index(f) for f in sorted(s)]))
    found = []
    for subset in subsets:
        estimate = contrast(rounds, factor_weights(arms, subset), level)
        if estimate is not None:
            found.append(Effect(tuple(n for n in names if n in subset), estimate))
    return found
