"""Checks of a whole configuration: bounds and choices from the schema, and the rules between keys."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from moeflow.config.build import get_key, show
from moeflow.config.keys import POLYMORPHIC, FieldInfo, iter_keys
from moeflow.config.problems import Problem, raise_any
from moeflow.errors import did_you_mean
from moeflow.schema import RunConfig
from moeflow.schema.engines import engine_problems


def validate(config: RunConfig, world: int | None = None) -> None:
    """Check bounds, choices and the rules between keys.

    Args:
        config: the configuration.
        world: number of processes where a launcher has fixed it; `launch.processes` otherwise.

    Raises:
        ConfigError: lists every problem, each with the key and the values that would work.
    """
    raise_any([*check_bounds(config), *check_rules(config, world)])


def _check_classes(config: RunConfig) -> Iterator[Problem]:
    for section, options in POLYMORPHIC.items():
        value = getattr(config, section)
        expected = options.get(value.name)
        if expected is not type(value):
            actual = next((name for name, cls in options.items() if cls is type(value)), "NAME")
            yield Problem(
                f"{section}.name={value.name} does not fit the option {section}={actual} that was chosen.",
                f"choose the option itself: {section}={value.name if expected else actual}",
            )


def check_bounds(config: RunConfig) -> Iterator[Problem]:
    """Yield the keys whose value breaks a constraint of the schema."""
    yield from _check_classes(config)
    classes = {section: type(getattr(config, section)) for section in POLYMORPHIC}
    for key in iter_keys(classes):
        value = get_key(config, key.name)
        if value is None:
            continue
        if key.field.kind is list:
            yield from _check_list(key.name, key.field, value)
        elif value == "" and ("path" in key.field.metadata or "path_under" in key.field.metadata):
            # As a path it would mean the current folder, which nobody asks for by an empty word (an unset $VARIABLE).
            mend = f"{key.name}=FOLDER, or leave it out" if "path" in key.field.metadata else f"{key.name}=FILE"
            yield Problem(f"{key.name} is empty: a path must have at least one character.", mend)
        elif broken := broken_rule(key.field, value):
            hint = did_you_mean(str(value), map(str, key.field.choices))
            yield Problem(
                f"{key.name}={show(value)}: the value must be {broken}.{hint}",
                _mend(key.name, key.field, value),
            )


def _check_list(name: str, field: FieldInfo, value: list[Any]) -> Iterator[Problem]:
    length = field.metadata.get("length")
    if length is not None and len(value) != length:
        yield Problem(
            f"{name}={show(value)}: the list must have {length} elements.",
            f"{name}={show(field.default)}",
        )
    for item in value:
        if broken := broken_rule(field, item):
            hint = did_you_mean(str(item), map(str, field.choices))
            yield Problem(
                f"{name}: its element {show(item)} must be {broken}.{hint}",
                f"{name}={show(field.default)}",
            )


def broken_rule(field: FieldInfo, value: Any) -> str | None:
    """Return what the value must be where it breaks a constraint of the field, else None."""
    rules = field.metadata
    if field.choices and value not in field.choices:
        return f"one of {', '.join(map(str, field.choices))}"
    low, high = rules.get("minimum", value), rules.get("maximum", value)
    if not low <= value <= high:
        if "minimum" in rules and "maximum" in rules:
            same = rules["minimum"] == rules["maximum"]
            return f"{rules['minimum']}" if same else f"between {rules['minimum']} and {rules['maximum']}"
        return f"at least {rules['minimum']}" if "minimum" in rules else f"at most {rules['maximum']}"
    if "above" in rules and value <= rules["above"]:
        return f"above {rules['above']:g}"
    if "below" in rules and value >= rules["below"]:
        return f"below {rules['below']:g}"
    return None


def _mend(name: str, field: FieldInfo, value: Any) -> str:
    if field.choices:
        return f"{name}={'|'.join(map(str, field.choices))}"
    for bound, beyond in (
        ("minimum", lambda limit: value < limit),
        ("maximum", lambda limit: value > limit),
    ):
        if bound in field.metadata and beyond(field.metadata[bound]):
            return f"{name}={field.metadata[bound]}"
    return f"{name}={show(field.default)}"


def check_rules(config: RunConfig, world: int | None = None) -> Iterator[Problem]:
    """Yield the problems between keys; keys that break their own bounds are left to the check of bounds."""
    parallel = config.parallel
    sizes = (
        parallel.pp,
        parallel.tp,
        parallel.ep,
        parallel.etp,
        config.launch.processes,
        config.trainer.grad_accum,
    )
    if min(*sizes, config.data.batch_size) < 1:
        return
    processes = config.launch.processes if world is None else world
    yield from _check_layout(config, processes, fixed=world is not None)
    yield from _check_experts(config)
    dense = parallel.pp * parallel.tp
    for what, mend in engine_problems(config, processes // dense if processes % dense == 0 else None):
        yield Problem(what, mend or None)
    yield from _check_balance(config)
    yield from _check_overlap(config)


def _check_layout(config: RunConfig, world: int, fixed: bool) -> Iterator[Problem]:
    p = config.parallel
    dense = p.pp * p.tp
    if world % dense:
        started = f"the launcher started {world}" if fixed else f"launch.processes={world}"
        mend = (
            f"launch.processes={_multiples(dense, near=world)}"
            if not fixed
            else f"start {_multiples(dense, world)} processes"
        )
        yield Problem(
            f"the layout does not fit: {started}, which must be a multiple of parallel.pp * parallel.tp = "
            f"{p.pp} * {p.tp} = {dense} (world = pp * dp * tp).",
            mend,
        )
        return
    dp = world // dense
    stage = dp * p.tp
    if stage % (p.ep * p.etp):
        yield from _check_expert_layout(config, world, stage, fixed)
    shares = dp * config.trainer.grad_accum
    if config.data.batch_size % shares:
        yield Problem(
            f"data.batch_size={config.data.batch_size} does not divide over dp * trainer.grad_accum = {dp} * "
            f"{config.trainer.grad_accum} = {shares} micro-batches.",
            f"data.batch_size={_multiples(shares, near=config.data.batch_size)}",
        )


def _check_expert_layout(config: RunConfig, world: int, stage: int, fixed: bool) -> Iterator[Problem]:
    p = config.parallel
    expert = p.ep * p.etp
    good_ep = [n for n in _divisors(stage) if stage % (n * p.etp) == 0 and _experts_divide(config, n)]
    ways = [f"parallel.ep={_either(good_ep)}"] if good_ep else [f"parallel.etp={_either(_divisors(stage))}"]
    if not fixed and expert % p.tp == 0:
        ways.append(f"launch.processes={p.pp * expert}")
    yield Problem(
        f"the layout does not fit: parallel.ep * parallel.etp = {p.ep} * {p.etp} = {expert} must divide the {stage} "
        f"ranks of a pipeline stage (dp * tp = edp * ep * etp, with {world} processes, pp={p.pp}, tp={p.tp}).",
        " or ".join(ways),
    )


def _check_experts(config: RunConfig) -> Iterator[Problem]:
    experts, ep = config.model.num_experts, config.parallel.ep
    if experts < 1:
        if experts == 0 and ep > 1:
            yield Problem(
                f"parallel.ep={ep}, but model.num_experts=0 makes every MoE layer a plain MLP.",
                "parallel.ep=1",
            )
        return
    if not _experts_divide(config, ep):
        yield Problem(
            f"model.num_experts={experts} (the total of a layer) does not divide over parallel.ep={ep} ranks.",
            f"model.num_experts={_multiples(ep, near=experts)} or parallel.ep={_either(_divisors(experts))}",
        )
    if config.gate.top_k > experts:
        yield Problem(
            f"gate.top_k={config.gate.top_k} is more than model.num_experts={experts}.",
            f"gate.top_k={experts} or model.num_experts={config.gate.top_k}",
        )


def _check_balance(config: RunConfig) -> Iterator[Problem]:
    balance, experts = config.balance, config.model.num_experts
    fixed = balance.fixed_shadows
    if fixed is not None and not balance.shadow:
        yield Problem(
            f"balance.fixed_shadows={show(fixed)} is without effect: nothing is shadowed.",
            "balance.shadow=true, or balance.fixed_shadows=null",
        )
    if not balance.active or experts < 1:
        return
    if config.parallel.ep == 1:
        yield Problem(
            "balance spreads load over the ranks of an expert-parallel group, and parallel.ep=1 has one rank alone.",
            f"parallel.ep={_either(_divisors(experts)[1:]) or 2}, or balance=none",
        )
    if config.gate.name == "soft":
        yield Problem("gate=soft gives all experts equally many rows: there is nothing to balance.", "balance=none")
    if balance.placement and config.gate.name == "topology":
        yield Problem(
            "gate=topology chooses experts by where they are, so balance.placement=true would change what is learned.",
            "balance.placement=false, or another gate",
        )
    if outside := [expert for expert in fixed or () if expert >= experts]:
        yield Problem(
            f"balance.fixed_shadows={show(fixed)}: {outside[0]} is no expert, model.num_experts={experts}.",
            f"numbers from 0 to {experts - 1}",
        )


def _check_overlap(config: RunConfig) -> Iterator[Problem]:
    overlap, ep = config.overlap, config.parallel.ep
    chunks = overlap.chunks
    if chunks != "auto" and not (chunks.isdecimal() and int(chunks) >= 1):
        yield Problem(
            f"overlap.chunks={show(chunks)}: must be auto or a whole number from 1 on.", "overlap.chunks=auto"
        )
        return
    if overlap.active and ep == 1:
        yield Problem(
            "overlap is about the exchange over an expert-parallel group, and parallel.ep=1 has one rank alone.",
            f"parallel.ep={_either(_divisors(max(config.model.num_experts, 1))[1:]) or 2}, or overlap=none",
        )
        return
    if chunks.isdecimal() and config.model.num_experts >= ep > 1 and int(chunks) > config.model.num_experts // ep:
        local = config.model.num_experts // ep
        yield Problem(
            f"overlap.chunks={chunks}: a chunk holds whole experts, and each rank has {local} of them.",
            f"overlap.chunks={local}, or overlap.chunks=auto",
        )
    if chunks not in ("1", "auto") and overlap.exchange == "hierarchical":
        yield Problem(
            f"overlap.chunks={chunks} with overlap.exchange=hierarchical: chunks travel flat.",
            "overlap.exchange=flat, or overlap.chunks=1",
        )


def _experts_divide(config: RunConfig, ep: int) -> bool:
    return config.model.num_experts % ep == 0


def _divisors(number: int) -> list[int]:
    """Return the divisors of `number`; of huge numbers only the small ones and their counterparts."""
    small = [n for n in range(1, min(math.isqrt(number), 4096) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _multiples(unit: int, near: int) -> str:
    """Return the two multiples of `unit` around `near` as `a|b`."""
    below = near // unit * unit
    return _either([n for n in (below, below + unit) if n > 0])


def _either(values: Sequence[int]) -> str:
    """Return the values as `a|b|c`, cut to eight."""
    return "|".join(map(str, values[:8])) + ("|..." if len(values) > 8 else "")
