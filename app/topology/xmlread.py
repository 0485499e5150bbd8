"""XML from strangers into a small tree with line numbers; entities, depth and size are bounded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from xml.etree.ElementTree import ParseError

from costlab.app.topology.model import TopologyProblem

MAX_BYTES = 32 << 20
MAX_DEPTH = 128
MAX_ELEMENTS = 200_000
MAX_ATTRIBUTES = 64
MAX_TEXT = 1 << 16  # characters of one attribute or text


@dataclass
class Element:
    """A tag with its attributes, children and the line it starts on."""

    tag: str
    attrs: dict[str, str]
    line: int
    children: list[Element] = field(default_factory=list)
    text: str = ""

    def get(self, name: str, default: str = "") -> str:
        """An attribute's text without surrounding blanks."""
        return self.attrs.get(name, default).strip()

    def all(self, tag: str) -> list[Element]:
        """Children with this tag."""
        return [c for c in self.children if c.tag == tag]

    def walk(self) -> Iterator[Element]:
        """This element and all below, in document order."""
        yield self
        for child in self.children:
            yield from child.walk()


class _Target:
    """Builds the tree while expat reads; raises at the line where a bound is passed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.line: Callable[[], int] = lambda: 1
        self.root: Element | None = None
        self._open: list[Element] = []
        self._count = 0

    def stop(self, reason: str) -> TopologyProblem:
        return TopologyProblem(self.name, self.line(), reason)

    def start(self, tag: str, attrs: dict[str, str]) -> None:
        self._count += 1
        if len(self._open) >= MAX_DEPTH:
            raise self.stop(f"elements nested deeper than {MAX_DEPTH}")
        if self._count > MAX_ELEMENTS:
            raise self.stop(f"more than {MAX_ELEMENTS} elements")
        if len(attrs) > MAX_ATTRIBUTES or any(len(v) > MAX_TEXT for v in attrs.values()):
            raise self.stop("too many or too long attributes")
        element = Element(tag, attrs, self.line())
        if self._open:
            self._open[-1].children.append(element)
        else:
            self.root = element
        self._open.append(element)

    def data(self, text: str) -> None:
        if self._open and text.strip():
            here = self._open[-1]
            here.text += text
            if len(here.text) > MAX_TEXT:
                raise self.stop("text of an element is too long")

    def end(self, _tag: str) -> None:
        self._open.pop()

    def close(self) -> Element | None:
        return self.root


def parse(data: bytes, name: str) -> Element:
    """The root element; TopologyProblem, with the line, for damaged or hostile XML."""
    from defusedxml import DefusedXmlException
    from defusedxml.ElementTree import DefusedXMLParser

    if len(data) > MAX_BYTES:
        raise TopologyProblem(name, None, f"larger than {MAX_BYTES >> 20} MiB")
    target = _Target(name)
    parser: Any = DefusedXMLParser(target=target, forbid_dtd=False, forbid_entities=True, forbid_external=True)
    target.line = lambda: int(parser.parser.CurrentLineNumber)
    try:
        parser.feed(data)
        root: Element | None = parser.close()
    except DefusedXmlException as error:
        kind = re.sub(r"(?<!^)(?=[A-Z])", " ", type(error).__name__).lower()
        raise TopologyProblem(name, target.line(), f"declares what a topology has no use for ({kind})") from error
    except ParseError as error:
        raise TopologyProblem(
            name, error.position[0], f"not well-formed XML ({str(error).partition(':')[0]})"
        ) from error
    except (LookupError, UnicodeError) as error:
        raise TopologyProblem(name, target.line(), f"unreadable encoding ({error})") from error
    if root is None:
        raise TopologyProblem(name, 1, "no element")
    return root


def number(element: Element, attribute: str, name: str) -> float | None:
    """A decimal or 0x number; None where absent or empty; TopologyProblem for anything else."""
    text = element.get(attribute)
    if not text:
        return None
    try:
        value = float(int(text, 16)) if text.lower().startswith(("0x", "-0x")) else float(text)
    except ValueError:
        value = float("nan")
    if not abs(value) < 1e18:
        raise TopologyProblem(name, element.line, f'<{element.tag} {attribute}="{text[:40]}">: not a number')
    return value


def whole(element: Element, attribute: str, name: str) -> int | None:
    """Like `number`, for whole numbers."""
    value = number(element, attribute, name)
    if value is not None and value != int(value):
        text = element.get(attribute)[:40]
        raise TopologyProblem(name, element.line, f'<{element.tag} {attribute}="{text}">: not a whole number')
    return None if value is None else int(value)
