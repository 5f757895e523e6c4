import pytest
from hypothesis import settings

from penstock.samples import write_sample

settings.register_profile("any machine", deadline=None)  # a busy one is slow, and not wrong
settings.load_profile("any machine")

SMALL = {"width": 256, "height": 48, "state_hz": 100, "camera_hz": 30}


@pytest.fixture(scope="session")
def samples(tmp_path_factory):
    """Make small recordings once, by their settings."""
    made = {}
    folder = tmp_path_factory.mktemp("samples")

    def make(name="take.bag", **settings):
        key = (name, *sorted((k, str(v)) for k, v in settings.items()))
        if key not in made:
            place = folder / str(len(made))
            place.mkdir()
            made[key] = write_sample(place / name, **{**SMALL, "seconds": 4, **settings})
        return made[key]

    return make
