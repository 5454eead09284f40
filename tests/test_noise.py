"""Streams: positions never repeat each other, and repeat themselves."""

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from dprc.noise import CHUNK, Position, RandomStreams, Stream, add_gaussian_noise_, box_muller

pytestmark = pytest.mark.filterwarnings("ignore:privacy_seed")
CPU = torch.device("cpu")
STREAM = Stream((11, 12))


def draw(position, shape=(1000,), stream=STREAM):
    return stream.normal(shape, position, device=CPU)


def test_a_position_gives_the_same_numbers_whatever_came_before():
    first = draw(Position(step=3))
    draw(Position(step=2), (77,))
    assert torch.equal(draw(Position(step=3)), first)


@pytest.mark.parametrize("field", Position._fields)
def test_every_field_of_a_position_matters(field):
    seen = [draw(Position()._replace(**{field: value})) for value in (0, 1, 2**32 - 1)]
    for one, other in itertools.combinations(seen, 2):
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / np.sqrt(1000)


def test_fields_do_not_run_into_each_other():
    positions = [
        Position(**dict(zip(Position._fields, values, strict=True)))
        for values in itertools.product((0, 1), repeat=len(Position._fields))
    ]
    assert len({tuple(draw(p, (2,)).tolist()) for p in positions}) == len(positions)


def test_every_bit_of_a_key_matters_however_large_its_words():
    """A list of a large and a small word is an array of floating numbers to numpy."""
    keys = [(2**63 + word, 2**62 + other) for word in (12345, 12346) for other in (7, 99)]
    assert len({tuple(draw(Position(), (4,), Stream(key)).tolist()) for key in keys}) == len(keys)


@pytest.mark.parametrize("value", [-1, 2**32])
def test_a_position_out_of_range_is_refused(value):
    with pytest.raises(ValueError, match="position"):
        draw(Position(step=value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_are_standard_normal(dtype):
    sample = STREAM.normal((50_000,), Position(), device=CPU, dtype=dtype)
    assert sample.dtype == dtype
    assert stats.kstest(sample.numpy(), "norm").pvalue > 1e-3
    assert stats.kstest(1.06 * sample.numpy(), "norm").pvalue < 1e-3


@pytest.mark.parametrize("order", [1, 2, 3])
def test_neighbouring_numbers_and_their_powers_are_uncorrelated(order):
    """The two numbers of a pair share a radius, the chunks a position."""
    count = 2 * CHUNK
    sample = draw(Position(), (count,)).double()
    half = CHUNK // 2
    for lag in (1, half, CHUNK):  # next pair, same pair, next chunk
        moved = sample.roll(lag)
        correlation = np.corrcoef(sample**order, moved**order)[0, 1]
        assert abs(correlation) < 5 / np.sqrt(count)


def test_the_ends_of_the_transform():
    """All bits zero, all bits one, and angles next to the axes."""
    radius = np.array([0, 0, 2**64 - 1, 2**63], np.uint64)
    angle = np.array([0, -(2**30), 0, 2**30], np.int32)
    numbers = np.empty(8, np.float32)
    box_muller(numbers, radius, angle)
    longest = np.sqrt(2 * 63 * np.log(2))
    middle = np.sqrt(2 * np.log(2))
    expected = [longest, 0, 0, 0, 0, -longest, 0, middle]
    np.testing.assert_allclose(numbers, expected, rtol=1e-6, atol=1e-6)
    assert (numbers[[0, 1, 4, 5]] != 0).all()  # no angle hides a sample behind no noise


def test_tails_are_those_of_a_gaussian():
    """Beyond 4 standard deviations, where a coarse uniform shows."""
    sample = draw(Position(step=9), (4_000_000,)).abs()
    for bound in (3.0, 4.0, 4.5):
        expected = 4e6 * 2 * stats.norm.sf(bound)
        assert abs(int((sample > bound).sum()) - expected) < 5 * np.sqrt(expected)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("count", [1, 7, CHUNK, 3 * CHUNK + 5])
def test_noise_is_the_streams_numbers_however_many_threads(count, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        total = torch.ones(count)
        add_gaussian_noise_(total, standard_deviation=0.5, stream=STREAM, step=4, parameter=6)
    finally:
        torch.set_num_threads(before)
    expected = 1 + 0.5 * draw(Position(step=4, parameter=6), (count,))
    assert torch.equal(total, expected)


def test_the_three_streams_of_a_run_are_independent():
    streams = RandomStreams.from_seed(5)
    drawn = [draw(Position(), stream=s) for s in (streams.noise, streams.sketch, streams.sampling)]
    for one, other in itertools.combinations(drawn, 2):
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / np.sqrt(1000)


def test_keys_come_from_the_system_unless_seeded():
    assert RandomStreams.from_seed(None) != RandomStreams.from_seed(None)
    assert RandomStreams.from_seed(5) == RandomStreams.from_seed(5) != RandomStreams.from_seed(6)


def test_saved_streams_continue():
    streams = RandomStreams.from_seed(None)
    assert RandomStreams.from_state_dict(streams.state_dict()) == streams


def test_zero_deviation_adds_nothing():
    total = torch.ones(3)
    add_gaussian_noise_(total, standard_deviation=0.0, stream=STREAM, step=0, parameter=0)
    assert torch.equal(total, torch.ones(3))
