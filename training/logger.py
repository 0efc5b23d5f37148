"""Weights & Biases, at arm's length: a tracker that is down, slow or logged out never stops or slows training."""

import logging
import netrc
import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from training.config import LoggerConfig

log = logging.getLogger(__name__)

PATIENCE = 10.0  # seconds that the end of a run waits for W&B to take what is left


class WandbLogger:
    """Logs to a W&B run of its own thread; what W&B can't take in time is in metrics.jsonl all the same."""

    def __init__(self, config: LoggerConfig, folder: Path, settings: dict[str, Any]) -> None:
        self._folder = folder
        self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(maxsize=10_000)
        self._thread = threading.Thread(target=self._run, args=(config, folder, settings), daemon=True)
        self._thread.start()

    def record(self, metrics: dict[str, Any]) -> None:
        """Hands the metrics to the thread; drops them where it is 10,000 behind."""
        with suppress(queue.Full):
            self._waiting.put_nowait(metrics)

    def picture(self, name: str, title: str, draw: Callable[[Path], None]) -> None:
        """Hands the picture's file to the thread, which makes a W&B image of it."""
        path = self._folder / f"{name}.png"
        if not path.exists():
            draw(path)
        with suppress(queue.Full):
            self._waiting.put_nowait({name: path})

    def finish(self) -> None:
        """Ends W&B's run, or leaves it behind if that takes longer than PATIENCE."""
        with suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(PATIENCE)
        if self._thread.is_alive():
            log.warning("W&B did not finish within %.0f s; `wandb sync` can send the run later", PATIENCE)

    def _run(self, config: LoggerConfig, folder: Path, settings: dict[str, Any]) -> None:
        try:
            import wandb  # here, since importing it takes a second that training need not wait for

            run = wandb.init(
                project=config.project,
                entity=config.entity,
                name=config.run_name or folder.name,
                group=config.group,
                tags=config.tags,
                mode=wandb_mode(config.mode),  # type: ignore[arg-type]
                dir=folder,
                config=settings,
                settings=wandb.Settings(silent=True, init_timeout=15, console="off"),
            )
            run.define_metric("tokens")
            run.define_metric("*", step_metric="tokens", step_sync=True)
            while (metrics := self._waiting.get()) is not None:
                pictures = {name: wandb.Image(str(path)) for name, path in metrics.items() if isinstance(path, Path)}
                if pictures:
                    run.log(pictures, commit=False)  # they join the step that is still open
                else:
                    run.log(metrics, step=metrics["step"])
            run.finish()
        except Exception as error:  # whatever W&B's client raises, the run goes on without it
            log.warning("W&B is off for this run: %s", error)


def wandb_mode(mode: str) -> str:
    """`auto` is WANDB_MODE where that is set, else online if this user has logged in to W&B, else offline."""
    if mode != "auto":
        return mode
    if "WANDB_MODE" in os.environ:
        return os.environ["WANDB_MODE"]
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        logged_in = "WANDB_API_KEY" in os.environ or netrc.netrc().authenticators(host) is not None
    except (FileNotFoundError, netrc.NetrcParseError):
        logged_in = False
    return "online" if logged_in else "offline"
