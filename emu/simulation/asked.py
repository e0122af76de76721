"""What a simulation is asked for, as it was said: a model by name, a cluster by name; and what cannot be."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

import torch
from torch import nn

from emu.hardware import Cluster, cluster
from emu.models import Config, Decoder, config
from emu.parallel import Plan, check_fit, checked_plan, mesh_of
from emu.simulation.program import layers_of
from emu.spmd import EmuError, Mesh, PlanError

LONGEST = ("seq", "max_position_embeddings")  # fields of a config: emu's, and what configs of transformers call it


@dataclass(frozen=True)
class Asked:
    """What to simulate.

    Args:
        make: makes the plain model.
        name: of the model.
        config: its shape, if it is one of emu's own.
        layers: of the model.
        plan: checked against it.
        mesh: on the cluster.
    """

    make: Callable[[], Any]
    name: str
    config: Config | None
    layers: int
    plan: Plan
    mesh: Mesh


def asked(model: Any, plan: Any, where: Any) -> Asked:
    """Reads and checks what was asked for.

    Args:
        model: a name, a Config, or a function without arguments that returns a plain module.
        plan: a Plan.
        where: a Cluster, the name of one, or the path of a TOML file.

    Raises:
        EmuError: no such model, or something else than one.
        PlanError: no plan; one that does not fit the model, or has more ranks than the cluster has devices.
        HardwareError: no such cluster, or a file that describes none. UnknownModelError: no such model.
    """
    plan = checked_plan(plan)
    on = cluster_of(where)
    mesh = _mesh(plan, on)
    make, name, shape = _maker(model)
    with torch.device("meta"):
        made = make()
    if not isinstance(made, nn.Module):
        raise EmuError(f"{name} returned a {type(made).__name__}, not a module", "return a plain torch.nn.Module")
    if any(not p.is_meta for p in made.parameters()):
        made = made.to("meta")
    check_fit(made, plan)
    _check_length(made, plan)
    return Asked(make, name, shape, len(layers_of(made)), plan, mesh)


def cluster_of(where: Any) -> Cluster:
    """A cluster by itself, by name, or by the path of a TOML file."""
    if isinstance(where, Cluster):
        return where
    if isinstance(where, (str, PathLike)):
        text = fspath(where)
        return Cluster.from_toml(text) if str(text).endswith(".toml") else cluster(str(text))
    raise EmuError(
        f"the cluster is a {type(where).__name__}",
        'pass a name, "h100-8", the path of a TOML file, or emu.cluster(...)',
    )


def model_config(model: Any) -> Config | None:
    """The shape of a model that was named, or said by its shape."""
    return config(model) if isinstance(model, str) else model if isinstance(model, Config) else None


def _maker(model: Any) -> tuple[Callable[[], Any], str, Config | None]:
    shape = model_config(model)
    if shape is not None:
        return lambda: Decoder(shape), model if isinstance(model, str) else "a Decoder", shape
    name = getattr(model, "__name__", type(model).__name__)
    if isinstance(model, nn.Module) or not callable(model):
        raise EmuError(
            f"the model is a {type(model).__name__}",
            'pass a name, "gpt-tiny", an emu.models.Config, or a function without arguments that makes a torch.nn.Module: '
            "every rank makes its own",
        )
    try:
        inspect.signature(model).bind()
    except TypeError as error:
        raise EmuError(
            f"{name} cannot be called without arguments: {error}", f"pass lambda: {name}(...) with its arguments"
        ) from None
    except ValueError:  # a builtin, which says nothing about itself
        pass
    return model, name, None


def _mesh(plan: Plan, on: Cluster) -> Mesh:
    """The plan's mesh on the cluster."""
    ranks = mesh_of(plan).size
    if ranks <= on.n_devices:
        return mesh_of(plan, on)
    axes = dict(plan.axes())
    for axis in sorted(axes, key=lambda name: ("dp", "cp", "pp", "tp").index(name) if name in axes else 0):
        others = ranks // axes[axis]
        if others <= on.n_devices:
            axes[axis] = on.n_devices // others
            break
        axes[axis], ranks = 1, others
    nearest = ",".join(f"{axis}={size}" for axis, size in axes.items())
    raise PlanError(
        f"mesh={plan.mesh} has {mesh_of(plan).size:,} ranks, but {on.name} has {on.n_devices:,} devices",
        f"take a cluster of at least {mesh_of(plan).size:,} devices, or a smaller mesh: {nearest}",
        field="mesh",
        nearest=nearest,
    )


def _check_length(model: nn.Module, plan: Plan) -> None:
    """Sequences are no longer than the model takes."""
    shape = getattr(model, "config", None)
    for field in LONGEST:
        most = getattr(shape, field, None)
        if isinstance(most, int) and plan.seq > most:
            raise PlanError(
                f"seq={plan.seq}, but {type(model).__name__} takes sequences of at most {most} tokens (config.{field})",
                f"the nearest plan has seq={most}; or make the model with {field}={plan.seq}",
                field="seq",
                value=plan.seq,
                nearest=most,
            )
