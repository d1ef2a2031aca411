"""Latency objectives, and the times of simulated requests that are held against them."""

from __future__ import annotations

import msgspec

from ...errors import ConfigError

TAIL_SHARE = 0.99  # of requests: the limits of p99


class Objective(msgspec.Struct, frozen=True):
    """Latency objective: limits of TTFT, TPOT and ITL in seconds, and the share of requests.

    With `joint`, one request must meet all. Without, that share of requests meets each by itself,
    as DistServe's simulator counts. A request meets ITL if no gap between two of its tokens is
    longer.
    """

    ttft: float
    tpot: float
    attainment: float = 0.9
    joint: bool = True
    # Limits that all but 1 % of the requests must meet beside; None: no such limit.
    ttft_p99: float | None = None
    tpot_p99: float | None = None
    itl: float | None = None  # None: no such limit

    @property
    def has_tails(self) -> bool:
        """Whether 99 % of the requests have a limit of their own."""
        return self.ttft_p99 is not None or self.tpot_p99 is not None

    def allowed_of_tail(self, requests: int) -> int:
        """Returns the number of requests that may miss a limit of 99 %."""
        return int(requests * (1 - TAIL_SHARE) + 1e-9)

    def words(self) -> str:
        """Describes the objective for people."""
        counting = "in one request" if self.joint else "each by itself"
        words = f"{self.limits()}, {100 * self.attainment:g}% of requests, {counting}"
        for name, limit in (("TTFT", self.ttft_p99), ("TPOT", self.tpot_p99)):
            if limit is not None:
                words += f"; p99 of {name} {limit:g} s"
        return words

    def limits(self) -> str:
        """Describes the limits without the share of requests."""
        if self.itl is None:
            return f"TTFT {self.ttft:g} s and TPOT {self.tpot:g} s"
        longest = f"ITL {self.itl:g} s (the longest gap between two tokens)"
        return f"TTFT {self.ttft:g} s, TPOT {self.tpot:g} s and {longest}"

    def flags(self) -> str:
        """Lists the limits as flags of a command."""
        found = [f"--ttft {self.ttft:g}", f"--tpot {self.tpot:g}"]
        if self.itl is not None:
            found.append(f"--itl {self.itl:g}")
        tails = (("--ttft-p99", self.ttft_p99), ("--tpot-p99", self.tpot_p99))
        found += [f"{flag} {limit:g}" for flag, limit in tails if limit is not None]
        return f"{', '.join(found[:-1])} and {found[-1]}"

    def allowed(self, requests: int) -> int:
        """Returns the number of requests that may miss."""
        return int(requests * (1 - self.attainment) + 1e-9)


class SimulationResult(msgspec.Struct, frozen=True):
    """Seconds for each request that counts; -1 for an event that did not happen."""

    ttft: list[float]
    tpot: list[float]
    latency: list[float]  # end to end
    transfer: list[float]  # from the end of the prefill to the arrival of all KV at D
    path: list[float]  # of the request, outside engine and link
    # Mean shares of the time from the first arrival to the last end.
    prefill_busy: float  # of a prefill replica, or of a colocated one
    decode_busy: float  # of a decode replica; 0 without one
    link_busy: float  # of a prefill replica's link, towards decode replicas
    back_busy: float  # of a decode replica's link, towards prefill replicas
    preemptions: int
    stopped: bool  # early, because too many had missed
    aggregated: float  # share of the requests whose whole prompt a decode replica computed
    # Shares of the prompts' tokens: those that D had in its cache, which are not sent to it, and
    # those that P read from D.
    at_decode: float
    read_back: float
    # Longest gap between two tokens; 0 for an answer of one token. None: not recorded.
    itl: list[float] | None = None

    def attainment(self, objective: Objective) -> float:
        """Returns the share of requests that met the objective.

        Without `joint` it is the smallest of the shares for each limit.
        """
        limits = [(self.ttft, objective.ttft), (self.tpot, objective.tpot)]
        if objective.itl is not None:
            if self.itl is None:
                raise AssertionError("a simulation for an ITL objective records gaps")
            limits.append((self.itl, objective.itl))
        met = [[0 <= seconds <= limit for seconds in values] for values, limit in limits]
        if not objective.joint:
            return min(map(sum, met)) / len(self.ttft)
        all_met = met[0]
        for others in met[1:]:
            all_met = [a and b for a, b in zip(all_met, others, strict=True)]
        return sum(all_met) / len(self.ttft)


def quantile(values: list[float], share: float) -> float:
    """Returns the smallest value that `share` of all requests do not exceed.

    Returns infinity if fewer requests have a value. Raises ConfigError without any request.
    """
    if not values:
        raise ConfigError("cannot compute a quantile without requests")
    ordered = sorted(value if value >= 0 else float("inf") for value in values)
    count = -int(-share * len(ordered) // 1)  # rounded up
    return ordered[min(len(ordered) - 1, max(0, count - 1))]
