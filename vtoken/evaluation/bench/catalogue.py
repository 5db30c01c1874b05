"""All experiments, in the order in which ``vtoken bench all`` runs them."""

import difflib
from importlib import import_module

from vtoken.evaluation.bench.base import Experiment

ALL = "all"
MODULES = {
    "characterize": "Characterize",
    "memory": "Memory",
    "sla": "Sla",
    "throughput": "Throughput",
    "capacity": "Capacity",
    "overhead": "Overhead",
    "sensitivity": "Sensitivity",
    "prefix": "Prefix",
    "quality": "Quality",
    "bursty": "Bursty",
    "contention": "Contention",
    "hostscale": "Hostscale",
    "peers": "Peers",
}
"""File and class of each experiment."""


def load_experiment(name: str) -> Experiment:
    """Raises ValueError, in one sentence, for a name that there is not."""
    if name not in MODULES:
        close = difflib.get_close_matches(name, [ALL, *MODULES], n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"there are {ALL}, {', '.join(MODULES)}."
        raise ValueError(f"there is no experiment '{name}'; {hint}")
    experiment: Experiment = getattr(import_module(f"vtoken.evaluation.bench.{name}"), MODULES[name])()
    return experiment


def load_experiments(name: str) -> list[Experiment]:
    """One experiment, or all that "all" runs."""
    if name != ALL:
        return [load_experiment(name)]
    return [experiment for experiment in map(load_experiment, MODULES) if experiment.in_all]
