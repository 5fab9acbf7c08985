"""A process that stalls ends itself and says where; one that is slow for a reason does not."""

import json
import signal
import subprocess
import sys
import time

PRELUDE = """if True:
    import sys, threading, time
    from pathlib import Path
    from pipeline import failures, watchdog
    output = Path(sys.argv[1])
    failures.record_in(output)
    watchdog.ALLOWED.update(start=0.0, checkpoint=4.0)
    watchdog.start(1, 0.8)
    def a_function_that_sleeps(seconds):
        time.sleep(seconds)
"""


def process(code, folder):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", PRELUDE + code, folder], **pipes)


def finish(code, folder):
    """(exit code, seconds, stdout, stderr)"""
    start = time.monotonic()
    running = process(code, folder)
    out, errors = running.communicate(timeout=60)
    return running.returncode, time.monotonic() - start, out, errors


def test_a_stall_ends_with_76_and_says_where(tmp_path):
    code, _, out, errors = finish(
        """
    watchdog.at_stall(lambda message: print("last words:", message, flush=True))
    watchdog.enter("step")
    watchdog.stepped(3)
    watchdog.enter("data")
    a_function_that_sleeps(60)
    """,
        tmp_path,
    )
    assert code == 76, errors
    message = r"no progress for 1 s after step 3: phase data"
    assert out.startswith("last words: no progress for") and "a_function_that_sleeps" in errors
    assert errors.splitlines()[-1].startswith("error: rank 1 on ") and message in errors.splitlines()[-1]
    found = json.loads((tmp_path / "errors" / "rank1.json").read_text())
    assert (found["rank"], found["exit_code"], found["message"], found["step"]) == (1, 76, message, 3)
    assert "a_function_that_sleeps" in found["traceback"] and found["host"]


def test_a_folder_that_hangs_does_not_keep_it(tmp_path):
    """The disk may be what the process stalls on."""
    code, seconds, _, errors = finish(
        """
    watchdog.LAST_WORDS_SECONDS = 0.5
    failures.write = lambda *words: time.sleep(60)
    a_function_that_sleeps(60)
    """,
        tmp_path,
    )
    assert code == 76 and seconds < 20 and "a_function_that_sleeps" in errors


def test_last_words_that_hang_do_not_keep_it(tmp_path):
    code, seconds, *_ = finish(
        """
    watchdog.LAST_WORDS_SECONDS = 0.5
    watchdog.at_stall(lambda message: time.sleep(60))
    a_function_that_sleeps(60)
    """,
        tmp_path,
    )
    assert code == 76 and seconds < 20


def test_who_waits_speaks_after_the_one_that_is_waited_for(tmp_path):
    waits = "with watchdog.waiting('gradients.0'):\n        a_function_that_sleeps(60)"
    both = [process(f"\n    watchdog.WAITING_FACTOR = 3\n    {what}\n", tmp_path / name)
            for name, what in (("a", waits), ("b", "a_function_that_sleeps(60)"))]  # fmt: skip
    for running in both:
        running.communicate(timeout=60)
    found = {name: json.loads((tmp_path / name / "errors/rank1.json").read_text()) for name in "ab"}
    assert "waiting for the other workers (gradients.0)" in found["a"]["message"]
    took = {name: float(row["message"].split()[3]) for name, row in found.items()}
    assert took["a"] >= 2 > took["b"]


def test_no_false_alarm(tmp_path):
    busy = (
        "for _ in range(10): watchdog.beat(); a_function_that_sleeps(0.15)",
        "for n in range(10): watchdog.enter('step'); a_function_that_sleeps(0.15); watchdog.stepped(n)",
        "for n in range(10):\n        with watchdog.waiting('vote'): a_function_that_sleeps(0.15)",
        "with watchdog.phase('checkpoint'): a_function_that_sleeps(1.5)",
        # another worker: it waits in its next step for the one that saves
        "with watchdog.phase('checkpoint'): pass\n    watchdog.enter('step'); a_function_that_sleeps(1.5)",
        "watchdog.WAITING_FACTOR = 3\n    with watchdog.waiting('vote'): a_function_that_sleeps(1.4)\n"
        "    a_function_that_sleeps(0.4)",
        "watchdog.stop(); a_function_that_sleeps(1.5)",
    )
    running = [(what, process(f"\n    {what}\n    print('done')\n", tmp_path)) for what in busy]
    for what, one in running:
        out, errors = one.communicate(timeout=60)
        assert (one.returncode, out) == (0, "done\n"), f"{what}: {errors}"


def test_an_allowance_ends_with_the_next_step(tmp_path):
    code, seconds, _, errors = finish(
        """
    with watchdog.phase("checkpoint"):
        pass
    watchdog.stepped(4)
    a_function_that_sleeps(3)
    """,
        tmp_path,
    )
    assert code == 76 and "after step 4: phase start" in errors


def test_a_process_that_was_stopped_did_not_stall(tmp_path):
    code = """
    watchdog.SPARE_SECONDS = 0.5
    watchdog.start(1, 2.0)
    watchdog.stepped(0)
    print("up", flush=True)
    sys.stdin.readline()
    """
    running = process(code, tmp_path)
    assert running.stdout.readline() == "up\n"
    running.send_signal(signal.SIGSTOP)
    time.sleep(4)
    running.send_signal(signal.SIGCONT)
    time.sleep(0.5)
    _, errors = running.communicate("done\n", timeout=60)
    assert running.returncode == 0, errors
