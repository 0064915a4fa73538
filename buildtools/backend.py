"""setuptools' PEP 517 backend, which requires NVIDIA's compiler wheels when a build wants them.

Static requirements would make everybody download the wheels, and a build does not learn which
extras were asked for.
"""

import setuptools.build_meta as setuptools_backend
from setuptools.build_meta import *  # noqa: F403 -- the other hooks are setuptools' own
from toolkit import wanted_wheels


def get_requires_for_build_wheel(config_settings=None):
    return setuptools_backend.get_requires_for_build_wheel(config_settings) + wanted_wheels()


def get_requires_for_build_editable(config_settings=None):
    return setuptools_backend.get_requires_for_build_editable(config_settings) + wanted_wheels()
