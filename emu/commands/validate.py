"""emu validate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from emu.commands.options import Json
from emu.programs import DONE, FALSE
from emu.terminal import print_json, refuse_unwritable, stages

if TYPE_CHECKING:
    from emu.validate.report import Report


def validate(
    cases: Annotated[
        list[Path] | None,
        typer.Option(
            help="A file of measured runs and collectives, one JSON object a line; may be given more than once.",
            show_default="the published ones that come with emu",
        ),
    ] = None,
    held_out: Annotated[
        bool | None,
        typer.Option(
            "--held-out/--all",
            help="Report only layouts that no constant was fitted to, or all.",
            show_default="held out of emu's own cases, all of a file's",
        ),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw predicted against measured to FILE.png, or with all tables to FILE.html.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 1 unless all that emu promises of held-out layouts holds here.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Compare predictions with published runs: step time, order of runs, memory and collectives."""
    from emu.spmd import EmuError
    from emu.validate.cases import is_run
    from emu.validate.reading import PACKAGED, packaged_rows, read_rows
    from emu.validate.report import examined

    if picture is not None:
        if picture.suffix not in (".png", ".html"):
            raise EmuError(f"--picture {picture} is neither a PNG nor an HTML file", "end its name in .png or .html")
        refuse_unwritable("--picture", picture)
    if cases:
        lines, names = [line for path in cases for line in read_rows(path)], [str(path) for path in cases]
    else:
        lines, names = packaged_rows(), list(PACKAGED)
    if held_out is None:
        held_out = not cases
    with stages() as stage:
        report = examined(lines, names, held_out, tick=stage("price the runs", sum(map(is_run, lines))))
    if picture is not None:
        _draw(report, picture)
    if as_json:
        print_json(report.as_dict() | ({"picture": str(picture)} if picture else {}))
    else:
        from rich.console import Console

        from emu.validate.show import shown

        console = Console()
        for piece in shown(report):
            console.print(piece)
        if picture is not None:
            console.print(f"Picture: {picture}", markup=False, highlight=False, soft_wrap=True)
    if not report.compared or (check and any(goal.met is False for goal in report.goals)):
        return FALSE
    return DONE


def _draw(report: Report, path: Path) -> None:
    """Writes the picture; as HTML, with all that the terminal shows."""
    from emu.spmd import EmuError
    from emu.validate.show import sections
    from emu.view.report import Picture, write_report
    from emu.view.style import png_bytes
    from emu.view.validated import TITLE, Point, validated_figure

    if not report.times:
        raise EmuError("no run has a time that can be compared, so there is nothing to draw", "leave out --picture")
    of = "Step time of layouts held out, predicted against measured" if report.held_out else TITLE
    figure = validated_figure((Point(pair.source, pair.measured, pair.predicted) for pair in report.times), of)
    if path.suffix == ".png":
        path.write_bytes(png_bytes(figure))
    else:
        caption = "Each point is a run: its predicted over its measured time, its error, and how errors are spread."
        write_report(path, "Predicted against measured", [Picture(figure, caption), *sections(report)])
