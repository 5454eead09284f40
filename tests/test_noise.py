"""Streams: positions never repeat each other, and repeat themselves."""

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from dprc.noise import Position, RandomStreams, Stream, add_gaussian_noise_

pytestmark = pytest.mark.filterwarnings("ignore:privacy_seed")
CPU = torch.device("cpu")
STREAM = Stream((11, 12))


def draw(position, shape=(1000,), stream=STREAM):
    return stream.normal(shape, position, device=CPU)


def test_a_position_gives_the_same_numbers_whatever_came_before():
    first = draw(Position(step=3))
    draw(Position(step=2), (77,))
    assert torch.equal(draw(Position(step=3)), first)
    assert torch.equal(draw(Position(step=3), (10,)), first[:10])


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
