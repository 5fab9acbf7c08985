"""`results`: runs side by side, from MLflow: pretrainings, how their backbones were judged, baselines."""

import argparse
import os
import shlex
from pathlib import Path

from dali.errors import InputError
from pipeline import mlflow_store, results, results_page
from pipeline.mlflow_store import RecordedRun
from pipeline.tracking import checked_uri


def parse(args: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./run.sh results", description="Show runs and judgements side by side.")
    parser.add_argument(
        "outputs", nargs="*", metavar="OUTPUT", help="output folder of a run, or a folder of such folders"
    )
    parser.add_argument(
        "--experiment", metavar="NAME", help="instead: all runs of this experiment, at MLFLOW_TRACKING_URI"
    )
    parser.add_argument("--write", metavar="FILE.md", help="also write the page, and beside it the table as FILE.csv")
    options = parser.parse_args(args)
    if bool(options.outputs) == (options.experiment is not None):
        raise InputError("results: give output folders, or --experiment NAME with MLFLOW_TRACKING_URI; one of the two")
    if options.write is not None and Path(options.write).suffix != ".md":
        raise InputError(f"--write: {options.write} does not end in .md; the table goes beside it, as .csv")
    return options


def run(args: list[str]) -> int:
    options = parse(args)
    page = results.collect(find(options))
    text = results_page.markdown(page, shlex.join(["./run.sh", "results", *args]))
    print(text, end="")
    if options.write is not None:
        file = Path(options.write)
        try:
            file.write_text(text)
            results_page.write_csv(page, file.with_suffix(".csv"))
        except OSError as error:
            raise InputError(f"--write: {file} cannot be written ({error.strerror})") from None
        print(f"written to {file} and {file.with_suffix('.csv')}")
    return 0


def find(options: argparse.Namespace) -> list[RecordedRun]:
    if options.experiment is None:
        return results.of_folders([Path(output) for output in options.outputs])
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        raise InputError("--experiment: MLFLOW_TRACKING_URI says where, and is not set; or give output folders")
    return mlflow_store.read_runs(checked_uri("MLFLOW_TRACKING_URI", uri), results.COURSES, options.experiment)
