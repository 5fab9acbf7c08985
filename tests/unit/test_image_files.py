"""The image's recipe: what needs no container engine to be checked."""

import fnmatch
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
STAGES = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
SCRIPT = ROOT / "scripts" / "build_image.sh"


def made_from():
    """The files whose change makes run.sh set up anew: without one of them, every start in the image would try to."""
    return re.search(r"^fingerprint\(\) \{ cat (.*?) \|", (ROOT / "run.sh").read_text(), flags=re.MULTILINE)[1].split()


def copied(stage):
    return [word for line in re.findall(r"^COPY (?!--from)(.*)$", stage, re.MULTILINE) for word in line.split()[:-1]]


def test_the_environment_is_built_from_what_run_sh_sets_up_from():
    assert set(copied(STAGES[0])) == {"run.sh", *made_from()}


def test_the_image_has_the_code_and_nothing_of_this_machine():
    rules = (ROOT / ".dockerignore").read_text().split("\n")
    assert rules[1] == "*", "nothing but what is named"
    sent = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    assert {"dali", "pipeline", "configs", "run.sh"} <= sent
    assert all(any(fnmatch.fnmatch(name, f"{top}*") for top in sent) for name in made_from())
    assert not sent & {".", ".git", ".venv", "data", "outputs", "mlruns"}
    assert copied(STAGES[-1]) == ["."]


def test_the_image_runs_run_sh_as_a_user_without_rights_and_without_compilers():
    image = STAGES[-1]
    assert re.search(r'^ENTRYPOINT \["/opt/barlow/run\.sh"\]$', image, re.MULTILINE)
    default = re.search(r"^ARG USER_ID=(\d+)$", image, re.MULTILINE)
    assert int(default[1]) > 0 and re.findall(r"^USER (.*)$", image, re.MULTILINE) == ["${USER_ID}"]
    assert not re.search(r"g\+\+|gcc|cmake|-dev\b|nvcc|build-essential", image)
    assert "COPY --from=build /opt/barlow/.venv .venv" in image, "at the place that it was made for"
    assert "HOROVOD_BUILD=nccl" in STAGES[0]


def test_no_host_is_named():
    for file in (ROOT / "Dockerfile", SCRIPT):
        assert not re.search(r"://|\b[\w-]+\.(com|org|net|io)\b", file.read_text()), file


def test_without_an_engine_the_script_says_what_to_install(tmp_path):
    done = subprocess.run(["/bin/bash", SCRIPT], env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 2
    assert re.fullmatch(r"build_image\.sh: no docker, .*apt-get install .*buildah debootstrap\n", done.stderr)


def test_the_documented_command_gives_shared_memory():
    text = (ROOT / "docs" / "containers.md").read_text()
    starts = [line for line in text.split("\n") if line.strip().startswith("docker run") and "--gpus" in line]
    assert starts and all("--shm-size=8g" in line for line in starts), "64 MB of /dev/shm end NCCL with a bus error"
