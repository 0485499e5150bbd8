"""The application, and `run_tui` which opens it on a terminal."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from costlab.app.tui.actions import Actions
from costlab.app.tui.live import LauncherFactory
from costlab.probes.launch import Launcher

HANDLED = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class CostlabApp(Actions):
    """costlab's terminal interface.

    `paths` are run directories: the first is opened, all are listed. `launcher_factory` makes what records a run;
    `clock` gives unix seconds. With `signals`, SIGTERM, SIGHUP and SIGINT end the app and cancel an active run.
    """

    def __init__(
        self,
        paths: Sequence[Path] = (),
        *,
        sample: str | None = None,
        theme: str | None = None,
        launcher_factory: LauncherFactory = Launcher,
        clock: Callable[[], float] = time.time,
        signals: bool = False,
    ) -> None:
        super().__init__(theme=theme, clock=clock)
        self.launcher_factory = launcher_factory
        self.session.given = list(paths)
        self._sample = sample
        self._signals = signals

    def opened(self) -> None:
        """Open what was asked for, else the newest run."""
        if self._signals:
            loop = asyncio.get_running_loop()
            for number in HANDLED:
                loop.add_signal_handler(number, self._signalled, number)
        if self._sample is not None:
            self.open_sample(self._sample)
        elif self.session.given:
            self.open_path(self.session.given[0])
        self.list_runs()

    def _signalled(self, number: signal.Signals) -> None:
        """Leave cleanly. After SIGHUP the terminal is gone, so nothing is left to wait for on it."""
        code = 128 + number
        if number == signal.SIGHUP:
            self.live_pane.cancel()
            self.exit(return_code=code)
            return
        self.leave(code)


def run_tui(paths: list[Path], *, sample: str | None = None, theme: str | None = None) -> int:
    """Open the interface on the terminal and return the exit code. The caller has checked that there is a terminal."""
    app = CostlabApp(paths, sample=sample, theme=theme, signals=True)
    app.run()
    return app.return_code or 0
