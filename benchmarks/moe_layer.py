"""Speed and memory of one MoE layer on CPU beside a dense MLP of equal active FLOPs, and beside other libraries.

    python benchmarks/moe_layer.py                          8, 32 and 64 experts, two kinds of expert
    python benchmarks/moe_layer.py --ep 2 --experts 8 32    two processes of one thread
    python benchmarks/moe_layer.py --layers moeflow --json layer.json

Forward and backward of 4,096 tokens, 512 wide, 2,048 hidden, top-2, fp32, gradients made anew in each step.  Each layer
runs in a process of its own, in turn with the dense MLP; a pair counts only when strangers used less than 8 % of the
machine during it; the figure is the median of the pairs.  Memory is the highest resident size of another process that
runs the layer alone, less what it had before the layer was built.  Libraries that are not installed are named and
left out; `pip install --no-deps megatron-core` is enough for that one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import layer_peers as peers

STRANGERS = 0.08  # share of the machine's time that others may use while a pair runs
TRIES = 8  # times the wanted number of pairs, before the rest is taken as it is


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 32, 64])
    parser.add_argument("--kinds", nargs="+", choices=("relu", "swiglu"), default=["relu", "swiglu"])
    parser.add_argument("--layers", nargs="+", choices=peers.LAYERS, default=list(peers.LAYERS))
    parser.add_argument("--ep", type=int, default=1, help="processes that share the experts, of one thread each")
    parser.add_argument(
        "--exchange", choices=("shared", "gloo"), default="shared", help="way of moeflow's rows with --ep"
    )
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2, help="with --ep 1")
    parser.add_argument("--seq", type=int, default=512, help="tokens of one of the 8 sequences")
    parser.add_argument("--only", choices=("time", "memory"), help="of the two measurements")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options)
    results = []
    print(f"{datetime.date.today()}, {os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}")
    print("\n| layer | kind | experts | tokens/s | to dense | pairs, of them disturbed | peak MB | drops |")
    print("|---|---|---|---|---|---|---|---|")
    for kind in options.kinds:
        for num_experts in options.experts:
            for name in options.layers:
                result = {
                    "layer": name,
                    "kind": kind,
                    "experts": num_experts,
                    **measure(options, name, kind, num_experts),
                }
                results.append(result)
                print(row(result), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


def row(result: dict) -> str:
    start = f"| {result['layer']} | {result['kind']} | {result['experts']} |"
    if "absent" in result:
        return f"{start} {result['absent']} | | | | |"
    drops = "yes" if result["layer"] in peers.DROPS else "no"
    speed, memory = " | | ", ""
    if "ratio" in result:
        speed = f"{result['tokens_per_s']:.0f} | {result['ratio']:.2f} | {result['pairs']}, {result['disturbed']}"
    if "peak_mb" in result:
        memory = f"{result['peak_mb']:.0f}"
    return f"{start} {speed} | {memory} | {drops} |"


def measure(options: argparse.Namespace, name: str, kind: str, num_experts: int) -> dict:
    """Run the processes of one case; returns what they measured."""
    found: dict = {}
    for what in (options.only,) if options.only else ("time", "memory"):
        port = _free_port()
        children = [
            subprocess.Popen(
                [
                    *(sys.executable, __file__, "--child", what, "--layers", name, "--kinds", kind),
                    *("--experts", str(num_experts), "--ep", str(options.ep), "--pairs", str(options.pairs)),
                    *("--seq", str(options.seq), "--exchange", options.exchange),
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ
                | {
                    "OMP_NUM_THREADS": str(options.threads if options.ep == 1 else 1),
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(options.ep),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                },
            )
            for rank in range(options.ep)
        ]
        outs = [process.communicate() for process in children]
        if any(process.returncode for process in children):
            raise SystemExit(f"{name}, {kind}, {num_experts} experts failed:\n{outs[0][1]}")
        answers = [json.loads(out.splitlines()[-1]) for out, _ in outs]
        if "absent" in answers[0]:
            return answers[0]
        found |= answers[0]
        if what == "memory":
            found["peak_mb"] = max(answer["peak_mb"] for answer in answers)
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def child(options: argparse.Namespace) -> None:
    """One process of a case: prints its figures as JSON."""
    torch.manual_seed(int(os.environ["RANK"]))
    if options.ep > 1:
        torch.distributed.init_process_group("gloo")
    sizes = peers.Sizes(options.experts[0], options.kinds[0], options.ep, batch=8 // options.ep, seq=options.seq)
    sizes.shared_memory = options.exchange == "shared"
    try:
        if options.child == "memory":
            peers.LAYERS[options.layers[0]](
                peers.Sizes(2 * options.ep, sizes.kind, sizes.ep)
            )  # imports are not the layer's
        before = _resident("VmRSS")
        layer = peers.LAYERS[options.layers[0]](sizes)
    except (ImportError, peers.NotApplicable) as reason:
        print(json.dumps({"absent": f"not installed ({reason})" if isinstance(reason, ImportError) else str(reason)}))
        return
    if options.child == "memory":
        for _ in range(3):
            step(layer, sizes)
        print(json.dumps({"peak_mb": _resident("VmHWM") - before}))
        return
    dense_sizes = peers.Sizes(0, sizes.kind, 1, batch=sizes.batch, seq=sizes.seq)
    dense = peers.dense(dense_sizes)
    for _ in range(2):
        step(dense, dense_sizes), step(layer, sizes)
    clean, disturbed = [], []
    while len(clean) < options.pairs and len(clean) + len(disturbed) < TRIES * options.pairs:
        busy, own = _busy(), _own(options.ep)
        pair = step(dense, dense_sizes), step(layer, sizes)
        busy, own = _busy() - busy, _own(options.ep) - own
        strangers = (busy - own) / (sum(pair) * (os.cpu_count() or 1))
        # One rank decides for all which pairs count.
        pair, strangers = _agreed([*pair, strangers], options.ep)
        (clean if strangers < STRANGERS else disturbed).append(pair)
    pairs = clean if len(clean) >= options.pairs else clean + disturbed
    print(
        json.dumps(
            {
                "tokens_per_s": options.ep * sizes.batch * sizes.seq / statistics.median(moe for _, moe in pairs),
                "ratio": statistics.median(dense / moe for dense, moe in pairs),
                "dense_s": statistics.median(dense for dense, _ in pairs),
                "pairs": len(pairs),
                "disturbed": 0 if pairs is clean else len(disturbed),
            }
        )
    )


def step(layer: peers.Layer, sizes: peers.Sizes) -> float:
    """Seconds of a forward and a backward pass."""
    x = torch.randn(sizes.batch, sizes.seq, sizes.d_model, requires_grad=True)
    upstream = torch.randn(x.shape)
    for parameter in sizes.parameters:
        parameter.grad = None
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        torch.distributed.barrier()
    start = time.perf_counter()
    layer(x).backward(upstream)
    return time.perf_counter() - start


def _agreed(values: list[float], ep: int) -> tuple[tuple[float, float], float]:
    """The slowest rank's times, and rank 0's view of the strangers."""
    if ep > 1:
        slowest = torch.tensor(values, dtype=torch.float64)
        torch.distributed.all_reduce(slowest, torch.distributed.ReduceOp.MAX)
        values = slowest.tolist()
    return (values[0], values[1]), values[2]


def _busy() -> float:
    """Seconds that all cores of the machine have worked."""
    user, nice, system, _, _, irq, softirq, steal, *_ = map(
        int, Path("/proc/stat").read_text().split("\n")[0].split()[1:]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own(ep: int) -> float:
    """Seconds that the processes of this case have worked."""
    own = time.process_time()
    if ep == 1:
        return own
    total = torch.tensor(own, dtype=torch.float64)
    torch.distributed.all_reduce(total)
    return total.item()


def _resident(name: str) -> float:
    """VmRSS or VmHWM of this process, in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) / 1024
    raise KeyError(name)


if __name__ == "__main__":
    main()
