"""Draw the words of mermaid's diagrams (the arguments: SVG files) as paths: another font would not fit their boxes."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET

from matplotlib.textpath import TextPath

SVG = "{http://www.w3.org/2000/svg}"
SIZE, LINE = 14.0, 24.0  # pixels; the boxes are measured for narrower letters of 16 pixels
STEPS = {1: "M", 2: "L", 3: "Q", 4: "C", 79: "Z"}  # by matplotlib's codes


def draw(parent: ET.Element, words: str, x: float, y: float, limit: float, fill: str = "#111") -> None:
    """Add a line of words to a group, centred on x and y, and at most `limit` pixels wide."""
    outline = TextPath((0, 0), words, size=SIZE)
    box = outline.get_extents()
    scale = min(1.0, limit / box.width)
    place = f"translate({x - scale * (box.x0 + box.width / 2):.1f} {y + 0.36 * SIZE:.1f}) scale({scale:.3f} -1)"
    points = [(STEPS[int(code)], at if code != 79 else ()) for at, code in outline.iter_segments(simplify=False)]
    steps = "".join(step + " ".join(f"{one:.1f}" for one in at) for step, at in points)
    ET.SubElement(parent, SVG + "path", d=steps, transform=place, style=f"fill:{fill};stroke:none")


def convert(root: ET.Element) -> None:
    """Replace all labels of a diagram, also those that are HTML."""
    on_edges = {id(label) for one in root.iter() if "edgeLabel" in one.get("class", "") for label in one}
    for parent in list(root.iter()):
        for at, child in enumerate(parent):
            parent[at] = group = ET.Element(SVG + "g") if child.tag in (SVG + "foreignObject", SVG + "text") else child
            if child.tag == SVG + "text":
                y = float(child.get("y", 0)) + (SIZE if child.get("dy") == "1em" else 0)
                fill = "#fff" if child.get("class") == "noteText" else "#111"
                draw(group, "".join(child.itertext()), float(child.get("x", 0)), y, 220.0, fill)
            elif child.tag == SVG + "foreignObject" and (width := float(child.get("width", 0))):
                height = float(child.get("height", 0))
                if id(parent) in on_edges:
                    ET.SubElement(
                        group, SVG + "rect", width=f"{width}", height=f"{height}", style="fill:#fff;opacity:1"
                    )
                for line_break in child.iter():
                    line_break.text = "\n" if line_break.tag.endswith("}br") else line_break.text
                lines = "".join(child.itertext()).strip().split("\n")
                if len(lines) * LINE < height:  # mermaid has broken the last one: at the space next to its middle
                    last = lines.pop()
                    cut = min((i for i, one in enumerate(last) if one == " "), key=lambda i: abs(i - len(last) / 2))
                    lines += [last[:cut], last[cut + 1 :]]
                for i, line in enumerate(lines):
                    draw(group, line, width / 2, height / 2 + LINE * (i - (len(lines) - 1) / 2), width)


ET.register_namespace("", SVG[1:-1])
for file in sys.argv[1:]:
    tree = ET.parse(file)
    convert(tree.getroot())
    tree.write(file, encoding="utf-8")
