"""The block quantiser against a float64 reference made from the format's definition, and against torch's conversion."""

import time

import numpy as np
import pytest
import torch

from megatron_rlvr.hf.fp8 import dequantise_block, quantise_block, scale_shape

# e4m3fn by its definition: exponent bias 7, subnormals below 2^-6, no infinities, code 127 is NaN.
CODES = np.arange(127)
VALUES = np.where(CODES < 8, CODES / 512, (1 + CODES % 8 / 8) * 2.0 ** (CODES // 8 - 7))
BF16_AND_32 = [torch.bfloat16, torch.float32]


def random_weight(shape, dtype, seed=0, spread=4.0):
    """Magnitudes over many binades, so that every exponent and the subnormals of e4m3 occur."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).mul(spread).exp2()).to(
        dtype
    )


def per_element(scales, shape):
    return np.repeat(np.repeat(scales.double().numpy(), 128, 0), 128, 1)[: shape[0], : shape[1]]


def nearest_even_codes(quotients):
    """Codes of the nearest e4m3 values to non-negative float64 numbers, ties to the even code, 448 at most."""
    upper = np.clip(np.searchsorted(VALUES, quotients), 1, 126)
    below, above = quotients - VALUES[upper - 1], VALUES[upper] - quotients
    return np.where((below < above) | ((below == above) & (upper % 2 == 1)), upper - 1, upper)


@pytest.mark.parametrize("dtype", BF16_AND_32)
@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("shape", [(256, 384), (130, 257), (1, 5)])
def test_scales_and_codes_against_float64(shape, pow2, dtype):
    weight = random_weight(shape, dtype)
    quantised, scales = quantise_block(weight, pow2)
    assert quantised.dtype == torch.float8_e4m3fn and quantised.shape == weight.shape
    assert scales.dtype == torch.float32 and tuple(scales.shape) == scale_shape(weight.shape)
    exact, codes = weight.double().numpy(), quantised.view(torch.uint8).numpy()
    for i, j in np.ndindex(*scales.shape):
        ideal = np.abs(exact[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]).max() / 448
        ideal = 2 ** np.ceil(np.log2(ideal)) if pow2 else ideal
        assert scales[i, j].item() == np.float32(ideal)
    quotients = exact / per_element(scales, shape)
    assert np.array_equal(np.signbit(exact), codes >= 128)
    # The kernel divides in float32, where a quotient may fall onto the middle between two values.
    in_float32 = (exact.astype(np.float32) / per_element(scales, shape).astype(np.float32)).astype(np.float64)
    assert np.array_equal(codes & 127, nearest_even_codes(np.abs(in_float32)))
    found = VALUES[codes & 127]
    half_ulp = np.maximum(2.0 ** np.floor(np.log2(np.maximum(np.abs(quotients), 2.0**-6))), 2.0**-6) / 16
    assert (np.abs(found - np.abs(quotients)) <= half_ulp * (1 + 1e-5)).all()


@pytest.mark.parametrize("dtype", BF16_AND_32)
def test_all_65536_halves_of_float32_round_as_torch_rounds(dtype):
    """Every bfloat16 value up to 448 beside a 448, so that the scale is 1 and nothing but the conversion happens."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.bfloat16).float()
    values = torch.where(values.abs() <= 448, values, 0.0).to(dtype).view(512, 128)
    values[::128, 0] = 448
    quantised, scales = quantise_block(values)
    assert (scales == 1).all()
    expected = values.to(torch.float8_e4m3fn)
    assert torch.equal(quantised.view(torch.uint8), expected.view(torch.uint8))


def test_blocks_of_zeros_and_of_one_outlier_are_exact():
    weight = torch.zeros(256, 300, dtype=torch.bfloat16)
    weight[7, 130] = -3.3e4
    weight[200, 299] = 1e-30
    for pow2 in (False, True):
        quantised, scales = quantise_block(weight, pow2)
        zero = (weight == 0).float().view(2, 128, 300).amin(1)
        assert scales[0, 0] == scales[1, 0] == 1 and zero.shape == (2, 300)
        back = dequantise_block(quantised, scales)
        assert torch.equal(back == 0, weight == 0)
        assert torch.isfinite(scales).all() and (scales > 0).all()
        assert pow2 or torch.equal(back, weight)


def test_a_block_beyond_float32_s_normal_numbers_has_a_normal_scale():
    weight = torch.full((3, 3), 1e-39)
    quantised, scales = quantise_block(weight)
    assert scales.item() == 2.0**-126
    assert (dequantise_block(quantised, scales, torch.float32) - weight).abs().max() <= 2.0**-126 / 1024


@pytest.mark.parametrize("dtype", BF16_AND_32)
def test_nothing_becomes_nan_at_the_largest_magnitudes(dtype):
    weight = torch.finfo(dtype).max * torch.linspace(-1, 1, 128 * 128).view(128, 128)
    for pow2 in (False, True):
        quantised, scales = quantise_block(weight.to(dtype), pow2)
        assert torch.isfinite(quantised.float()).all() and torch.isfinite(scales).all()
    assert quantise_block(weight.to(dtype))[0].float().abs().max() == 448


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [*BF16_AND_32, torch.float64])
def test_non_finite_weights_are_refused(bad, dtype):
    weight = torch.ones(130, 130, dtype=dtype)
    weight[129, 129] = bad
    with pytest.raises(ValueError, match="NaN or infinite"):
        quantise_block(weight)


@pytest.mark.parametrize("pow2", [False, True])
def test_kernel_and_torch_operations_give_the_same_bits(pow2):
    """Accelerators take the torch operations, and so do other dtypes on a CPU: float64 holds the same numbers."""
    weight = random_weight((257, 130), torch.float32)
    for kernel, plain in zip(quantise_block(weight, pow2), quantise_block(weight.double(), pow2), strict=True):
        assert torch.equal(kernel.view(torch.uint8), plain.view(torch.uint8))


def test_dequantised_weights_quantise_to_themselves():
    weight = random_weight((200, 260), torch.bfloat16, spread=1.0)
    quantised, scales = quantise_block(weight)
    back = dequantise_block(quantised, scales, torch.float32)
    expected = quantised.double().numpy() * per_element(scales, weight.shape)
    assert np.array_equal(back.numpy(), expected.astype(np.float32))
    assert (back - weight.float()).abs().max() <= weight.float().abs().max() / 28
    again, same = quantise_block(back)
    assert torch.equal(dequantise_block(again, same, torch.float32), back)
    with pytest.raises(ValueError, match=r"scale_inv has shape \[1, 1\]"):
        dequantise_block(quantised, scales[:1, :1])


def test_views_and_given_outputs():
    weight = random_weight((260, 140), torch.bfloat16)
    expected = quantise_block(weight)
    out = tuple(torch.empty_like(t) for t in expected)
    found = quantise_block(weight.t().contiguous().t(), out=out)
    assert found[0] is out[0] and torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(found[1], expected[1])
    with pytest.raises(ValueError, match=r"not \[2, 3, 4\]"):
        quantise_block(torch.zeros(2, 3, 4))


def test_speed_beside_a_copy():
    """At least 0.12 of a copy's bytes per second of processor time, best of several: other load must not decide."""
    weight = random_weight((2048, 4096), torch.bfloat16)
    out, copy = quantise_block(weight), torch.empty_like(weight)

    def seconds(action):
        start = time.thread_time()
        action()
        return time.thread_time() - start

    copying, quantising = [], []
    for _ in range(7):
        copying.append(seconds(lambda: copy.copy_(weight)))
        quantising.append(seconds(lambda: quantise_block(weight, out=out)))
    assert min(copying) / min(quantising) > 0.12
