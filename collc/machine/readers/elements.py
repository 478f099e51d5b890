"""XML with line numbers, read by expat; without DTDs and entities, which no topology needs."""

from dataclasses import dataclass, field
from xml.parsers import expat

from collc.errors import MachineError
from collc.machine.readers.found import shown

DEEPEST = 32
MOST = 20_000


@dataclass(eq=False)
class Element:
    """An element, with the line where it begins."""

    file: str
    line: int
    name: str
    attributes: dict[str, str]
    children: list["Element"] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.file} line {self.line}, <{self.name}>"

    def fault(self, found: str, needed: str) -> MachineError:
        """The error about it: what was found, and what is needed."""
        return MachineError(f"{self}: {found}. {needed}")

    def text(self, name: str) -> str:
        """An attribute that has to be there. Raises MachineError."""
        value = self.attributes.get(name, "")
        if not value.strip():
            has = "is empty" if name in self.attributes else "is missing"
            raise self.fault(f"{name} {has}", f'It needs one, as in {name}="{_LIKE[name]}".')
        return value.strip()

    def integer(self, name: str, least: int, most: int) -> int:
        """An attribute that has to be a number in that range, also hexadecimal. Raises MachineError."""
        value = self.text(name)
        try:
            number = int(value, 16 if value.lower().startswith("0x") else 10)
        except ValueError:
            number = None
        if number is None or not least <= number <= most:
            raise self.fault(
                f"{name}={shown(value)}", f"It has to be an integer from {least} to {most}."
            )
        return number


_LIKE = {
    "busid": "0000:07:00.0",
    "count": "2",
    "dev": "0",
    "link_width": "16",
    "numaid": "0",
    "sm": "90",
    "speed": "200000",
    "target": "0000:c4:00.0",
    "familyid": "6",
    "modelid": "143",
    "latency": "0",
}


def parse(file: str, data: bytes) -> Element:
    """The root element. Raises MachineError, with the line, where the text is not plain XML."""
    parser = expat.ParserCreate()
    open_elements: list[Element] = []
    roots: list[Element] = []
    count = 0

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal count
        count += 1
        element = Element(file, parser.CurrentLineNumber, name, attributes)
        if count > MOST:
            raise element.fault(
                f"more than {MOST:,} elements", "No topology of one node has so many."
            )
        if len(open_elements) >= DEEPEST:
            raise element.fault(f"nested {len(open_elements) + 1} deep", f"At most {DEEPEST} are.")
        (open_elements[-1].children if open_elements else roots).append(element)
        open_elements.append(element)

    def end(_: str) -> None:
        open_elements.pop()

    def refuse(name: str, *_: object) -> None:
        of = " It is hwloc's; NCCL's is needed." if name == "topology" else ""
        raise MachineError(
            f"{file} line {parser.CurrentLineNumber}: a DTD or an entity, which a topology has no "
            f"use for and which can blow up. Take them out.{of}"
        )

    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.StartDoctypeDeclHandler = parser.EntityDeclHandler = refuse
    try:
        parser.Parse(data, True)
    except expat.ExpatError as e:
        if open_elements and e.code in _TRUNCATED:
            raise MachineError(
                f"{file} line {e.lineno}: the file ends, but {open_elements[-1]} is not closed. "
                "It is truncated: copy or dump it again."
            ) from e
        what = expat.ErrorString(e.code)
        raise MachineError(
            f"{file} line {e.lineno}, column {e.offset + 1}: not XML: {what}. "
            "It needs to be what NCCL_TOPO_DUMP_FILE writes."
        ) from e
    except (
        ValueError,
        LookupError,
    ) as e:  # an encoding that Python does not know, or not like this
        raise MachineError(f"{file} line 1: not XML: {e}. It needs to be UTF-8.") from e
    return roots[0]


_TRUNCATED = {
    expat.errors.codes[expat.errors.XML_ERROR_NO_ELEMENTS],
    expat.errors.codes[expat.errors.XML_ERROR_UNCLOSED_TOKEN],
    expat.errors.codes[expat.errors.XML_ERROR_PARTIAL_CHAR],
}
