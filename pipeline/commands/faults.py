"""`faults`: break runs in the ways clusters do, and print what came of it; exit 1 if any result is wrong."""

import argparse

from dali.errors import InputError
from pipeline import faults
from pipeline.arguments import refuse_fewer, writable_file
from pipeline.fault_kinds import FAULTS


def run(args: list[str]) -> int:
    """Print a row as soon as its fault is done."""
    parser = argparse.ArgumentParser(prog="./run.sh faults", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="FAULT", help=f"default: all. {'; '.join(FAULTS)}")
    parser.add_argument("--times", type=int, default=1, metavar="N", help="with N different seeds each")
    parser.add_argument("--write", type=writable_file, metavar="FILE", help="also write the table to a file")
    options = parser.parse_args(args)
    refuse_fewer(options, times=1)
    unknown = [name for name in options.names if name not in FAULTS]
    if unknown:
        raise InputError(f"{unknown[0]}: is no fault; one of: {'; '.join(FAULTS)}")
    names = options.names or list(FAULTS)
    lines = [faults.HEADER]
    print(faults.HEADER, flush=True)
    wrong = 0
    for row in faults.run({name: FAULTS[name] for name in names}, options.times):
        lines.append(faults.table_line(row))
        print(lines[-1], flush=True)
        wrong += row.wrong
    if options.write:
        options.write.write_text("\n".join(lines) + "\n")
    print(f"{wrong} wrong results", flush=True)
    return 1 if wrong else 0
