"""How pictures are made, without pyplot: no display, no global state."""

import logging
from pathlib import Path
from typing import Any


def new_figure(width: float, height: float) -> Any:
    """An empty figure of so many inches. Importing matplotlib takes a second that a run need not spend at its start."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_png(figure: Any, path: Path) -> None:
    """Writes it to a file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure).print_png(path)
