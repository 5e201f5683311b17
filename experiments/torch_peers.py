"""The public KDA of PyTorch, on the same arrays: they cross by DLPack, without a copy."""

import dataclasses
import functools
import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import torch
from jax import Array

from experiments import clock
from experiments.decoding import Step
from experiments.versions import ACTIVATED, BOUNDED, LOWEST, UNBOUNDED, Version

Run = Callable[..., tuple[torch.Tensor, ...]]


class Program(clock.Program):
    """A function of tensors."""

    def prepare(self, arguments: Sequence[Array]) -> list[torch.Tensor]:
        return [torch.from_dlpack(x) for x in jax.block_until_ready(arguments)]

    def wait(self, results: Any) -> None:
        torch.cuda.synchronize()

    def fetch(self, results: Sequence[torch.Tensor]) -> list[Array]:
        self.wait(results)
        return [jax.dlpack.from_dlpack(x.detach().contiguous()) for x in results]


def _gradients(run: Run) -> Run:
    """(q, k, v, gate, beta, do) -> (o, final_state, dq, dk, dv, dgate, dbeta) by autograd."""

    def both(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs, do = [x.detach().requires_grad_() for x in tensors[:-1]], tensors[-1]
        o, final_state = run(*inputs)
        return o, final_state, *torch.autograd.grad(o, inputs, do)

    return both


def _build(functions: Mapping[str, Run], name: str, *arguments: Array) -> Program:
    """The program of a pass; its first call, which compiles and tunes, and the memory of the second are measured."""
    program = Program(functions[name], 0.0, 0)
    tensors = program.prepare(arguments)
    start = time.perf_counter()
    program.wait(program.run(*tensors))
    compile_s = time.perf_counter() - start
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = program.run(*tensors)
    program.wait(results)
    own = sum(x.nbytes for x in results)
    temporary = max(torch.cuda.max_memory_allocated() - before - own, 0)
    del results
    torch.cuda.empty_cache()  # for JAX, and for runs beside this one
    return dataclasses.replace(program, compile_s=compile_s, temporary_bytes=temporary)


def version(name: str, run: Run, inputs: tuple[str, ...], both: Run | None = None) -> Version:
    """A peer: `run` is its forward pass, `both` that and the gradients, by autograd where there is none of its own."""

    def forward(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return run(*tensors[:-1])

    functions = {"forward": forward, "forward+backward": both or _gradients(run)}
    return Version(name, run, inputs, peer=True, build=functools.partial(_build, functions))


@functools.cache
def _zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, device="cuda")


def flash_linear_attention_steps() -> list[Step]:
    """Its recurrent kernel, a call a token, with the state in float32."""
    from fla.ops.kda import fused_recurrent_kda

    def run(state: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        heads, channels = state.shape[1:3]
        with torch.no_grad():
            o, new_state = fused_recurrent_kda(
                *(x[:, None] for x in inputs),
                A_log=_zeros(heads),
                dt_bias=_zeros(heads * channels),
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
            A_log=_zeros(heads),
            dt_bias=_zeros(heads * channels),
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            safe_gate=lower_bound is not None,
            lower_bound=lower_bound,
            output_final_state=True,
        )

    kinds = ((LOWEST, BOUNDED), (None, UNBOUNDED))
    return [version("flash-linear-attention", functools.partial(run, bound), inputs) for bound, inputs in kinds]


@functools.cache
def _starts(B: int, T: int) -> torch.Tensor:
    return torch.arange(0, B * T + 1, T, dtype=torch.int32, device="cuda")


def cudnn_frontend() -> list[Version]:
    """Its kernels for Hopper: a forward in CUDA (from raw inputs too) and one in CuTe, if installed; a backward."""
    from cudnn.linear_attention.ops import kimi_delta_attention

    def run(plan: str, *inputs: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
        B, T = inputs[0].shape[:2]
        packed = (x.flatten(0, 1) for x in inputs)
        o, final_state = kimi_delta_attention(
            *packed, _starts(B, T), output_final_state=True, plan_name=plan, **options
        )
        return o.unflatten(0, (B, T)), final_state.mT  # its state is [N, H, V, K]

    def both(plan: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        *inputs, do = tensors
        B, T, _, K = inputs[0].shape
        packed = (x.flatten(0, 1) for x in (do, *inputs))
        results = run(plan, *inputs)
        gradients = torch.ops.cudnn.kimi_delta_attention_bwd(*packed, _starts(B, T), K**-0.5, plan_name=cuda)
        return *results, *(x.unflatten(0, (B, T)) for x in gradients[: len(inputs)])

    def raw(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        options = {
            "use_qk_l2norm_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "safe_gate": True,
            "gate_lower_bound": LOWEST,
            "a_log": _zeros(inputs[1].shape[2]),
            "dt_bias": _zeros(*inputs[1].shape[2:]),
        }
        return run(cuda, *inputs, **options)

    cuda = "kda_hopper_cuda"
    plans = [
        version(f"cuDNN {plan}", functools.partial(run, plan), ACTIVATED, functools.partial(both, plan))
        for plan in ((cuda, "kda_hopper") if importlib.util.find_spec("cutlass") else (cuda,))
    ]
    return [*plans, dataclasses.replace(version(f"cuDNN {cuda}", raw, BOUNDED), passes=("forward",))]
