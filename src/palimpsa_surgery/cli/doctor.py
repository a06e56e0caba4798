"""`palimpsa-surgery doctor`."""

from typing import Annotated

import typer


def doctor(
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; a GPU where there is one.")] = None,
) -> None:
    """Check this installation: versions, paths, and every kernel against float64.

    Exits with 0 when everything computes what it should, and with 1 otherwise.

    \b
    Examples:
      palimpsa-surgery doctor
      palimpsa-surgery doctor --device cpu
    """
    from rich.table import Table

    from palimpsa_surgery.cli.console import console
    from palimpsa_surgery.surgery.doctor import doctor as check
    from palimpsa_surgery.surgery.progress import track

    report = check(device, progress=lambda jobs: track(jobs, "Checking kernels"))

    table = Table(title=f"Installation, on {report.device}", title_justify="left")
    table.add_column("what")
    table.add_column("found", overflow="fold")
    for name, version in {**report.versions, **report.paths}.items():
        table.add_row(name, version)
    console.print(table)

    table = Table(title="Relative error against float64, forward and backward", title_justify="left")
    for column in ("path", "type"):
        table.add_column(column)
    for column in ("lengths", "worst error", "allowed"):
        table.add_column(column, justify="right")
    table.add_column("in")
    groups: dict[tuple[str, str], list] = {}
    for entry in report.checks:
        groups.setdefault((entry.path, str(entry.dtype).removeprefix("torch.")), []).append(entry)
    for (path, dtype), entries in groups.items():
        worst = max(entries, key=lambda entry: entry.error / entry.bound)
        style = None if worst.passed else "bold red"
        table.add_row(
            path, dtype, str(len(entries)), f"{worst.error:.1e}", f"{worst.bound:.0e}", worst.worst, style=style
        )
    console.print(table)
    for entry in report.checks:
        if not entry.passed:
            what = entry.message.splitlines()[0] if entry.message else f"error {entry.error:.1e} > {entry.bound:.0e}"
            dtype = str(entry.dtype).removeprefix("torch.")
            console.print(f"FAILED {entry.path}, {dtype}, {entry.length} tokens: {entry.worst}: {what}", markup=False)
    failed = sum(not entry.passed for entry in report.checks)
    if failed:
        console.print(f"{failed} of {len(report.checks)} checks failed: do not train or evaluate on this device.")
        raise typer.Exit(1)
    console.print(f"All {len(report.checks)} checks passed.")
