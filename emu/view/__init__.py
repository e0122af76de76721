"""Pictures, tables and reports of a run. matplotlib and rich are imported when something draws, not before."""

from emu.view.activations import activations_figure
from emu.view.algorithms import algorithms_figure
from emu.view.attended_work import attended_work_figure
from emu.view.attention_traffic import attention_traffic_figure
from emu.view.batch_size import batch_size_figure
from emu.view.checkpointing import checkpointing_growth_figure, frontier_figure
from emu.view.computer import summaries_table, summary_html, summary_tables
from emu.view.context import ring_figure
from emu.view.decade import flops_decade_figure
from emu.view.holding import holding_figure
from emu.view.ladder import ladder_figure
from emu.view.layouts import layout_figure
from emu.view.losses import loss_figure
from emu.view.memory import memory_figure
from emu.view.memory_bars import memory_bars_figure
from emu.view.mesh import mesh_figure, mesh_html
from emu.view.notebook import attach
from emu.view.pipeline import run_schedule_figure, schedule_figure, side_by_side
from emu.view.records import trace_table
from emu.view.report import Code, Heading, Picture, Text, report_html, write_report
from emu.view.roofline import roofline_figure
from emu.view.routing import routing_figure
from emu.view.shares import shares_of
from emu.view.stepping import stepping_figure
from emu.view.style import png_bytes, png_data_uri
from emu.view.tables import Table, comparison_table, metrics_table
from emu.view.timeline import timeline_figure
from emu.view.traffic import traffic_figure, traffic_table
from emu.view.validated import validated_figure
from emu.view.waiting import waiting_figure
from emu.view.wiring import wiring_figure

__all__ = [
    "Code",
    "Heading",
    "Picture",
    "Table",
    "Text",
    "activations_figure",
    "algorithms_figure",
    "attach",
    "attended_work_figure",
    "attention_traffic_figure",
    "batch_size_figure",
    "checkpointing_growth_figure",
    "comparison_table",
    "flops_decade_figure",
    "frontier_figure",
    "holding_figure",
    "ladder_figure",
    "layout_figure",
    "loss_figure",
    "memory_bars_figure",
    "memory_figure",
    "mesh_figure",
    "mesh_html",
    "metrics_table",
    "png_bytes",
    "png_data_uri",
    "report_html",
    "ring_figure",
    "roofline_figure",
    "routing_figure",
    "run_schedule_figure",
    "schedule_figure",
    "shares_of",
    "side_by_side",
    "stepping_figure",
    "summaries_table",
    "summary_html",
    "summary_tables",
    "timeline_figure",
    "trace_table",
    "traffic_figure",
    "traffic_table",
    "validated_figure",
    "waiting_figure",
    "wiring_figure",
    "write_report",
]
