"""Every number that has bounds: what is outside is one line that names the flag, what is inside is kept as it is."""

import math
import tempfile
from pathlib import Path

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lockstep.config.cli import parse, to_toml
from lockstep.config.schema import _AUTO_VALUES, BOUNDS, Config, flag, lookup
from lockstep.errors import ConfigError

PLAIN = Config()


def is_whole(name):
    return isinstance(lookup(PLAIN, name), int)


@st.composite
def outside(draw):
    name = draw(st.sampled_from(sorted(BOUNDS)))
    least, most, what = BOUNDS[name]
    if is_whole(name):
        below, above = st.integers(-(10**20), least - 1), st.integers(most + 1, 10**20)
    else:
        below = st.floats(max_value=math.nextafter(least, -math.inf))
        above = st.floats(min_value=math.nextafter(most, math.inf)) | st.just(math.nan)
    value = draw(below | above)
    assume(value != _AUTO_VALUES.get(name))
    return name, value, what


@st.composite
def inside(draw):
    name = draw(st.sampled_from(sorted(BOUNDS)))
    least, most, what = BOUNDS[name]
    return name, draw(st.integers(least, most) if is_whole(name) else st.floats(least, most)), what


@given(outside())
@settings(deadline=None)
def test_value_outside_its_bounds_is_one_line_with_the_flag(case):
    name, value, what = case
    try:
        parse([f"{flag(name)}={value!r}"])
    except ConfigError as error:
        line = str(error)
        assert line.startswith(flag(name) + " ")
        assert line.endswith(what)
        assert "\n" not in line
    else:
        raise AssertionError(f"{name} = {value!r} was taken")


@given(inside())
@settings(max_examples=60, deadline=None)
def test_value_inside_its_bounds_is_accepted_and_read_back(case):
    """Some go with others alone, and that line says so; never that the number is not what it must be."""
    name, value, what = case
    try:
        config = parse([f"{flag(name)}={value!r}"])
    except ConfigError as error:
        assert what not in str(error)
        assert "\n" not in str(error)
        return
    assert lookup(config, name) == value
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.toml"
        path.write_text(to_toml(config), encoding="utf-8")
        assert parse(["--config", str(path)]) == config
