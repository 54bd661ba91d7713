"""What all tests of real engines share."""

from pathlib import Path

import pytest

from splitwave.demo_model import DemoModelOptions, Variant, build


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two-layer random model; built in a second."""
    model = tmp_path_factory.mktemp("models") / "tiny"
    build(model, DemoModelOptions(variant=Variant.TINY), lambda line: None)
    return model
