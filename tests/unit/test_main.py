"""How a worker's process shares its interpreter, and how it ends."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

BESIDE_A_BUSY_THREAD = """
import sys, threading, time
from pipeline import __main__ as program

class Command:
    @staticmethod
    def run(words):
        waits, done = [], threading.Event()
        def spin():
            while not done.is_set():
                pass
        threading.Thread(target=spin).start()
        for _ in range(200):
            start = time.perf_counter()
            time.sleep(0)  # lets go of the interpreter, as every kernel does
            waits.append(time.perf_counter() - start)
        done.set()
        print(sorted(waits)[100])
        return 0

program.import_module = lambda name: Command
sys.exit(program.main(["pretrain"]))
"""

SLOW_TO_TAKE_APART = """
import atexit, runpy, sys, time, types

class Slow:
    def __del__(self):
        time.sleep(60)

def run(words):
    print("first words")
    return 7

slow = Slow()
atexit.register(print, "last words")
sys.modules["pipeline.commands.pretrain"] = types.SimpleNamespace(run=run)
sys.argv = ["pipeline", "pretrain"]
runpy.run_module("pipeline", run_name="__main__")
"""


def python(code):
    words = [sys.executable, "-c", code]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)


def test_a_step_does_not_wait_for_a_thread_in_python():
    """Python's own 5 ms, hundreds of times a step, made all workers wait for rank 0 while it opened MLflow."""
    done = python(BESIDE_A_BUSY_THREAD)
    assert done.returncode == 0 and float(done.stdout) < 0.003, done


def test_a_worker_ends_at_once_with_its_code_and_its_last_words():
    done = python(SLOW_TO_TAKE_APART)
    assert (done.returncode, done.stdout.split("\n")[:2]) == (7, ["first words", "last words"]), done
