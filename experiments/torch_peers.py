"""The public KDA of PyTorch, on the same arrays: they cross by DLPack, without a copy."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
from jax import Array

from experiments import clock
from experiments.decoding import Step
from experiments.versions import ACTIVATED, BOUNDED, LOWEST, UNBOUNDED, Version

Run = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class Program(clock.Program):
    """A function of tensors."""

    def prepare(self, arguments: Sequence[Array]) -> list[torch.Tensor]:
        return [torch.from_dlpack(x) for x in jax.block_until_ready(arguments)]

    def wait(self, results: Any) -> None:
        torch.cuda.synchronize()

    def fetch(self, results: Sequence[torch.Tensor]) -> list[Array]:
        self.wait(results)
        return [jax.dlpack.from_dlpack(x.detach().contiguous()) for x in results]


def _forward(run: Run, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        return run(*tensors[:-1])


def _forward_backward(run: Run, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    inputs, do = [x.detach().requires_grad_() for x in tensors[:-1]], tensors[-1]
    o, final_state = run(*inputs)
    return o, final_state, *torch.autograd.grad(o, inputs, do)


def build(run: Run, name: str, *arguments: Array) -> Program:
    """The program of a pass; its first call, which compiles and tunes, and the memory of the second are measured."""
    function = {"forward": _forward, "forward+backward": _forward_backward}[name]
    program = Program(functools.partial(function, run), 0.0, 0)
    tensors = program.prepare(arguments)
    start = time.perf_counter()
    program.wait(program.run(*tensors))
    compile_s = time.perf_counter() - start
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = program.run(*tensors)
    program.wait(results)
    own = sum(x.nbytes for x in results)
    return dataclasses.replace(
        program, compile_s=compile_s, temporary_bytes=max(torch.cuda.max_memory_allocated() - before - own, 0)
    )


def version(name: str, run: Run, inputs: tuple[str, ...]) -> Version:
    """A peer."""
    return Version(name, run, inputs, peer=True, build=functools.partial(build, run))


def flash_linear_attention_steps() -> list[Step]:
    """Its recurrent kernel, a call a token, with the state in float32."""
    from fla.ops.kda import fused_recurrent_kda

    def run(state: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        heads, channels = state.shape[1:3]
        with torch.no_grad():
            o, new_state = fused_recurrent_kda(
                *(x[:, None] for x in inputs),
                A_log=torch.zeros(heads, device="cuda"),
                dt_bias=torch.zeros(heads * channels, device="cuda"),
                initial_state=state,
                use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True,
                use_beta_sigmoid_in_kernel=True,
                output_final_state=True,
            )
        return new_state, o[:, 0]

    return [Step("flash-linear-attention", "float32", run, lambda *_: Program(run, 0.0, 0), peer=True)]


def flash_linear_attention() -> list[Version]:
    """Raw inputs, for which its Triton kernels are made; with A_log = dt_bias = 0."""
    from fla.ops.kda import chunk_kda

    def run(lower_bound: float | None, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        heads, channels = inputs[1].shape[2:]
        return chunk_kda(
            *inputs,
            A_log=torch.zeros(heads, device="cuda"),
            dt_bias=torch.zeros(heads * channels, device="cuda"),
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            safe_gate=lower_bound is not None,
            lower_bound=lower_bound,
            output_final_state=True,
        )

    kinds = ((LOWEST, BOUNDED), (None, UNBOUNDED))
    return [version("flash-linear-attention", functools.partial(run, bound), inputs) for bound, inputs in kinds]


def cudnn_frontend() -> list[Version]:
    """Each of its plans for Hopper; the CUDA one from raw inputs too."""
    from cudnn.linear_attention.ops import kimi_delta_attention

    def run(
        plan: str, options: dict[str, Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *gates: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        B, T = q.shape[:2]
        starts = torch.arange(0, B * T + 1, T, dtype=torch.int32, device="cuda")
        packed = (x.flatten(0, 1) for x in (q, k, v, *gates))
        o, final_state = kimi_delta_attention(*packed, starts, output_final_state=True, plan_name=plan, **options)
        return o.unflatten(0, (B, T)), final_state.mT  # its state is [N, H, V, K]

    raw = {
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "safe_gate": True,
        "gate_lower_bound": LOWEST,
    }
    cuda, cute = "kda_hopper_cuda", "kda_hopper"
    return [
        version(f"cuDNN {cuda}", functools.partial(run, cuda, {}), ACTIVATED),
        version(f"cuDNN {cuda}", functools.partial(run, cuda, raw), BOUNDED),
        dataclasses.replace(version(f"cuDNN {cute}", functools.partial(run, cute, {}), ACTIVATED), passes=("forward",)),
    ]
