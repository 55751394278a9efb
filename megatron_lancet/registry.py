"""The features of a run, a line each. Only entry points of the command line import this file."""

from megatron_lancet.feature import Feature
from megatron_lancet.lab.causes.feature import CAUSES
from megatron_lancet.lab.views.feature import VIEWS
from megatron_lancet.testkit.mock.run import MOCKED_WORLD

FEATURES: tuple[Feature, ...] = (CAUSES, VIEWS, MOCKED_WORLD)
