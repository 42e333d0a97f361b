"""`attnd bench`: puts a load on a server and prints what it gave."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from attnd.client import _roofline
from attnd.client._errors import AttndError
from attnd.client._info import CallRecord, ServerInfo
from attnd.client._load import Kind, Load, Measured, measure
from attnd.client._roofline import Roofline
from attnd.client._sync import Client
from attnd.v1.allocator import keep_freed_memory

_DEFAULTS = Load()


def bench(
    address: Annotated[
        str | None, typer.Argument(help="HOST:PORT of a server. Default: one of its own, while it measures.")
    ] = None,
    kind: Annotated[Kind, typer.Option(help="One new token a row, many, or both.")] = _DEFAULTS.kind,
    rows: Annotated[int, typer.Option(min=1, help="Rows of a batch.")] = _DEFAULTS.num_rows,
    kv_len: Annotated[int, typer.Option(min=1, help="Tokens that each row attends over.")] = _DEFAULTS.kv_len,
    chunk: Annotated[int, typer.Option(min=1, help="New tokens of a prefill row.")] = _DEFAULTS.chunk,
    q_heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = _DEFAULTS.num_q_heads,
    kv_heads: Annotated[int, typer.Option(min=1, help="Heads of keys, and of values.")] = _DEFAULTS.num_kv_heads,
    head_dim: Annotated[int, typer.Option(min=1, help="Elements of a head.")] = _DEFAULTS.head_dim,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens of a page.")] = _DEFAULTS.page_size,
    layers: Annotated[int, typer.Option(min=1, help="Layers.")] = _DEFAULTS.num_layers,
    dtype: Annotated[str, typer.Option(help="Element type of the cache.")] = _DEFAULTS.dtype,
    clients: Annotated[int, typer.Option(min=1, help="Clients at the same time.")] = _DEFAULTS.num_clients,
    duration_s: Annotated[float, typer.Option(min=0.1, help="Seconds to measure.")] = _DEFAULTS.duration_s,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw the latencies (needs matplotlib): out.png.")] = None,
) -> None:
    """Measures a server: latency, throughput, where the time goes, and how near the device's limits it is."""
    load = Load(
        kind=kind,
        num_rows=rows,
        kv_len=kv_len,
        chunk=chunk,
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        num_layers=layers,
        dtype=dtype,
        num_clients=clients,
        duration_s=duration_s,
    )
    keep_freed_memory()
    console = Console()
    try:
        with _server(address) as running:
            measured = _measure_with_progress(running, load)
            with Client(running) as client:
                server = client.server_info()
    except AttndError as error:
        typer.echo(f"attnd: {error}", err=True)
        raise typer.Exit(1) from error
    figures = _figures(load, measured, server, _roofline.of_device(server.devices[0].kind))
    console.print(_table(load, figures))
    if json_file is not None:
        json_file.write_text(json.dumps({"load": asdict(load), **figures}, indent=2) + "\n")
    if plot is not None:
        _draw(plot, load, measured, figures)


@contextmanager
def _server(address: str | None) -> Iterator[str]:
    """Gives the address of a server: the one that is named, or one that lives as long as this."""
    if address is not None:
        yield address
        return
    command = [sys.executable, "-m", "attnd.service", "serve", "--port", "0", "--log-level", "WARNING"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 - of this package
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            if not ready:
                raise typer.Exit(process.wait())
            yield ready.split()[-1]
        finally:
            process.terminate()


def _measure_with_progress(address: str, load: Load) -> Measured:
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %")
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("preparing", total=1.0)

        def advance(share: float) -> None:
            progress.update(task, completed=share, description="measuring")

        return measure(address, load, advance)


def _figures(load: Load, measured: Measured, server: ServerInfo, roofline: Roofline) -> dict[str, Any]:
    def part(name: str) -> float:
        return measured.median_ms(lambda record: getattr(record.timings, name))

    def wire(record: CallRecord) -> float:
        return record.wire_ns

    calls_per_s = len(measured.latencies_s) / measured.seconds
    kernel_ms = part("kernel_ns") + part("write_ns")
    first = measured.records[0]
    return {
        "device": server.devices[0].kind,
        "implementation": first.implementation,
        "calls": len(measured.latencies_s),
        "seconds": measured.seconds,
        "latency_ms": measured.percentiles_ms(),
        "calls_per_s": calls_per_s,
        "tokens_per_s": calls_per_s * int(load.q_lens.sum()),
        "wire_gb_per_s": calls_per_s * (first.request_bytes + first.response_bytes) / 1e9,
        "kv_gb_per_s": calls_per_s * load.kv_bytes / 1e9,
        "median_ms": {
            "queue": part("queue_ns"),
            "validate": part("validate_ns"),
            "write": part("write_ns"),
            "kernel": part("kernel_ns"),
            "encode": part("encode_ns"),
            "wire": measured.median_ms(wire),
        },
        "kernel_kv_gb_per_s": load.kv_bytes / kernel_ms / 1e6,
        "kernel_tflops_per_s": load.flops / kernel_ms / 1e9,
        "roofline": asdict(roofline),
        "roofline_share": roofline.least_s(load.kv_bytes, load.flops) * 1e3 / kernel_ms,
    }


def _table(load: Load, figures: dict[str, Any]) -> Table:
    title = (
        f"{load.kind}: {load.num_rows} rows of {load.kv_len} tokens, {load.num_q_heads} query heads on "
        f"{load.num_kv_heads}, head_dim {load.head_dim}, pages of {load.page_size}, {load.dtype}, "
        f"{load.num_clients} client{'s' if load.num_clients > 1 else ''}"
    )
    table = Table(title=title, title_justify="left", show_header=False)
    rows = {
        "device": f"{figures['device']}, {figures['implementation']}",
        "calls": f"{figures['calls']} in {figures['seconds']:.1f} s, one layer each",
        "latency": ", ".join(f"{name} {value:.3g} ms" for name, value in figures["latency_ms"].items()),
        "throughput": f"{figures['calls_per_s']:.4g} calls/s, {figures['tokens_per_s']:.4g} tokens/s in one layer",
        "over the wire": f"{figures['wire_gb_per_s']:.3g} GB/s",
        "median call": ", ".join(f"{name} {value:.3g} ms" for name, value in figures["median_ms"].items()),
        "kernel": f"{figures['kernel_kv_gb_per_s']:.3g} GB/s of keys and values, "
        f"{figures['kernel_tflops_per_s']:.3g} TFLOP/s",
        "of the roofline": f"{figures['roofline_share']:.0%} "
        f"({figures['roofline']['bytes_per_s'] / 1e9:.3g} GB/s, {figures['roofline']['flops_per_s'] / 1e12:.3g} "
        f"TFLOP/s: {figures['roofline']['source']})",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _draw(file: Path, load: Load, measured: Measured, figures: dict[str, Any]) -> None:
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - most runs draw nothing
    except ImportError as error:
        typer.echo("attnd: --plot needs matplotlib: pip install 'attnd[plot]'", err=True)
        raise typer.Exit(1) from error
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.hist([seconds * 1e3 for seconds in measured.latencies_s], bins=80, color="tab:blue")
    for name, value in figures["latency_ms"].items():
        axes.axvline(value, color="tab:gray", linewidth=1)
        axes.annotate(name, (value, 1), xycoords=("data", "axes fraction"), rotation=90, va="top", ha="right")
    axes.set_xlabel("milliseconds of a call")
    axes.set_ylabel("calls")
    axes.set_title(f"{load.kind} on {figures['device']}, {figures['implementation']}")
    figure.savefig(file)
