"""docs/pictures/mlflow.png: a run's page in MLflow, with its curves and pictures, photographed by headless Chromium.

    ./run.sh python scripts/screenshot.py OUTPUT [PICTURE.png]

OUTPUT is a run's folder; `./run.sh ui` serves it meanwhile. Chromium is driven by its DevTools protocol, as the page
goes on loading long after its load event, and its boxes with pictures open at step 0, on the run's parameters.
"""

import asyncio
import base64
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Coroutine
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
PORT, DEVTOOLS = 5087, 9237
SERVER = f"http://127.0.0.1:{PORT}"
CHROMIUM = (
    "chromium --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars about:blank"
)
WIDTH, HEIGHT = 1500, 1790  # the whole page: what is below is not drawn
LONGEST = 240  # seconds

TIDY = """
const style = document.createElement('style');
style.textContent = '.modebar-container { display: none !important }';  // plotly's buttons, seen by a mouse only
document.head.append(style);
document.querySelectorAll('button[aria-label=Close]').forEach(button => button.click());  // the assistant
"""
# The field beside each slider of steps, and the last step.
LAST_STEPS = """
[...document.querySelectorAll('[role=slider]:not([data-disabled])')].map(thumb => {
    let box = thumb;
    while (!box.querySelector('input[type=number]')) box = box.parentElement;
    const field = box.querySelector('input[type=number]').getBoundingClientRect();
    return [field.x + 12, field.y + field.height / 2, thumb.getAttribute('aria-valuemax')];
})
"""
TO_THE_PICTURES = "[...document.images].forEach(image => image.scrollIntoView({block: 'center'})); scrollTo(0, 0)"
STATE = "[document.querySelectorAll('.main-svg').length, document.images.length, document.body.innerText.length]"

# A run has more charts than a page should: those by which one sees how it goes
SHOWN = r"^(loss|on_diag|off_diag|knn_accuracy|effective_rank|images_per_second|lr_weights|cross_correlation|views)$"
FILTER = "document.querySelector('input[placeholder=\"Search metric charts\"]').focus()"

Call = Callable[..., Coroutine[Any, Any, Any]]


def main(output: Path, picture: Path) -> None:
    run_id = json.loads((output / "tracking.json").read_text())["run_id"]
    ui = [sys.executable, "-m", "pipeline", "ui", str(output), "--port", str(PORT)]
    with tempfile.TemporaryDirectory() as profile:
        browser = [*CHROMIUM.split(), f"--user-data-dir={profile}", f"--remote-debugging-port={DEVTOOLS}"]
        quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
        processes = [subprocess.Popen(words, cwd=ROOT, **quiet) for words in (ui, browser)]
        try:
            run = json.loads(read(f"{SERVER}/api/2.0/mlflow/runs/get?run_id={run_id}"))["run"]
            page = f"{SERVER}/#/experiments/{run['info']['experiment_id']}/runs/{run_id}/model-metrics"
            tabs = json.loads(read(f"http://127.0.0.1:{DEVTOOLS}/json"))
            png = asyncio.run(photograph(next(t["webSocketDebuggerUrl"] for t in tabs if t["type"] == "page"), page))
        finally:
            for process in processes:
                os.killpg(process.pid, signal.SIGTERM)
            for process in processes:
                process.wait()
    # The rare colours, those of the heat map, must keep entries of the palette.
    sheet = Image.open(io.BytesIO(png)).convert("RGB").quantize(256, method=Image.Quantize.MAXCOVERAGE)
    sheet.save(picture, optimize=True)


def read(url: str) -> bytes:
    """What `url` answers, as soon as somebody does."""
    last = time.monotonic() + LONGEST
    while True:
        try:
            with closing(urllib.request.urlopen(url, timeout=5)) as answer:
                return answer.read()
        except OSError:
            if time.monotonic() > last:
                raise
            time.sleep(0.3)


async def photograph(debugger: str, page: str) -> bytes:
    """PNG of the page with its pictures in sight, at their last step."""
    async with aiohttp.ClientSession() as session, session.ws_connect(debugger, max_msg_size=0) as socket:
        number = 0

        async def call(method: str, **params: Any) -> Any:
            nonlocal number
            number += 1
            await socket.send_json({"id": number, "method": method, "params": params})
            while (answer := await socket.receive_json()).get("id") != number:
                pass
            return answer["result"]

        await call("Emulation.setDeviceMetricsOverride", width=WIDTH, height=HEIGHT, deviceScaleFactor=1, mobile=False)
        await call("Page.navigate", url=page)
        await stand_still(call)
        await evaluate(call, FILTER)
        await call("Input.insertText", text=SHOWN)
        await evaluate(call, "document.activeElement.blur()")
        await evaluate(call, TIDY)
        await stand_still(call)
        for x, y, step in await evaluate(call, LAST_STEPS):
            for kind in ("mousePressed", "mouseReleased"):
                await call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
            await evaluate(call, "document.activeElement.select()")
            await call("Input.insertText", text=step)
            await asyncio.sleep(1)
            await evaluate(call, "document.activeElement.blur()")
        await stand_still(call)
        await evaluate(call, TO_THE_PICTURES)
        await stand_still(call)
        return base64.b64decode((await call("Page.captureScreenshot", format="png"))["data"])


async def evaluate(call: Call, script: str) -> Any:
    answer = await call("Runtime.evaluate", expression=script, returnByValue=True)
    assert "exceptionDetails" not in answer, answer
    return answer["result"].get("value")


async def stand_still(call: Call, seconds: int = 12) -> None:
    """Until there are curves, and nothing has come or gone for so long."""
    last, state, since = time.monotonic() + LONGEST, None, time.monotonic()
    while time.monotonic() < last:
        await asyncio.sleep(1)
        now = await evaluate(call, STATE)
        if now != state or not now[0]:
            state, since = now, time.monotonic()
        elif time.monotonic() - since > seconds:
            return
    raise TimeoutError(f"the page does not come to rest: {state}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), Path(sys.argv[2] if len(sys.argv) > 2 else "docs/pictures/mlflow.png"))
