"""The measurements of ``mla bench`` as a bar chart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mla.cli.plan_view import COLOURS


def draw(report: dict[str, Any], path: Path) -> None:
    """Write a PNG: TFLOP/s of each shape and step by target, the spread as a whisker, the matmul's rate as a line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found, targets = report["measurements"], list(report["targets"])
    jobs = [job for job in ("prefill", "whole job") if any(one["job"] == job for one in found)]
    names = {job: list(dict.fromkeys(one["name"] for one in found if one["job"] == job)) for job in jobs}
    figure = Figure(figsize=(max(7.0, 2.5 + 0.9 * sum(map(len, names.values()))), 4.8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    devices = ", ".join(dict.fromkeys(about["device"] for about in report["targets"].values()))
    figure.suptitle(f"mla bench on {devices}", fontsize=12, fontweight="bold")
    panels = figure.subplots(
        1, len(jobs), sharey=True, squeeze=False, width_ratios=[len(names[job]) + 1 for job in jobs]
    )
    width = 0.8 / len(targets)
    for axes, job in zip(panels[0], jobs, strict=True):
        for t, target in enumerate(targets):
            own = [one for one in found if one["job"] == job and one["target"] == target]
            places = [names[job].index(one["name"]) + (t - (len(targets) - 1) / 2) * width for one in own]
            rates = [one["tflops"] for one in own]
            spread = [
                [one["tflops"] * (1 - one["ms"] / one["ms_80"]) for one in own],
                [one["tflops"] * (one["ms"] / one["ms_20"] - 1) for one in own],
            ]
            axes.bar(places, rates, width * 0.92, yerr=spread, capsize=2, color=COLOURS[t], label=target, zorder=2)
            for place, one, top in zip(places, own, spread[1], strict=True):
                axes.annotate(
                    f"{one['tflops']:.3g}\n{one['roof']:.0%}", (place, one["tflops"] + top), (0, 3),
                    textcoords="offset points", ha="center", fontsize=8,
                )  # fmt: skip
            roof = report["roofs"][target]["tflops"]
            axes.axhline(roof, color=COLOURS[t], linestyle="--", linewidth=1, label=f"bf16 matmul, {target} device")
        labels = [_label(next(one for one in found if (one["job"], one["name"]) == (job, name))) for name in names[job]]
        axes.set_xticks(range(len(labels)), labels, fontsize=8)
        axes.set_title("attention alone, fixed shapes" if job == "prefill" else "whole job, real steps", fontsize=10)
        axes.grid(axis="y", alpha=0.3, zorder=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.02, y=0.15)
    panels[0][0].set_ylabel("TFLOP/s of attention, and share of the roof")
    handles, words = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, words, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path)


def _label(one: dict[str, Any]) -> str:
    name = one["name"] if one["job"] == "prefill" else f"step {one['name']}"
    return f"{name}\n{one['heads']} head{'s' * (one['heads'] > 1)}"
