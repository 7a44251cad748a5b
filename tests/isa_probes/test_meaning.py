# SPDX-License-Identifier: Apache-2.0
"""The meaning of Blackwell's instructions, against plain matrix products and plain copies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cute_kernels.dsl import umma
from cute_kernels.isa_probes import conversions, copies, meaning, products
from cute_kernels.isa_probes.meaning import Block, TensorMap

SEED = np.random.default_rng(0)


def block(seed: int) -> Block:
    """Everything is NaN or noise."""
    noise = np.random.default_rng(seed)
    return Block(noise.integers(0, 256, 1 << 17, dtype=np.uint8), np.full((128, 512), 0x7FC00000, np.uint32))


def codes(rows: int, columns: int, name: str) -> np.ndarray:
    """Codes of small numbers, whose products and sums are exact."""
    if name == "bf16":
        return (SEED.integers(-8, 9, (rows, columns)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if name == "e4m3":
        return (
            torch.from_numpy(SEED.integers(-8, 9, (rows, columns)).astype(np.float32))
            .to(torch.float8_e4m3fn)
            .view(torch.uint8)
            .numpy()
        )
    return SEED.integers(0, 16, (rows, columns)).astype(np.uint8)


def put(shared: np.ndarray, operand: umma.Operand, start: int, numbers: np.ndarray) -> None:
    """Write an operand element by element, where Operand.offset says."""
    for (row, k), number in np.ndenumerate(numbers):
        at = start + operand.offset(row, k)
        if operand.bits == 16:
            shared[at : at + 2] = np.array([number], np.uint16).view(np.uint8)
        elif operand.bits == 8:
            shared[at] = number
        else:
            shift = k % 2 * 4
            shared[at] = (int(shared[at]) & (0xF0 >> shift)) | int(number) << shift


def result(blocks: list[Block], form: str, m: int, n: int, d: int) -> np.ndarray:
    """[m, n] fp32, taken element by element from where umma.result_place says."""
    found = np.empty((m, n), np.float32)
    for row in range(m):
        for column in range(n):
            rank, lane, place = umma.result_place(form, n, row, column)
            found[row, column] = blocks[rank].tensor[lane, d + place : d + place + 1].view(np.float32)[0]
    return found


CASES = [
    ("m128", "f16", "bf16", 128, 48, False, False, 128),
    ("m128", "f16", "bf16", 128, 64, True, True, 128),
    ("m128", "f8f6f4", "e4m3", 128, 64, False, False, 128),
    ("m128", "f8f6f4", "e4m3", 128, 128, False, True, 128),
    ("m64", "f16", "bf16", 64, 24, False, False, 64),
    ("ws64", "f16", "bf16", 64, 64, False, False, 32),
    ("ws64", "f16", "bf16", 64, 128, False, True, 128),
    ("ws32", "f16", "bf16", 32, 64, False, False, 0),
    ("pair128", "f16", "bf16", 128, 64, False, True, 64),
    ("pair256", "f16", "bf16", 256, 96, False, False, 128),
]


@pytest.mark.parametrize(("form", "kind", "name", "m", "n", "a_is_mn", "b_is_mn", "swizzle"), CASES)
def test_products(form: str, kind: str, name: str, m: int, n: int, a_is_mn: bool, b_is_mn: bool, swizzle: int) -> None:
    """Two steps of the summed dimension, the second added to the first."""
    bits, ranks = meaning.BITS[kind], 2 if form.startswith("pair") else 1
    step = umma.K_BYTES * 8 // bits

    def operand(is_mn: bool, rows: int) -> umma.Operand:
        width = swizzle or 16
        if is_mn:  # all of the summed dimension, then the next rows
            return umma.Operand(bits, swizzle, True, 2 * step * width, 8 * width)
        return umma.Operand(bits, swizzle, False, 16 if swizzle else rows * 16, 8 * width)

    a, b = codes(m, 2 * step, name), codes(n, 2 * step, name)
    blocks = [block(rank) for rank in range(ranks)]
    left, right = operand(a_is_mn, m // ranks), operand(b_is_mn, n // ranks)
    steps_apart = 4096  # of operands whose swizzled rows hold one step only
    for rank, x in enumerate(blocks):
        own_a, own_b = np.split(a, ranks)[rank], np.split(b, ranks)[rank]
        for one, start, numbers, is_mn in ((left, 1 << 14, own_a, a_is_mn), (right, 1 << 15, own_b, b_is_mn)):
            if swizzle == 32 and not is_mn:
                put(x.shared, one, start, numbers[:, :step])
                put(x.shared, one, start + steps_apart, numbers[:, step:])
            else:
                put(x.shared, one, start, numbers)
    instruction = umma.instruction(kind, name, name, m, n, a_is_mn_major=a_is_mn, b_is_mn_major=b_is_mn)
    for k in range(2):
        moved = [steps_apart * k if swizzle == 32 else one.step(k * step) for one in (left, right)]
        meaning.multiply(
            blocks, 32, left.at((1 << 14) + moved[0]), right.at((1 << 15) + moved[1]), instruction, k > 0, kind=kind,
            weight_stationary=form.startswith("ws"),
        )  # fmt: skip
    want = meaning.decode(a, name).astype(np.float64) @ meaning.decode(b, name).T
    assert np.array_equal(result(blocks, form, m, n, 32), want)
    for x in blocks:
        assert (x.tensor[:, :32] == 0x7FC00000).all()
        assert (x.tensor[:, 32 + umma.result_columns(form, n) :] == 0x7FC00000).all()


@pytest.mark.parametrize(
    ("form", "m", "n"), [("m128", 128, 64), ("ws64", 64, 64), ("ws32", 32, 64), ("pair128", 128, 64)]
)
def test_rows_in_tensor_memory(form: str, m: int, n: int) -> None:
    ranks = 2 if form.startswith("pair") else 1
    a, b = codes(m, 16, "bf16"), codes(n, 16, "bf16")
    blocks = [block(rank) for rank in range(ranks)]
    for rank, x in enumerate(blocks):
        own = np.split(a, ranks)[rank].astype(np.uint32)
        x.tensor[:, 256:264] = np.tile(own[:, 0::2] | own[:, 1::2] << 16, (128 // len(own), 1))
        put(x.shared, umma.k_major(16), 1024, np.split(b, ranks)[rank])
    meaning.multiply(
        blocks, 0, 256, umma.k_major(16).at(1024), umma.instruction("f16", "bf16", "bf16", m, n), False,
        a_in_tensor_memory=True, weight_stationary=form.startswith("ws"),
    )  # fmt: skip
    want = meaning.decode(a, "bf16").astype(np.float64) @ meaning.decode(b, "bf16").T
    assert np.array_equal(result(blocks, form, m, n, 0), want)


@pytest.mark.parametrize(("kind", "name", "part"), [("mxf4", "e2m1", 0), ("mxf4", "e2m1", 2), ("mxf8f6f4", "e4m3", 3)])
@pytest.mark.parametrize("n", [64, 256])
def test_scaled_products(kind: str, name: str, part: int, n: int) -> None:
    x, bits = block(0), meaning.BITS[kind]
    depth = 256 // bits
    a, b = codes(128, depth, name), codes(n, depth, name)
    operand = umma.k_major(bits, 32)
    put(x.shared, operand, 4096, a)
    put(x.shared, operand, 16384, b)
    factors = SEED.integers(125, 130, (128 + n, 4)).astype(np.uint8)
    for row, own in enumerate(factors):
        for number, byte in enumerate(own):
            where = row // 128 * 512 if row < 128 else 512 + (row - 128) // 128 * 512
            x.shared[32768 + where + umma.scale_offset((row if row < 128 else row - 128) % 128, number)] = byte
    for number in range(1 + -(-n // 128)):
        meaning.copy_to_tensor_memory(x, 300 + 4 * number, umma.SCALES.at(32768 + 512 * number), "32x128b.warpx4")
    meaning.multiply(
        [x], 0, operand.at(4096), operand.at(16384), umma.scaled_instruction(kind, name, name, 128, n, part, part),
        False, kind=kind, a_scales=300, b_scales=304,
    )  # fmt: skip
    power = np.repeat(2.0 ** (factors[:, part : part + depth // 32].astype(int) - 127), 32, axis=1)
    want = (meaning.decode(a, name) * power[:128]) @ (meaning.decode(b, name) * power[128:]).T
    assert np.array_equal(result([x], "m128", 128, n, 0), want)


@pytest.mark.parametrize(("shape", "rows"), [("128x256b", 128), ("64x128b.warpx2::02_13", 64), ("32x128b.warpx4", 32)])
def test_copies_to_tensor_memory(shape: str, rows: int) -> None:
    x, width = block(3), 32 if "256" in shape else 16
    data = SEED.integers(0, 256, (rows, width), dtype=np.uint8)
    operand = umma.Operand(8, 0, False, 8192, 128)
    put(x.shared, operand, 2048, data)
    meaning.copy_to_tensor_memory(x, 40, operand.at(2048), shape)
    want = np.tile(data.view(np.uint32), (128 // rows, 1))
    assert np.array_equal(x.tensor[:, 40 : 40 + width // 4], want)


def test_what_is_not_known_is_refused() -> None:
    x = block(0)
    one = umma.k_major(16).at(0)
    with pytest.raises(NotImplementedError):
        meaning.multiply([x], 500, one, one, umma.instruction("f16", "bf16", "bf16", 128, 64), False)
    with pytest.raises(ValueError, match="instruction"):
        meaning.multiply([x], 0, one, one, umma.instruction("f16", "bf16", "bf16", 128, 64) | 1 << 13, False)
    with pytest.raises(ValueError, match="base offset"):
        meaning.multiply([x], 0, one | 1 << 49, one, umma.instruction("f16", "bf16", "bf16", 128, 64), False)
    with pytest.raises(IndexError):
        meaning.lanes_of(1, 0, 32)
    assert meaning.lanes_of(5, 32 << 16 | 64, 32) == (slice(32, 64), slice(64, 96))


def test_gathered_rows() -> None:
    """A cache of 20 rows of 576 bytes: of each row bytes 448 ..., swizzled; rows outside are zeros."""
    memory = SEED.integers(0, 256, 20 * 576 + 7, dtype=np.uint8)
    map_ = TensorMap(7 + 448, (64, 20), (576,), (64, 1), 2, 128)
    shared = np.full(1 << 14, 0xEE, np.uint8)
    numbers = [3, -1, 19, 20, 7, 7, -(2**31), 2**31 - 1]
    for group in range(2):
        found = meaning.rows_of(map_, memory, 0, numbers[4 * group : 4 * group + 4])
        meaning.place_box(shared, 1024 + 512 * group, found, map_.swizzle)
    for at, row in enumerate(numbers):
        want = memory[7 + row * 576 + 448 :][:128] if 0 <= row < 20 else np.zeros(128, np.uint8)
        for byte in range(128):
            chunk = (byte // 16) ^ (at % 8)
            assert shared[1024 + at * 128 + chunk * 16 + byte % 16] == want[byte]
    assert (shared[:1024] == 0xEE).all()
    assert (shared[2048:] == 0xEE).all()


def test_boxes() -> None:
    memory = np.arange(3 * 5 * 8, dtype=np.uint8)
    map_ = TensorMap(0, (8, 5, 3), (8, 40), (4, 2, 2), 1)
    got = meaning.box_of(map_, memory, (6, 4, 2)).reshape(2, 2, 4)
    want = np.zeros((2, 2, 4), np.uint8)
    want[0, 0, :2] = memory.reshape(3, 5, 8)[2, 4, 6:]
    assert np.array_equal(got, want)


def test_every_code_of_the_narrow_formats() -> None:
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    for name, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2), ("ue8m0", torch.float8_e8m0fnu)):
        want = every.view(dtype).float().numpy()
        assert np.array_equal(meaning.values_of(name), want, equal_nan=True), name
        assert np.array_equal(np.signbit(meaning.values_of(name)[:255]), np.signbit(want[:255])), name
    assert meaning.values_of("e2m1").tolist() == [s * v for s in (1, -1) for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]


def test_conversions_are_of_every_code_with_every_scale() -> None:
    numbers = [code for code in range(256) if code % 128 != 127]
    given = conversions.source(conversions.NAMES["e4m3_times_scale"])
    assert (given.dtype, given.shape) == (np.uint32, (64 * len(conversions.SCALES), 2))
    seen: dict[int, list[int]] = {}
    for word, scale in given.tolist():
        seen.setdefault(scale >> 8 & 255, []).extend(word.to_bytes(4, "little"))
    assert sorted(seen) == list(conversions.SCALES)
    assert all(sorted(codes) == sorted([*numbers, *numbers[:2]]) for codes in seen.values())
    given = conversions.source(conversions.NAMES["ue8m0"])
    codes = [byte for word, other in given.tolist() for byte in word.to_bytes(4, "little") if other == 0]
    assert sorted(codes) == sorted(list(range(255)) * 8)


def test_conversions_are_expected_to_be_exact() -> None:
    """Codes and scales taken apart by hand."""
    for name in conversions.NAMES:
        conversion = conversions.NAMES[name]
        given, found = conversions.source(conversion), conversions.expect(conversion)
        assert found.shape == (len(given), conversion.words)
        for (word, scale), halves in zip(given[::97].tolist(), found[::97].view(np.uint16).tolist(), strict=True):
            for code, half in zip(word.to_bytes(4, "little"), halves, strict=True):
                if name == "ue8m0":
                    want = 2.0 ** (code - 127)
                else:
                    exponent, mantissa = code >> 3 & 15, code & 7
                    size = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
                    want = (-size if code & 128 else size) * 2.0 ** ((scale >> 8 & 255) - 127)
                assert np.array([half << 16], np.uint32).view(np.float32)[0] == want


@pytest.mark.parametrize("name", copies.NAMES)
def test_copies_are_of_a_matrix_of_bytes(name: str) -> None:
    memory, numbers = copies.source(copies.NAMES[name])
    assert (memory.dtype, memory.shape) == (np.uint8, (copies.ROWS, copies.ROW_BYTES))
    assert len(set(memory.reshape(-1).tolist())) == 256
    assert numbers.dtype == np.int32
    assert copies.expect(copies.NAMES[name]).any()


def test_rounds_of_a_handoff_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = products.NAMES["handoff_cta"]
    before = np.stack([b.tensor for b in products.memories(experiment)]).view(np.float32).astype(np.float64)
    gains = []
    for rounds in (products.IMAGES, 3 * products.IMAGES):
        monkeypatch.setattr(products, "ROUNDS", rounds)
        gains.append(np.stack(products.expect(experiment)).view(np.float32) - before)
    assert (gains[0] != 0).any()
    np.testing.assert_allclose(gains[1], 3 * gains[0], rtol=1e-5, atol=1e-3)
