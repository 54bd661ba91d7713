"""Small mixture-of-experts models that vLLM serves, built here from what a package registry has.

Importing this loads no numpy and no model code: the command line asks for paths
at every start and builds once.
"""

from splitwave.demo_model.build import BuildResult, build
from splitwave.demo_model.recipe import DemoModelError, DemoModelOptions, Variant, default_dir

__all__ = [
    "BuildResult",
    "DemoModelError",
    "DemoModelOptions",
    "Variant",
    "build",
    "default_dir",
]
