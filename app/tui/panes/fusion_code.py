"""The code that Inductor generated for the kernels of a layer, one kernel at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from textual.app import ComposeResult
from textual.containers import Vertical

from costlab.app import figures as fmt
from costlab.app.analysis.sources import SourceView, kernel_source
from costlab.app.analysis.views import KernelView
from costlab.app.text import plain
from costlab.app.tui.cells import EMPTY, Line, line
from costlab.app.tui.widgets.code import Code, highlighted
from costlab.app.tui.widgets.lines import Lines

LIBRARY = "matrix products, attention and collectives are library calls: no code is generated for them"
EAGER = "an operator outside any compiled graph: no code is generated for it"


@dataclass(frozen=True)
class KernelKey:
    """A kernel of a layer; `ms` per step is of all its calls in the layer."""

    name: str
    phase: str
    kind: str = ""
    ms: float = 0.0


@dataclass(frozen=True)
class Generated:
    """A kernel and its source, None where there is none."""

    key: KernelKey
    view: SourceView | None
    lines: Sequence[Line] = ()


def keys_of(kernels: Sequence[KernelView]) -> list[KernelKey]:
    """Distinct kernels by name and phase, the longest first."""
    found: dict[tuple[str, str], KernelKey] = {}
    for k in kernels:
        before = found.get((k.name, k.phase))
        found[k.name, k.phase] = KernelKey(k.name, k.phase, k.kind or k.category, k.ms + (before.ms if before else 0.0))
    return sorted(found.values(), key=lambda key: -key.ms)


def read_code(path: Path, kernels: Sequence[KernelKey], wanted: KernelKey | None) -> list[Generated]:
    """The sources of those kernels that have one, in order; `wanted` is there without one too. Reads the run."""
    from costlab.app.store import open_run

    run = open_run(path)
    found = [Generated(key, kernel_source(run, key.name, key.phase)) for key in kernels]
    kept = [one for one in found if one.view is not None or _same(one.key, wanted)]
    return [
        Generated(one.key, one.view, highlighted(one.view.source, one.view.language) if one.view else ())
        for one in kept
    ]


def _same(key: KernelKey, wanted: KernelKey | None) -> bool:
    return wanted is not None and (key.name, key.phase) == (wanted.name, wanted.phase)


class CodePanel(Vertical, can_focus=True):
    """One kernel's code under a line that names it; `show` gives all kernels, `turn` goes from one to the next."""

    SCOPED_CSS = False
    DEFAULT_CSS = """
    CodePanel { height: 1fr; display: none; }
    CodePanel #code-head { margin-bottom: 1; }
    CodePanel #code-none { margin: 1 2; display: none; }
    CodePanel.-none #code { display: none; }
    CodePanel.-none #code-none { display: block; }
    .-short CodePanel #code-head { margin-bottom: 0; }
    """

    found: Sequence[Generated] = ()
    at: int = 0

    def compose(self) -> ComposeResult:
        """Head, code, and what is said where there is no code."""
        yield Lines(id="code-head")
        yield Code(id="code")
        yield Lines(id="code-none", classes="wrap")

    def wait(self, layer: str) -> None:
        """Say that the sources are being read."""
        self.found, self.at = (), 0
        self.add_class("-none")
        self.query_one("#code-head", Lines).show([line((f" {layer}", "strong"), ("  generated code", "muted"))])
        self.query_one("#code-none", Lines).show([line(("reading …", "muted"))])
        self.call_after_refresh(self.take_focus)

    def show(self, found: Sequence[Generated], wanted: KernelKey | None) -> None:
        """Show the wanted kernel, else the longest that has code."""
        self.found = found
        self.at = next((i for i, one in enumerate(found) if _same(one.key, wanted)), 0)
        self._draw()

    def turn(self, step: int) -> None:
        """The next kernel, around the end."""
        if self.found:
            self.at = (self.at + step) % len(self.found)
            self._draw()

    def take_focus(self) -> None:
        """Focus the code, or where there is none the panel, since keys need a focus that is displayed."""
        one = self.current
        (self.query_one("#code", Code) if one and one.view else self).focus()

    @property
    def current(self) -> Generated | None:
        """The kernel that is shown."""
        return self.found[self.at] if self.found else None

    def _draw(self) -> None:
        one = self.current
        self.set_class(one is None or one.view is None, "-none")
        self.query_one("#code", Code).show(one.lines if one else ())
        if one is not None:
            self.query_one("#code-head", Lines).show(head(one, self.at, len(self.found)))
        self.query_one("#code-none", Lines).show(() if one and one.view else why_none(one))
        self.take_focus()

    def markdown(self) -> str:
        """The code as a fenced block; "" where there is none."""
        one = self.current
        if one is None or one.view is None:
            return ""
        text = self.query_one("#code", Code).plain
        fence = "`" * max(3, _backticks(text) + 1)
        return f"{fence}{'python' if one.view.language == 'triton' else 'cpp'}\n{text}\n{fence}"


def _backticks(text: str) -> int:
    runs = [len(row.lstrip()) - len(row.lstrip().lstrip("`")) for row in text.splitlines()]
    return max(runs, default=0)


def head(one: Generated, at: int, count: int) -> list[Line]:
    """Name; then place among the layer's kernels, phase, time, language, what is missing."""
    key, view = one.key, one.view
    facts = [f"{at + 1} of {count}", key.phase, key.kind, fmt.ms(key.ms)]
    spans = [("   ".join(plain(f) for f in facts if f), "muted")]
    if view is not None:
        spans.append((f"   {plain(view.language)}, {fmt.count(len(one.lines))} lines", "muted"))
    lines = [line((" " + key.name, "strong")), line(" ", *((t, "muted") for t, _ in spans))]
    if view is not None and view.cut:
        lines.append(line((" the end is missing: longer than what a run keeps", "warn")))
    if view is not None and view.variants > 1:
        words = f" {view.variants} different kernels of the run have this name; this is the newest"
        lines.append(line((words, "warn")))
    return lines


def why_none(one: Generated | None) -> list[Line]:
    """Why there is no code to show."""
    if one is None:
        return [
            line(("No generated code of this layer was kept.", "strong")),
            EMPTY,
            line("Its kernels are library calls or eager operators, or the run was not compiled, or it was recorded"),
            line("before costlab kept the code or imported from a trace."),
            EMPTY,
            line(("esc", "accent"), "  back"),
        ]
    kind = one.key.kind
    eager, library = kind == "eager", kind in ("extern", "template", "collective", "communication", "matmul")
    why = EAGER if eager else LIBRARY if library else "its code was not kept with the run"
    return [line(("No generated code.", "strong")), EMPTY, line(f"{one.key.name}: {why}"), EMPTY,
            line(("[ ]", "accent"), "  the layer's other kernels   ", ("esc", "accent"), "  back")]  # fmt: skip
