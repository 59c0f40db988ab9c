"""Four hosts on one machine: what chunks, two hops, shadows and placement bring where the network is slow.

    sudo python benchmarks/adaptive.py                            every part, about ten minutes
    sudo python benchmarks/adaptive.py --parts overlap --mbits 200 400
    sudo python benchmarks/adaptive.py --json adaptive.json

Each host is a network namespace, joined to the others by a bridge and a token bucket of so many Mbit/s each way, so
that rows really wait for a network.  Hosts of the part `hierarchical` have two ranks each.  The ranks share the cores
of this machine: computation is that of a part of a core, and the cost model is calibrated under the same load
(`moeflow.parallel.measure`), so predictions and measurements speak of the same thing.

Routing is drawn by code (even, or by a Zipf law over the experts) and given to the layer by its gate hook; a step is
forward and backward of one MoE layer alone.  Settings of one part take turns step by step in one process group, and a
figure is the median over the steps of the slowest rank's time; a ratio is the median of the ratios of the single steps,
which other work on the machine disturbs less.  Needs root, `ip` and `tc` (iproute2).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import date
from itertools import cycle
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("overlap", "shadow", "placement", "hierarchical")
D_MODEL, TOP_K, EXPERTS = 256, 2, 16
#: Tokens of a rank, and d_hidden, of each part: computation and exchange of one size, or the network in front.
SIZES = {"overlap": (1024, 1024), "hierarchical": (1024, 1024), "shadow": (2048, 256), "placement": (2048, 256)}
ZIPF = 1.2
DRIFT, MOVE_EVERY = 16, 4  # steps until the hot experts change, and between decisions on placement


# --- hosts ------------------------------------------------------------------------------------------------------------


_LETTERS = cycle("acdfghijklmopqrstuwxyz")


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


@contextmanager
def hosts(count: int, mbits: float) -> Iterator[list[str]]:
    """Network namespaces joined at a limited rate; gone at the end."""
    # Interfaces of a namespace go a moment after it: never the same name twice.
    tag = f"mf{os.getpid() % 10000}{next(_LETTERS)}"
    bridge, names = f"{tag}b", [f"{tag}n{i}" for i in range(count)]
    with ExitStack() as undo:
        _run("ip", "link", "add", bridge, "type", "bridge")
        undo.callback(_run, "ip", "link", "del", bridge)
        _run("ip", "link", "set", bridge, "up")
        for i, name in enumerate(names):
            _run("ip", "netns", "add", name)
            undo.callback(_run, "ip", "netns", "del", name)
            inner, outer = f"{tag}e{i}", f"{tag}v{i}"
            _run("ip", "link", "add", inner, "type", "veth", "peer", "name", outer)
            _run("ip", "link", "set", inner, "netns", name)
            _run("ip", "link", "set", outer, "master", bridge, "up")
            inside = ("ip", "netns", "exec", name)
            _run(*inside, "ip", "link", "set", "lo", "up")
            _run(*inside, "ip", "addr", "add", f"10.77.0.{i + 1}/24", "dev", inner)
            _run(*inside, "ip", "link", "set", inner, "name", "moe0")
            _run(*inside, "ip", "link", "set", "moe0", "up")
            # A bucket that is full after two milliseconds: what is saved up while ranks compute should not count.
            burst = max(32, round(mbits * 1e6 / 8 * 2e-3 / 1024))
            rate = ("tbf", "rate", f"{mbits}mbit", "burst", f"{burst}kb", "latency", "100ms")
            _run(*inside, "tc", "qdisc", "add", "dev", "moe0", "root", *rate)
            # What the host receives is limited where the bridge sends it.
            _run("tc", "qdisc", "add", "dev", outer, "root", *rate)
        yield names


def on_hosts(names: list[str], per_host: int, job: dict[str, Any]) -> dict[str, Any]:
    """Run this file's ranks on the hosts; returns what rank 0 printed."""
    world = len(names) * per_host
    ranks = []
    for rank in range(world):
        env = os.environ | {
            **{"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank % per_host)},
            **{"LOCAL_WORLD_SIZE": str(per_host), "GROUP_RANK": str(rank // per_host)},
            **{"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29533", "GLOO_SOCKET_IFNAME": "moe0"},
            **{"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"},
        }
        words = ["ip", "netns", "exec", names[rank // per_host], sys.executable, __file__, "--child", json.dumps(job)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} if rank == 0 else {"stdout": subprocess.DEVNULL}
        ranks.append(subprocess.Popen(words, env=env, text=True, **pipes))  # type: ignore[call-overload]
    try:
        out, err = ranks[0].communicate(timeout=600)
        codes = [process.wait(60) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}:\n{err}")
    return json.loads(out.strip().splitlines()[-1])


# --- ranks ------------------------------------------------------------------------------------------------------------


def child(job: dict[str, Any]) -> None:
    """One rank: calibrates, then lets the settings take turns."""
    import torch
    import torch.distributed as dist

    sys.path.insert(0, str(ROOT))
    from moeflow.parallel.measure import measure_profile
    from moeflow.parallel.topology import Topology
    from moeflow.plan.cost import ExpertShape
    from moeflow.schema import ParallelConfig

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    topology = Topology.create(ParallelConfig(ep=dist.get_world_size()), 120.0)
    profile = measure_profile(topology, ExpertShape(D_MODEL, job["hidden"]), torch.device("cpu"))
    settings = {name: Setting(job, options, topology, profile) for name, options in job["settings"].items()}
    for setting in settings.values():
        for step in (0, 1):
            setting.step(step)
    times: dict[str, list[float]] = {name: [] for name in settings}
    for step in range(2, 2 + job["steps"]):
        # Forwards and backwards, so that what one leaves in the buckets does not always meet the same one.
        for name, setting in list(settings.items())[:: 1 if step % 2 else -1]:
            times[name].append(setting.step(step))
    found: dict[str, Any] = {name: {"measured_s": statistics.median(of), "times": of} for name, of in times.items()}
    for name, setting in settings.items():
        found[name] |= setting.told()
    if dist.get_rank() == 0:
        print(json.dumps({"settings": found, "profile": dataclasses.asdict(profile)}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def routing(kind: str, tokens: int, step: int, rank: int) -> Any:
    """int64 [T, K] experts of each token: "even", "zipf", or "drift", a Zipf law whose hot experts change slowly."""
    import numpy as np

    draw = np.random.default_rng([step, rank])
    weights = np.ones(EXPERTS) if kind == "even" else 1.0 / np.arange(1, EXPERTS + 1) ** ZIPF
    order = np.random.default_rng(7 + (step // DRIFT if kind == "drift" else 0)).permutation(EXPERTS)
    logits = np.log(weights)[None] + draw.gumbel(size=(tokens, EXPERTS))  # without replacement: Gumbel top-k
    return order[np.argsort(-logits, axis=1)[:, :TOP_K]]


class Setting:
    """One layer with one way of exchange and balance."""

    def __init__(self, job: dict[str, Any], options: dict[str, Any], topology: Any, profile: Any):
        import torch
        from torch import nn

        from moeflow.moe import MoELayer
        from moeflow.parallel.balance import Balance
        from moeflow.parallel.collectives import gather_objects
        from moeflow.parallel.exchange import set_exchange
        from moeflow.parallel.nodes import grouping_of, own_node
        from moeflow.parallel.parallelize import parallelize
        from moeflow.schema import BalanceConfig
        from moeflow.schema.balance import OverlapConfig

        self.kind, self.tokens, self.hidden, self.profile = job["routing"], job["tokens"], job["hidden"], profile
        with torch.device("meta"):
            model = nn.ModuleDict(
                {"moe": MoELayer(D_MODEL, EXPERTS, self.hidden, "naive", activation="gelu", bias=False)}
            )
        # The same experts for all settings.
        parallelize(model, topology, 3, torch.device("cpu"))
        set_exchange(model, topology, OverlapConfig(**options.get("overlap", {})), profile, 120.0)
        balance = BalanceConfig(**options.get("balance", {}))
        # A decision on placement counts on a hundred steps, as in a run; they are played faster here.
        self.balance = Balance.of(model, topology, balance, profile, "fp32", 100 // MOVE_EVERY)
        self.layer = model["moe"]
        self.layer.gate_hook = self._route
        self.ids: Any = None
        self.predicted: list[float] = []
        self.shadows: list[int] = []
        # Moments move with their experts; the parameters stay what they are.
        self.optimizer = torch.optim.AdamW(self.layer.parameters(), lr=0.0)
        for parameter in self.layer.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.between: list[float] = []
        self.ranks = topology["ep"].size
        self.grouping = grouping_of(gather_objects(own_node(), topology["ep"]))

    def _route(self, out: Any) -> Any:
        return dataclasses.replace(out, ids_TK=self.ids, counts_E=None)

    def step(self, step: int) -> float:
        """Seconds of forward and backward, of the slowest rank."""
        import torch
        import torch.distributed as dist

        self.ids = torch.from_numpy(routing(self.kind, self.tokens, step, dist.get_rank()))
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(1, self.tokens, D_MODEL, generator=generator).requires_grad_()
        for parameter in self.layer.parameters():
            parameter.grad = None
        dist.barrier()
        start = time.perf_counter()
        y = self.layer(x)
        y.backward(torch.ones_like(y))
        taken = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        self.predicted.append(self._predict(step))
        start = time.perf_counter()
        self.balance.end_step(step, self.optimizer)
        self.between.append(time.perf_counter() - start)
        return taken.item()

    def _counts(self, step: int) -> Any:
        """[ranks, E] rows for each place."""
        import numpy as np

        balancer = self.layer.dispatcher.balancer
        places_E = np.arange(EXPERTS) if balancer is None else np.argsort(balancer.order_E)
        ids = [places_E[routing(self.kind, self.tokens, step, rank)] for rank in range(self.ranks)]
        return np.stack([np.bincount(of.ravel(), minlength=EXPERTS) for of in ids])

    def _predict(self, step: int) -> float:
        """The cost model's seconds for this very routing."""
        import numpy as np

        from moeflow.plan.cost import ExpertShape
        from moeflow.plan.layer_cost import layer_time, work_of
        from moeflow.plan.overlap import pipelined_s

        counts = self._counts(step)
        exchanger = self.layer.dispatcher.exchanger
        choice = exchanger.choice if exchanger is not None else None
        balancer = self.layer.dispatcher.balancer
        shadows = balancer.done.shadows if balancer is not None else ()
        self.shadows.append(len(shadows))
        work = work_of(counts, np.repeat(np.arange(self.ranks), EXPERTS // self.ranks), shadows)
        shape = ExpertShape(D_MODEL, self.hidden)
        time_of = layer_time(
            self.profile,
            shape,
            self.grouping,
            work,
            len(shadows),
            hierarchical=choice is not None and choice.hierarchical,
        )
        if choice is None or choice.chunks == 1:
            return time_of.total_s
        once = time_of.exchange_s / 4
        passes = (time_of.compute_s / 3, time_of.compute_s * 2 / 3)
        extra = self.profile.chunk_s
        return sum(pipelined_s(once, of, choice.chunks, extra, self.profile.overlap) for of in passes)

    def told(self) -> dict[str, Any]:
        """The prediction, and what was chosen."""
        exchanger = self.layer.dispatcher.exchanger
        choice = exchanger.choice if exchanger is not None else None
        told = "" if choice is None else f"{choice.chunks} chunks" + (", two hops" if choice.hierarchical else "")
        balancer = self.layer.dispatcher.balancer
        if balancer is not None:
            shadowed = f"{statistics.mean(self.shadows[2:]):.1f} shadowed" if balancer.config.shadow else ""
            moved = f"{balancer.moved} moved, {1e3 * max(self.between):.0f} ms" if balancer.config.placement else ""
            told = ", ".join(filter(None, (shadowed, moved)))
        return {"predicted_s": statistics.median(self.predicted[2:]), "chosen": told}


# --- the table --------------------------------------------------------------------------------------------------------

NONE: dict[str, Any] = {}
OVERLAP = {
    "plain": NONE,
    **{f"{n} chunks": {"overlap": {"chunks": str(n)}} for n in (2, 4)},
    "auto": {"overlap": {"chunks": "auto"}},
}
SHADOW = {"none": NONE, "shadows": {"balance": {"shadow": True}}}
MOVES = {"placement": True, "interval": MOVE_EVERY, "decay": 0.5}
PLACEMENT = {
    "none": NONE,
    "placement": {"balance": MOVES},
    "shadows": {"balance": {"shadow": True}},
    "full": {"balance": MOVES | {"shadow": True}},
}
HOPS = {
    "flat": NONE,
    "two hops": {"overlap": {"exchange": "hierarchical"}},
    "auto": {"overlap": {"exchange": "auto"}},
}


def cases(parts: list[str], rates: list[float]) -> Iterator[tuple[str, str, float, int, int, dict[str, Any]]]:
    """(part, routing, Mbit/s, hosts, ranks of each, settings)."""
    for part in parts:
        for mbits in rates:
            if part == "overlap":
                yield part, "even", mbits, 4, 1, OVERLAP
            elif part == "shadow":
                for kind in ("zipf", "even"):
                    yield part, kind, mbits, 4, 1, SHADOW
            elif part == "placement":
                yield part, "drift", mbits, 4, 1, PLACEMENT
            elif part == "hierarchical":
                yield part, "even", mbits, 2, 2, HOPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--mbits", nargs="+", type=float, default=[200.0, 400.0, 1600.0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(json.loads(options.child))
    if os.geteuid() != 0:
        raise SystemExit("network namespaces need root: sudo python benchmarks/adaptive.py")
    # So that namespaces and interfaces go when this is told to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    print(f"{date.today()}, {os.cpu_count()} cores of {platform.machine()} for all ranks\n")
    print("| part | routing | Mbit/s | setting | measured ms | predicted ms | off by | against the first | predicted |")
    print("|---|---|---:|---|---:|---:|---:|---:|---:|")
    kept = []
    for part, kind, mbits, count, per_host, settings in cases(options.parts, options.mbits):
        with hosts(count, mbits) as names:
            tokens, hidden = SIZES[part]
            job = {"settings": settings, "routing": kind, "steps": options.steps, "tokens": tokens, "hidden": hidden}
            found = on_hosts(names, per_host, job)
        base = next(iter(found["settings"].values()))
        for name, of in found["settings"].items():
            label = f"{name} ({of['chosen']})" if of["chosen"] and name[0] not in "24" else name
            ratio = statistics.median(a / b for a, b in zip(base["times"], of["times"], strict=True))
            measured, predicted = of["measured_s"], of["predicted_s"]
            print(
                f"| {part} | {kind} | {mbits:.0f} | {label} | {1e3 * measured:.0f} | {1e3 * predicted:.0f} "
                f"| {100 * (predicted / measured - 1):+.0f} % | {ratio:.2f} "
                f"| {base['predicted_s'] / predicted:.2f} |",
                flush=True,
            )
        kept.append({"part": part, "routing": kind, "mbits": mbits, **found})
    if options.json:
        options.json.write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
