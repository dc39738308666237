"""The sweep: the engine over a tiny model of every causal-LM type that transformers lists.

    python tests/sweep/run.py                   every type, one line each
    python tests/sweep/run.py --types a,b       some
    python tests/sweep/run.py --write           every type, and docs/architectures.md

Exits with 1 if anything is wrong.
"""

import argparse
import os
import signal
import sys
import traceback
import warnings
from pathlib import Path
from types import FrameType
from typing import NoReturn

if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    # As a script, the first path entry is this folder.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from fixtures.zoo import causal_lm_types
from fixtures.zoo_exceptions import UNBUILT
from sweep.check import Outcome, check, quiet
from sweep.table import TABLE, render, summary

TIME_OUT = 120


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Run the engine over every causal-LM type.")
    parser.add_argument("--types", help="comma separated; all if left out")
    parser.add_argument("--write", action="store_true", help=f"write {TABLE}")
    arguments = parser.parse_args()
    types = arguments.types.split(",") if arguments.types else causal_lm_types()
    if arguments.write and arguments.types:
        parser.error("--write takes all types")

    quiet()
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _time_out)
    outcomes = []
    for model_type in types:
        if model_type in UNBUILT and not arguments.types:
            continue
        outcome = _try(model_type)
        outcomes.append(outcome)
        wrong = "WRONG " + "; ".join(outcome.faults) if outcome.faults else "right"
        print(
            f"{model_type}: {outcome.layout} attention {outcome.attention} mixers {outcome.mixers}"
            f"{' plain tuple' if outcome.plain_tuple else ''} {outcome.difference:.1e} {outcome.seconds:.1f} s"
            f" | {wrong} | {outcome.reason}",
            flush=True,
        )
    print(summary(outcomes))
    if arguments.write:
        TABLE.write_text(render(outcomes))
    return int(any(outcome.faults or outcome.layout == "error" for outcome in outcomes))


def _try(model_type: str) -> Outcome:
    signal.alarm(TIME_OUT)
    try:
        return check(model_type)
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())[:300]
        reason = f"{type(error).__name__}: {text} ({Path(at.filename).name}:{at.lineno})"
        return Outcome(model_type, layout="error", reason=reason, faults=["it was not run"])
    finally:
        signal.alarm(0)


def _time_out(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise TimeoutError(f"longer than {TIME_OUT} s")


if __name__ == "__main__":
    sys.exit(main())
