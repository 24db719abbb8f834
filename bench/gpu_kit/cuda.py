"""Computes known answers on CUDA without ONNX Runtime: `python -m bench.gpu_kit.cuda`.

They are a kernel compiled by NVRTC and run by the driver, and a matrix product in PyTorch. The figures name packages
that cannot be imported.
"""

import importlib
import sys
from typing import Any

import numpy as np

from bench.gpu_kit.parts import NOT_HERE, tell

_SOURCE = b"""
extern "C" __global__ void scale_add(const float *x, float *y, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = 3.0f * x[i] + y[i];
}
"""
#: Elements of the kernel's vectors, and threads of a block; the one is no multiple of the other.
_COUNT, _THREADS = 10_000, 256
#: The largest relative error of a row of a float16 matrix product.
_HALF = 2e-3


def compiled(nvrtc: Any) -> bytes:
    """Returns the PTX of the kernel. Raises RuntimeError with NVRTC's status."""
    program = _done(nvrtc.nvrtcCreateProgram(_SOURCE, b"scale_add.cu", 0, [], []))
    _done(nvrtc.nvrtcCompileProgram(program, 0, []))
    text = b" " * int(_done(nvrtc.nvrtcGetPTXSize(program)))
    _done(nvrtc.nvrtcGetPTX(program, text))
    return text


def kernel_is_right(driver: Any, text: bytes) -> bool:
    """Returns whether the device computes the kernel's right numbers. Raises RuntimeError with the driver's status."""
    _done(driver.cuInit(0))
    context = _done(driver.cuDevicePrimaryCtxRetain(_done(driver.cuDeviceGet(0))))
    _done(driver.cuCtxSetCurrent(context))
    code = np.frombuffer(text, np.uint8)
    module = _done(driver.cuModuleLoadData(code.ctypes.data))
    kernel = _done(driver.cuModuleGetFunction(module, b"scale_add"))
    x, y = np.arange(_COUNT, dtype=np.float32), np.full(_COUNT, 7, np.float32)
    buffers = [_done(driver.cuMemAlloc(array.nbytes)) for array in (x, y)]
    for pointer, array in zip(buffers, (x, y), strict=True):
        _done(driver.cuMemcpyHtoD(pointer, array.ctypes.data, array.nbytes))
    arguments = [*(np.array([int(pointer)], np.uint64) for pointer in buffers), np.array([_COUNT], np.uint32)]
    addresses = np.array([one.ctypes.data for one in arguments], np.uint64)
    blocks = -(-_COUNT // _THREADS)
    _done(driver.cuLaunchKernel(kernel, blocks, 1, 1, _THREADS, 1, 1, 0, 0, addresses.ctypes.data, 0))
    _done(driver.cuCtxSynchronize())
    result = np.zeros_like(y)
    _done(driver.cuMemcpyDtoH(result.ctypes.data, buffers[1], result.nbytes))
    return bool((result == 3 * x + y).all())


def _done(answer: tuple[Any, ...]) -> Any:
    """Returns the first value of a call of cuda-bindings after its status. Raises RuntimeError for another status than
    0."""
    status, *rest = answer
    if int(status):
        raise RuntimeError(str(status))
    return rest[0] if rest else None


def product_error(torch: Any) -> float:
    """Returns the relative error of the worst row of a float16 matrix product in PyTorch."""
    random = np.random.default_rng(1)
    a, b = (random.standard_normal((512, 512)).astype(np.float16) for _ in range(2))
    result = (torch.from_numpy(a).cuda() @ torch.from_numpy(b).cuda()).cpu().numpy().astype(np.float64)
    right = a.astype(np.float64) @ b.astype(np.float64)
    return float((np.linalg.norm(result - right, axis=1) / np.linalg.norm(right, axis=1)).max())


def main() -> int:
    """Computes the answers, reports the figures, and returns the exit code: 1 for a wrong answer."""
    figures: dict[str, Any] = {}
    wrong: list[str] = []
    try:
        nvrtc, driver = (importlib.import_module(f"cuda.bindings.{name}") for name in ("nvrtc", "driver"))
        figures["nvrtc"] = ".".join(map(str, nvrtc.nvrtcVersion()[1:]))
        text = compiled(nvrtc)
        figures["compiled"] = len(text)
        figures["kernel"] = kernel_is_right(driver, text)
        wrong += [] if figures["kernel"] else ["the kernel's numbers are wrong"]
    except ImportError as error:
        figures["missing"] = str(error)
    except RuntimeError as error:
        wrong.append(str(error))
    tell(figures)
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError as error:
        figures["no_torch"] = str(error)
    else:
        figures["torch"] = str(torch.__version__)
        if torch.cuda.is_available():
            properties = torch.cuda.get_device_properties(0)
            figures["name"], figures["processors"] = properties.name, properties.multi_processor_count
            figures["product_within"] = product_error(torch)
            wrong += [] if figures["product_within"] < _HALF else ["PyTorch's product in float16 is off"]
        else:
            figures["no_torch"] = "it sees no GPU"
    tell(figures)
    if "kernel" not in figures and "product_within" not in figures and not wrong:
        print("neither cuda-bindings nor a PyTorch that sees the GPU")
        return NOT_HERE
    for problem in wrong:
        print(problem)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
