"""Jobs beside runs (calibration, collective benchmark): started, followed and ended by the launcher of runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from costlab.probes.launch import Launcher
from costlab.probes.session import Voice, as_rank
from costlab.probes.spec import RunSpec, SpecError

DEVICE = "COSTLAB_JOB_DEVICE"


class JobLauncher(Launcher):
    """Runs `module` under torchrun with the job's options as JSON behind the run directory."""

    def __init__(self, module: str, options: msgspec.Struct, spec: RunSpec, run_dir: Path) -> None:
        super().__init__(spec, run_dir)
        self.module = module
        self.options = msgspec.json.encode(options).decode()

    def command(self) -> list[str]:
        """The run's command line with another module."""
        command = super().command()
        at = command.index("--module")
        return [*command[: at + 1], self.module, str(self.run_dir), self.options]

    def _environment(self) -> dict[str, str]:
        """The run's, with the device that was asked for: on `cpu` the ranks see no GPU."""
        hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""} if self.spec.device == "cpu" else {}
        return super()._environment() | {DEVICE: self.spec.device} | hidden


def require_device(count: int) -> None:
    """SpecError where `--device cuda` was asked for and this rank has none of the `count` devices that torch sees."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if os.environ.get(DEVICE) == "cuda" and local >= count:
        raise SpecError(
            f"--device cuda was asked for, but torch sees {count} CUDA devices for rank {local} of this host; "
            "`costlab doctor` says why"
        )


def run_rank(argv: list[str], body: Callable[[Path, bytes, int, Voice], None]) -> int:
    """A job's rank, with its options as JSON: every exception becomes a Failure event and exit code 1."""
    run_dir, options = Path(argv[1]), argv[2].encode()
    return as_rank(run_dir, lambda rank, voice: body(run_dir, options, rank, voice))
