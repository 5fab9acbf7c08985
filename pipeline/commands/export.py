"""`export`: the backbone in the formats of other tools, each checked against it, with a card that says what it is."""

import argparse
from pathlib import Path

from dali.errors import InputError
from pipeline import export, mlflow_store, model_card
from pipeline.file_systems import check_output
from pipeline.tracking import tracking_uri
from pipeline.trained import Trained, open_trained


def parse(args: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./run.sh export", description="Hand the backbone over to other tools.")
    parser.add_argument("where", metavar="RUN | CONFIG", help="output folder of a run; or a config with model.weights")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="override single keys")
    parser.add_argument("--format", metavar="A,B", help=f"{', '.join(export.FORMATS)}; default: all that fit")
    parser.add_argument("--to", metavar="FOLDER", help="default: export, in the run's folder")
    parser.add_argument("--register", metavar="NAME", help="also register the MLflow model under this name")
    parser.add_argument("--figure", action="append", default=[], metavar="NAME=VALUE", help="a figure for the card")
    return parser.parse_intermixed_args(args)


def run(args: list[str]) -> int:
    options = parse(args)
    figures = dict(_figure(word) for word in options.figure)
    wanted = _formats(options.format, options.register)
    trained = open_trained(options.where, options.overrides)
    backbone, config = trained.model.backbone, trained.config
    folder = Path(options.to).absolute() if options.to else trained.folder / "export"
    check_output(folder)
    print(f"weights: {trained.report or 'none: random features'}", flush=True)

    subject = export.Subject(backbone, config, export.describe(backbone, config))
    names = _fitting(subject, wanted)
    export.make_way(subject, names, folder)
    for name in names:
        print(f"{name}: ", end="", flush=True)
        print(f"{export.export(subject, name, folder).name} gives the same features", flush=True)
    files = {name: form.file for name, form in export.FORMATS.items() if (folder / form.file).exists()}
    model_card.write(model_card.facts(trained, subject, figures), files, config, folder)
    if options.register:
        _register(trained, folder / files["mlflow"], options.register)
    print(f"in {folder}; how to load each: docs/export.md")
    return 0


def _formats(text: str | None, register: str | None) -> list[str]:
    wanted = [] if text is None else text.split(",")
    for name in wanted:
        if name not in export.FORMATS:
            raise InputError(f"--format: {name!r} is unknown; there are {', '.join(export.FORMATS)}")
    if register and wanted and "mlflow" not in wanted:
        raise InputError("--register: registers the mlflow format; write it under --format too")
    return wanted


def _fitting(subject: export.Subject, wanted: list[str]) -> list[str]:
    """The wanted formats, or all that can hold this backbone."""
    reasons = {name: export.refusal(subject, name) for name in wanted or export.FORMATS}
    for name, reason in reasons.items():
        if reason is not None and name in wanted:
            raise InputError(reason)
        if reason is not None:
            print(f"left out: {reason}", flush=True)
    return [name for name, reason in reasons.items() if reason is None]


def _figure(word: str) -> tuple[str, float]:
    name, _, text = word.partition("=")
    try:
        return name, float(text)
    except ValueError:
        raise InputError(f"--figure: {word!r} is not NAME=VALUE, for example --figure probe_top1=91.2") from None


def _register(trained: Trained, model: Path, name: str) -> None:
    uri, experiment = tracking_uri(trained.config, trained.folder), trained.config.tracking.experiment
    run_id = trained.training.run_id if trained.training is not None else None
    version = mlflow_store.register_model(model, name, uri, trained.folder, experiment, run_id)
    print(f"registered in MLflow as models:/{name}/{version}")
